"""Twin of the rotary embedding: angles from their meaning, the rotation in its float order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jit.kernels.registry import ROPE_NEOX

F32 = NDArray[np.float32]


def rope_angles(positions: NDArray[np.int64], freqs: NDArray[np.float64], factor: float) -> F32:
    """float32[n_rows, n_half, 2]: factor * (cos, sin) of position * freq, rounded once."""
    angles = positions[:, None] * freqs
    return (np.stack([np.cos(angles), np.sin(angles)], axis=-1) * np.float64(factor)).astype(np.float32)


def rotate(x: F32, angles: F32, n_rot: int, mode: int) -> F32:
    """The first n_rot elements of the last axis rotated by angles float32[n_rot / 2, 2], the rest as it is.

    Pairs are (i, i + n_rot/2) for ROPE_NEOX, else (2i, 2i + 1); a' = a*cos - b*sin, b' = a*sin + b*cos.
    """
    half = n_rot // 2
    firsts = np.arange(half) if mode == ROPE_NEOX else 2 * np.arange(half)
    seconds = firsts + (half if mode == ROPE_NEOX else 1)
    c, s = angles[:, 0], angles[:, 1]
    a, b = x[..., firsts], x[..., seconds]
    y = x.copy()
    y[..., firsts] = a * c - b * s
    y[..., seconds] = a * s + b * c
    return y
