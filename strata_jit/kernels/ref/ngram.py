"""Twins of the n-gram embedding's ops, bit by bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jit.kernels.ref.fma import fma32
from strata_jit.kernels.ref.mathx import sigmoid_f32, silu_f32
from strata_jit.kernels.ref.norm import rms_norm, sum_lanes

F32 = NDArray[np.float32]


def dot_lanes(x: F32, y: F32) -> F32:
    """Dot products along the last axis, in eight lanes (k mod 8), fused, ascending."""
    lanes = np.zeros((*x.shape[:-1], 8), np.float32)
    for k in range(0, x.shape[-1], 8):
        lanes = fma32(x[..., k : k + 8], y[..., k : k + 8], lanes)
    return sum_lanes(lanes)


def gate(streams: F32, key: F32, key_norm: F32, query_norm: F32, eps: float) -> F32:
    """[n_stream]: sigmoid(sign(s) * sqrt(max(|s|, 1e-6))), s from normed keys and streams [n_stream, n]."""
    n = np.float32(streams.shape[-1])
    s = dot_lanes(rms_norm(key, key_norm, eps), rms_norm(streams, query_norm, eps)) / np.sqrt(n)
    return sigmoid_f32(np.sign(s) * np.sqrt(np.maximum(np.abs(s), np.float32(1e-6))))


def gated(value: F32, gates: F32, conv_norm: F32, eps: float) -> tuple[F32, F32]:
    """(G, N), each [n_stream, n]; value [n], conv_norm [n_stream, n]."""
    g = gates[:, None] * value
    return g, rms_norm(g, conv_norm, eps)


def conv(normed: F32, weight: F32, dilation: int) -> F32:
    """[n_rows, n]: silu of the dilated causal convolution of N over the rows; weight [n, n_tap]."""
    out = np.zeros_like(normed)
    n_tap = weight.shape[1]
    for tap in range(n_tap):
        back = (n_tap - 1 - tap) * dilation
        if back < len(normed):
            out[back:] = fma32(weight[:, tap], normed[: len(normed) - back], out[back:])
    return silu_f32(out)
