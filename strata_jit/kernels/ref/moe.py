"""Twin of a block of experts: its definition on dense matrices, and the float order of its weighted sum."""

from __future__ import annotations

import numpy as np

from strata_jit.kernels.ref.blocks import Array
from strata_jit.kernels.ref.fma import fma32
from strata_jit.kernels.ref.mathx import silu


def gate_up(gate: Array, up: Array) -> Array:
    """float64 silu(gate) * up of float32 dot products of any shape."""
    return np.asarray(silu(gate) * up.astype(np.float64))


def combine(x: Array, d: Array, ids: Array, weights: Array) -> Array:
    """float32[n_embd]: x + y, where y = fma(weights[rank], d[rank], y) from 0 over the ranks, ascending.

    x float32[n_embd]; d float32[n_used, n_embd], an expert's output per rank; ranks with a negative id are
    left out. Exact: what the ops must give bit for bit.
    """
    y = np.zeros_like(x)
    for rank, expert in enumerate(ids):
        if expert >= 0:
            y = fma32(weights[rank], d[rank], y)
    return np.asarray(x + y)


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
