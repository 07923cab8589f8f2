"""Twin of the router: softmax over all experts in float64, then the largest."""

from __future__ import annotations

import numpy as np

from strata_jit.kernels.ref.blocks import Array

WEIGHT_SUM_MIN = 2.0**-14


def route(logits: Array, n_used: int, norm_w: bool, w_scale: float) -> tuple[Array, Array]:
    """(int64 ids[n_used], float64 weights[n_used]) of one row, float32 logits[n_expert].

    Experts in descending order of probability, rounded to float32 so that what underflows is a tie; ties to
    the lower id. A row whose softmax is not a number takes the lowest ids, with NaN weights.
    """
    with np.errstate(invalid="ignore", under="ignore"):
        e = np.exp(logits.astype(np.float64) - logits.max())
        p = e / e.sum()
        ids = np.argsort(-p.astype(np.float32), kind="stable")[:n_used]
    weights = p[ids]
    if norm_w:
        weights = weights / np.maximum(weights.sum(), WEIGHT_SUM_MIN)
    return ids.astype(np.int64), weights * w_scale
