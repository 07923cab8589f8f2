"""Twin of a block of experts: its definition on dense matrices, and the float order of its weighted sum."""

from __future__ import annotations

import numpy as np

from strata_jit.kernels.ref.blocks import Array
from strata_jit.kernels.ref.fma import fma32
from strata_jit.kernels.ref.mathx import exp_f32, silu_f32
from strata_jit.kernels.registry import GLU_SWIGLU


def glu(activation: int, gate: Array, up: Array) -> Array:
    """float32 of any shape, bit by bit as the kernels: silu(gate) * up, or gpt-oss's activation."""
    limit, one = np.float32(7), np.float32(1)
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == GLU_SWIGLU:
            return silu_f32(gate) * up
        return np.asarray((g / (one + exp_f32(-(np.float32(1.702) * g)))) * (u + one))


def combine(
    x: Array | None, d: Array, ids: Array, weights: Array, scale: float = 1, shared: Array | None = None
) -> Array:
    """float32[n_embd]: x + shared * scale + y * scale; y = 0, then y = fma(weights[r], d[r], y) by rank r.

    x float32[n_embd], None for nothing to add to; d float32[n_used, n_embd], an expert's output per rank;
    ranks with a negative id are left out; shared float32[n_embd], the shared expert's output.
    """
    y = np.zeros(d.shape[1], np.float32)
    for rank, expert in enumerate(ids):
        if expert >= 0:
            y = fma32(weights[rank], d[rank], y)
    for term in (shared, y):
        if term is not None:
            scaled = term * np.float32(scale)
            x = scaled if x is None else x + scaled
    return np.asarray(x)


def experts(x: Array, gate: Array, up: Array, down: Array, ids: Array, weights: Array) -> Array:
    """float64[n_embd]: sum over ranks of weight * down . (silu(gate . x) * (up . x)), ids below 0 left out.

    x [n_embd]; gate, up [n_expert, n_ff, n_embd]; down [n_expert, n_embd, n_ff]; ids, weights [n_used].
    """
    out = np.zeros(down.shape[1])
    x = x.astype(np.float64)
    for expert, weight in zip(ids, weights, strict=True):
        if expert >= 0:
            hidden = gate[expert] @ x
            out += weight * (down[expert] @ (hidden / (1 + np.exp(-hidden)) * (up[expert] @ x)))
    return out
