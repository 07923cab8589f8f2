"""Twin of the transcendental functions: their definition in float64."""

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def exp(x: NDArray[np.float32]) -> F64:
    """e**x."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(x.astype(np.float64))


def sigmoid(x: NDArray[np.float32]) -> F64:
    """1 / (1 + e**-x)."""
    return 1 / (1 + exp(-x))


def silu(x: NDArray[np.float32]) -> F64:
    """x / (1 + e**-x)."""
    return x * sigmoid(x)


def sincos(x: F64) -> tuple[F64, F64]:
    """(sin x, cos x)."""
    return np.sin(x), np.cos(x)
