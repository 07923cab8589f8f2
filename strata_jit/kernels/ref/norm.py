"""Twin of the RMS norm, in its float order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jit.kernels.ref.fma import fma32

F32 = NDArray[np.float32]


def sum_lanes(lanes: F32) -> F32:
    """Sum over the last axis of eight lanes: ((l0+l4)+(l2+l6))+((l1+l5)+(l3+l7))."""
    four = lanes[..., :4] + lanes[..., 4:]
    two = four[..., :2] + four[..., 2:]
    return two[..., 0] + two[..., 1]


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """(x * scale) * weight along the last axis, scale = 1 / sqrt(mean(x*x) + eps).

    The squares are summed in eight lanes (k mod 8), fused, ascending. The axis is a multiple of 8 long.
    """
    n = x.shape[-1]
    lanes = np.zeros((*x.shape[:-1], 8), np.float32)
    for k in range(0, n, 8):
        eight = x[..., k : k + 8]
        lanes = fma32(eight, eight, lanes)
    mean = sum_lanes(lanes) / np.float32(n)
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return np.asarray((x * scale[..., None]) * weight, np.float32)
