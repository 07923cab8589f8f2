"""Twins of the hyper-connection ops, bit by bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jit.kernels.ref.fma import fma32
from strata_jit.kernels.ref.mathx import sigmoid_f32
from strata_jit.kernels.ref.norm import rms_norm

F32 = NDArray[np.float32]


def combine(streams: F32, block: F32, inject: F32) -> F32:
    """[n_stream, n]: fma(2 * sigmoid(inject[c]), block, streams[c]); block [n], inject [n_stream]."""
    factor = np.float32(2) * sigmoid_f32(inject)
    return fma32(factor[:, None], block, streams)


def norm(streams: F32, weight: F32, eps: float) -> F32:
    """[n_stream, n]: RMS norm of each stream with its own weights, `weight` [n_stream, n]."""
    return rms_norm(streams, weight, eps)


def mix(xn: F32, gate: F32) -> F32:
    """[n]: mean over the streams of xn * gate, ascending, fused from the second on."""
    total = xn[0] * gate[0]
    for c in range(1, len(xn)):
        total = fma32(xn[c], gate[c], total)
    return np.asarray(total / np.float32(len(xn)), np.float32)
