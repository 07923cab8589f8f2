"""Twin of the router, bit by bit: probabilities, keys, groups, and weights in their float order."""

from __future__ import annotations

import numpy as np

from strata_jit.kernels.ref.blocks import Array
from strata_jit.kernels.ref.mathx import exp_f32, sigmoid_f32
from strata_jit.kernels.ref.norm import sum_lanes
from strata_jit.kernels.registry import ROUTE_SIGMOID, ROUTE_SOFTMAX, ROUTE_TOP_SOFTMAX

WEIGHT_SUM_MIN = np.float32(2.0**-14)
LOWEST_KEY = np.finfo(np.float32).min


def softmax(x: Array) -> Array:
    """float32: exp(x - max) / sum, the sum in eight lanes (index mod 8), ascending. The maximum skips NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        e = exp_f32(x - np.fmax.reduce(x, initial=np.float32(-np.inf)))
        lanes = np.zeros(8, np.float32)
        for k in range(0, len(e), 8):
            part = e[k : k + 8]
            lanes = lanes + np.pad(part, (0, 8 - len(part)))
        return np.asarray(e / sum_lanes(lanes))


def route(
    logits: Array,
    n_used: int,
    norm_w: bool,
    w_scale: float,
    mode: int = ROUTE_SOFTMAX,
    bias: Array | None = None,
    n_group: int = 1,
    n_group_used: int = 1,
) -> tuple[Array, Array]:
    """(int64 ids[n_used], float32 weights[n_used]) of one row, float32 logits[n_expert].

    The largest keys p (+ bias) in descending order, ties to the lower id; what is no number or below every
    float32 counts as the lowest of them. Groups that are not among the best are out.
    """
    p = softmax(logits) if mode == ROUTE_SOFTMAX else sigmoid_f32(logits) if mode == ROUTE_SIGMOID else logits
    ids = np.argsort(-_keys(p, bias, n_group, n_group_used), kind="stable")[:n_used]
    weights = softmax(p[ids]) if mode == ROUTE_TOP_SOFTMAX else p[ids]
    with np.errstate(invalid="ignore", over="ignore"):
        if norm_w:
            total = np.float32(0)
            for weight in weights:
                total = total + weight
            weights = weights / (total if total > WEIGHT_SUM_MIN else WEIGHT_SUM_MIN)
        return ids.astype(np.int64), weights * np.float32(w_scale)


def _keys(p: Array, bias: Array | None, n_group: int, n_group_used: int) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        keys = _clamped(p if bias is None else p + bias)
    if n_group > 1:
        by_group = keys.reshape(n_group, -1)
        best = np.sort(by_group, axis=1)[:, -2:]
        with np.errstate(over="ignore"):
            scores = _clamped(best[:, 0] + best[:, 1])
        out = np.argsort(-scores, kind="stable")[n_group_used:]
        by_group[out] = -np.inf
    return keys


def _clamped(keys: Array) -> Array:
    return np.where(keys > LOWEST_KEY, keys, LOWEST_KEY)
