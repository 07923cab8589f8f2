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
Bool = NDArray[np.bool_]
Partial = tuple[F32, F32, F32]
"""m [n_head], l [n_head], o [n_head, value_dim] of one block."""


def attend(
    q: F32,
    k: F16,
    v: F16,
    scale: float,
    window: int = 0,
    sinks: F32 | None = None,
    selected: Bool | None = None,
) -> F32:
    """float32[n_head, value_dim], bit by bit as the kernels.

    q: [n_head, head_dim]; k, v: [n_positions, n_head_kv, head_dim or value_dim]; n_head / n_head_kv heads
    share a kv head. Of the positions the last `window` are seen (0: all), or those `selected`: [n_positions].
    sinks: [n_head].
    """
    seen = visible(len(k), window, selected)
    partials = []
    for b in range(0, len(k), KV_BLOCK):
        block = slice(b, b + KV_BLOCK)
        if seen[block].any():
            partials.append(attend_block(q, k[block], v[block], scale, seen[block]))
    return merge(partials, sinks)


def visible(n: int, window: int, selected: Bool | None) -> Bool:
    """bool[n]: the positions that take part."""
    if selected is not None:
        return selected
    return np.arange(n) >= (n - window if window else 0)


def attend_block(q: F32, k: F16, v: F16, scale: float, seen: Bool) -> Partial:
    """The part of one block of positions; `seen`: which of them take part."""
    group = len(q) // k.shape[1]
    keys = np.repeat(k[seen].astype(np.float32), group, axis=1).transpose(2, 1, 0)
    values = np.repeat(v[seen].astype(np.float32), group, axis=1)
    scores = np.zeros(keys.shape[1:], np.float32)
    for d, key in enumerate(keys):
        scores = fma32(q[:, d, None], key, scores)
    scores = scores * np.float32(scale)
    m = scores.max(axis=1)
    p = exp_f32(scores - m[:, None])
    padded = np.zeros((len(q), (len(k) + 7) // 8, 8), np.float32)
    padded.reshape(len(q), -1)[:, : len(k)][:, seen] = p
    lanes = np.zeros((len(q), 8), np.float32)
    for eight in padded.transpose(1, 0, 2):
        lanes = lanes + eight
    o = np.zeros((len(q), v.shape[2]), np.float32)
    for position, value in enumerate(values):
        o = fma32(p[:, position, None], value, o)
    return m, sum_lanes(lanes), o


def merge(partials: list[Partial], sinks: F32 | None = None) -> F32:
    """Blocks in ascending order, then the sinks: rescale to the larger maximum and add; at the end O / L."""
    m, total, o = partials[0]
    for block_m, block_total, block_o in partials[1:]:
        larger = np.maximum(m, block_m)
        a, b = exp_f32(m - larger), exp_f32(block_m - larger)
        m, total = larger, fma32(block_total, b, total * a)
        o = fma32(block_o, b[:, None], o * a[:, None])
    if sinks is not None:
        larger = np.maximum(m, sinks)
        a, b = exp_f32(m - larger), exp_f32(sinks - larger)
        total, o = total * a + b, o * a[:, None]
    return o / total[:, None]


def attend_f64(
    q: F32,
    k: F16,
    v: F16,
    scale: float,
    window: int = 0,
    sinks: F32 | None = None,
    selected: Bool | None = None,
) -> F64:
    """The same in float64, without blocks."""
    group, seen = len(q) // k.shape[1], visible(len(k), window, selected)
    keys = np.repeat(k[seen].astype(np.float64), group, axis=1)
    values = np.repeat(v[seen].astype(np.float64), group, axis=1)
    scores = np.einsum("hd,phd->hp", q.astype(np.float64), keys) * np.float64(np.float32(scale))
    if sinks is not None:
        scores = np.concatenate([scores, sinks.astype(np.float64)[:, None]], axis=1)
        values = np.concatenate([values, np.zeros_like(values[:1])])
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hp,phd->hd", p / p.sum(axis=1, keepdims=True), values)
