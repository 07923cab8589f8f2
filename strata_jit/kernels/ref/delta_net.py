"""Twins of the gated delta net: every part in its float order, and the recurrence in float64.

All take the rows of one sequence from its first on, so they know no step, unit or history.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jit.kernels.ref.fma import fma32
from strata_jit.kernels.ref.mathx import exp_f32, sigmoid_f32, silu_f32, softplus_f32
from strata_jit.kernels.ref.norm import rms_norm, sum_lanes

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def convolve(x: F32, taps: F32) -> F32:
    """silu of the causal convolution over time of x [n_rows, n_channels] with taps [n_channels, 4]."""
    n_taps = taps.shape[1]
    padded = np.concatenate([np.zeros((n_taps - 1, x.shape[1]), np.float32), x])
    y = padded[: len(x)] * taps[:, 0]
    for j in range(1, n_taps):
        y = fma32(taps[:, j], padded[j : j + len(x)], y)
    return silu_f32(y)


def normalise_length(x: F32, eps: float, scale: float = 1.0) -> F32:
    """x * (1 / sqrt(sum of squares + eps) * scale) along the last axis, a multiple of 8 long."""
    lanes = np.zeros((*x.shape[:-1], 8), np.float32)
    for i in range(0, x.shape[-1], 8):
        lanes = fma32(x[..., i : i + 8], x[..., i : i + 8], lanes)
    factor = np.float32(1) / np.sqrt(sum_lanes(lanes) + np.float32(eps)) * np.float32(scale)
    return np.asarray(x * factor[..., None])


def gates(beta: F32, alpha: F32, dt: F32, a: F32) -> tuple[F32, F32]:
    """(beta, decay) of projections [n_rows, n_head]: sigmoid(beta), exp(a * softplus(alpha + dt))."""
    return sigmoid_f32(beta), exp_f32(softplus_f32(alpha + dt) * a)


def recurrence(q: F32, k: F32, v: F32, beta: F32, decay: F32) -> F32:
    """o [n_rows, n_head, head_dim] of q, k, v alike (a q and k for every v head), gates [n_rows, n_head]."""
    n_rows, n_head, head_dim = v.shape
    state = np.zeros((head_dim, n_head, head_dim), np.float32)
    out = np.empty_like(v)
    for t in range(n_rows):
        state = state * decay[t, :, None]
        d = beta[t, :, None] * (v[t] - _by_four(k[t], state))
        state = fma32(k[t].T[:, :, None], d, state)
        out[t] = _by_four(q[t], state)
    return out


def _by_four(x: F32, state: F32) -> F32:
    """[n_head, columns]: sum over k of x[head, k] * state[k, head, column], four accumulators by k mod 4."""
    totals = np.zeros((4, *state.shape[1:]), np.float32)
    for i in range(0, len(state), 4):
        totals = fma32(x.T[i : i + 4, :, None], state[i : i + 4], totals)
    return np.asarray((totals[0] + totals[1]) + (totals[2] + totals[3]))


def gated_norm(o: F32, z: F32, weight: F32, eps: float, *, sigmoid: bool = False) -> F32:
    """RMS norm along the last axis, times silu(z) or sigmoid(z)."""
    return np.asarray(rms_norm(o, weight, eps) * (sigmoid_f32(z) if sigmoid else silu_f32(z)))


def recurrence_f64(q: F32, k: F32, v: F32, beta: F32, decay: F32) -> F64:
    """The recurrence from its definition: S = g S; d = b (v - S^T k); S = S + k d^T; o = S^T q."""
    out = np.empty(v.shape)
    for head in range(v.shape[1]):
        state = np.zeros((v.shape[2], v.shape[2]))
        for t in range(len(v)):
            key, query = k[t, head].astype(np.float64), q[t, head].astype(np.float64)
            state *= np.float64(decay[t, head])
            state += np.outer(key, np.float64(beta[t, head]) * (v[t, head] - state.T @ key))
            out[t, head] = state.T @ query
    return out
