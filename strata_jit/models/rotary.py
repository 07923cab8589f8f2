"""Frequencies of rotary position embeddings, the same bits on every machine."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray


def inverse_frequencies(base: float, n_rot: int, factor: float) -> NDArray[np.float64]:
    """float64[n_rot / 2]: base ** (-2 i / n_rot) / factor, correctly rounded on every machine.

    By decimal arithmetic: libm's pow may differ in the last bit from CPU to CPU.
    """
    with localcontext() as context:
        context.prec = 40
        exponents = (Decimal(-2 * i) / Decimal(n_rot) for i in range(n_rot // 2))
        return np.array([float(Decimal(base) ** e / Decimal(factor)) for e in exponents])
