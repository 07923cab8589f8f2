"""Twins of attention over a cache of float16 keys and values: in the float order, and in float64.

Both take one row's queries and the keys and values of all its positions, its own included, so they know no
block table, node or chunk.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jit.kernels.abi import KV_BLOCK
from strata_jit.kernels.ref.fma import fma32
from strata_jit.kernels.ref.mathx import exp_f32
from strata_jit.kernels.ref.norm import sum_lanes

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Partial = tuple[F32, F32, F32]
"""m [n_head], l [n_head], o [n_head, head_dim] of one block."""


def attend(q: F32, k: F16, v: F16, scale: float) -> F32:
    """float32[n_head, head_dim], bit by bit as the kernels.

    q: [n_head, head_dim]; k, v: [n_positions, n_head_kv, head_dim]; n_head / n_head_kv heads share a kv head.
    """
    blocks = range(0, len(k), KV_BLOCK)
    return merge([attend_block(q, k[b : b + KV_BLOCK], v[b : b + KV_BLOCK], scale) for b in blocks])


def attend_block(q: F32, k: F16, v: F16, scale: float) -> Partial:
    """The part of one block of positions."""
    group = len(q) // k.shape[1]
    keys = np.repeat(k.astype(np.float32), group, axis=1).transpose(2, 1, 0)
    values = np.repeat(v.astype(np.float32), group, axis=1)
    scores = np.zeros(keys.shape[1:], np.float32)
    for d, key in enumerate(keys):
        scores = fma32(q[:, d, None], key, scores)
    scores = scores * np.float32(scale)
    m = scores.max(axis=1)
    p = exp_f32(scores - m[:, None])
    padded = np.zeros((len(q), (p.shape[1] + 7) // 8, 8), np.float32)
    padded.reshape(len(q), -1)[:, : p.shape[1]] = p
    lanes = np.zeros((len(q), 8), np.float32)
    for eight in padded.transpose(1, 0, 2):
        lanes = lanes + eight
    o = np.zeros_like(q)
    for position, value in enumerate(values):
        o = fma32(p[:, position, None], value, o)
    return m, sum_lanes(lanes), o


def merge(partials: list[Partial]) -> F32:
    """Blocks in ascending order: rescale to the larger maximum and add; at the end O / L."""
    m, total, o = partials[0]
    for block_m, block_total, block_o in partials[1:]:
        larger = np.maximum(m, block_m)
        a, b = exp_f32(m - larger), exp_f32(block_m - larger)
        m, total = larger, fma32(block_total, b, total * a)
        o = fma32(block_o, b[:, None], o * a[:, None])
    return o / total[:, None]


def attend_f64(q: F32, k: F16, v: F16, scale: float) -> F64:
    """The same in float64, without blocks."""
    group = len(q) // k.shape[1]
    keys = np.repeat(k.astype(np.float64), group, axis=1)
    values = np.repeat(v.astype(np.float64), group, axis=1)
    scores = np.einsum("hd,phd->hp", q.astype(np.float64), keys) * np.float64(np.float32(scale))
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hp,phd->hd", p / p.sum(axis=1, keepdims=True), values)
