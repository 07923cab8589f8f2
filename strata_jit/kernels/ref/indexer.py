"""Twins of the indexer of block-sparse attention, bit by bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jit.kernels.ref.fma import fma32
from strata_jit.kernels.ref.norm import rms_norm
from strata_jit.kernels.ref.rope import rotate
from strata_jit.kernels.registry import ROPE_NEOX

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]


def block_keys(raw: F16, ratio: int, norm: F32, angles: F32, n_rot: int, eps: float) -> F32:
    """[n // ratio, head_dim]: mean of `ratio` raw keys, RMS norm, rotated as the block's first position.

    raw: [n, head_dim]; angles: [n, n_rot / 2, 2] of every position.
    """
    keys = []
    for first in range(0, len(raw) // ratio * ratio, ratio):
        total = raw[first].astype(np.float32)
        for key in raw[first + 1 : first + ratio]:
            total = total + key.astype(np.float32)
        mean = rms_norm(total / np.float32(ratio), norm, eps)
        keys.append(rotate(mean[None], angles[first], n_rot, ROPE_NEOX)[0])
    return np.array(keys, np.float32).reshape(-1, raw.shape[1])


def scores(queries: F32, keys: F32) -> F32:
    """[n_blocks]: sum over the heads, ascending, of max(q . k, 0); queries [n_head, head_dim]."""
    total = np.zeros(len(keys), np.float32)
    for query in queries:
        dots = np.zeros(len(keys), np.float32)
        for d, q in enumerate(query):
            dots = fma32(q, keys[:, d], dots)
        total = total + np.maximum(dots, np.float32(0))
    return total


def select(score: F32, n_best: int) -> NDArray[np.bool_]:
    """[n_blocks]: the n_best highest, of equal ones the lower index; all if there are no more."""
    chosen = np.zeros(len(score), bool)
    chosen[np.argsort(-score, kind="stable")[:n_best]] = True
    return chosen
