"""The ops `route`, a row's router logits -> the experts it goes to and their weights, and `route_tail`.

Owns softmax and selection, and which choices `route_tail` leaves out. p = exp(l - max) / sum, the sum in 8
lanes (expert mod 8) ascending, then the tree of `sum8`; the n_used largest p in descending order, ties to the
lower id; `norm_w` divides by their sum in that order, at least WEIGHT_SUM_MIN; then times `w_scale`. Logits
with a NaN or +inf, or without a finite one, give the lowest ids with NaN weights: the fault stays visible and
no id is invalid.
"""

import numpy as np

from strata_jit.kernels import abi
from strata_jit.kernels._jit import inline_kernel, kernel, op
from strata_jit.kernels.atomics import fetch_add, load64, store64
from strata_jit.kernels.grouping import is_expert
from strata_jit.kernels.mathx import exp8
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.vec import (
    float_word,
    hmax8,
    keep_lanes8,
    load8,
    load_f32,
    load_i64,
    max8,
    splat8,
    store8,
    store_f32,
    store_i64,
    sum8,
    word,
)

ARG = arg_index("route")
TAIL = arg_index("route_tail")
NO_EXPERT = -1
GIVEN = 3
"""Mode: ids and weights are in the shared buffers already (0: softmax over all, then the largest)."""
WEIGHT_SUM_MIN = np.float32(6.103515625e-5)
"""Smallest normal f16; ggml's bound on the sum of the weights."""
NAN = np.float32(np.nan)
LOWEST = np.float32(-np.inf)
NAN_KEY = np.float32(-1)
"""Stands for a NaN probability in the selection: below every number, above what is taken."""
TAKEN = np.float32(-2)


@inline_kernel
def probabilities_at(route_scratch, n_used):
    """Address of the probabilities, as `scratch.probabilities_offset`."""
    return route_scratch + (12 * n_used + 63) // 64 * 64


@inline_kernel
def softmax(logits, n_expert, p):
    """At `p` float32[8 * n_groups] selection keys, then float32[n_groups], the largest of each group."""
    n_groups = (n_expert + 7) // 8
    largest = splat8(LOWEST)
    for g in range(n_groups):
        largest = max8(keep_lanes8(load8(logits + 32 * g), n_expert - 8 * g, splat8(LOWEST)), largest)
    top, sums = splat8(hmax8(largest)), splat8(np.float32(0))
    for g in range(n_groups):
        e = exp8(load8(logits + 32 * g) - top)
        store8(p + 32 * g, e)
        sums = sums + keep_lanes8(e, n_expert - 8 * g, splat8(np.float32(0)))
    total = splat8(sum8(sums))
    for g in range(n_groups):
        keys = max8(load8(p + 32 * g) / total, splat8(NAN_KEY))
        keys = keep_lanes8(keys, n_expert - 8 * g, splat8(TAKEN))
        store8(p + 32 * g, keys)
        store_f32(p + 32 * n_groups + 4 * g, hmax8(keys))


@inline_kernel
def take_largest(p, n_groups):
    """(id, key) of the largest key left, the lowest id of equal ones; it is marked as taken."""
    group, key = 0, TAKEN
    for g in range(n_groups):
        if load_f32(p + 32 * n_groups + 4 * g) > key:
            group, key = g, load_f32(p + 32 * n_groups + 4 * g)
    expert = 8 * group
    while load_f32(p + 4 * expert) < key:
        expert += 1
    store_f32(p + 4 * expert, TAKEN)
    store_f32(p + 32 * n_groups + 4 * group, hmax8(load8(p + 32 * group)))
    return expert, key


@kernel
def route_row(logits, n_expert, n_used, norm_w, w_scale, p, ids, weights):
    """int64 ids[n_used] and float32 weights[n_used] of one row of logits; `p`: room for probabilities."""
    softmax(logits, n_expert, p)
    total = np.float32(0)
    for rank in range(n_used):
        expert, key = take_largest(p, (n_expert + 7) // 8)
        weight = key if key >= 0 else NAN
        total += weight
        store_i64(ids + 8 * rank, expert)
        store_f32(weights + 4 * rank, weight)
    divisor = total if total > WEIGHT_SUM_MIN else WEIGHT_SUM_MIN
    for rank in range(n_used):
        weight = load_f32(weights + 4 * rank)
        if norm_w != 0:
            weight = weight / divisor
        store_f32(weights + 4 * rank, weight * w_scale)


@inline_kernel
def route(args, scratch, row, ids, weights):
    """Route one row of the logits buffer."""
    n_expert, n_used = word(args, ARG.n_expert), word(args, ARG.n_used)
    logits = word(args, ARG.logits) + row * word(args, ARG.logits_stride)
    p = probabilities_at(scratch, n_used)
    norm_w, w_scale = word(args, ARG.norm_w), float_word(args, ARG.w_scale)
    route_row(logits, n_expert, n_used, norm_w, w_scale, p, ids, weights)


@op
def route_one(control, args, thread):
    """Every thread routes the only row for itself, into its scratch."""
    ids = word(thread, abi.THREAD_SCRATCH) + word(args, ARG.route_scratch)
    n_used = word(args, ARG.n_used)
    weights = ids + 8 * n_used
    if word(args, ARG.mode) != GIVEN:
        route(args, ids, 0, ids, weights)
        return
    for rank in range(n_used):
        store_i64(ids + 8 * rank, load_i64(word(args, ARG.ids) + 8 * rank))
        store_f32(weights + 4 * rank, load_f32(word(args, ARG.weights) + 4 * rank))


@op
def route_many(control, args, thread):
    """The team shares the rows; ids and weights go to the shared buffers."""
    if word(args, ARG.mode) == GIVEN:
        return
    scratch, n_used = word(thread, abi.THREAD_SCRATCH) + word(args, ARG.route_scratch), word(args, ARG.n_used)
    row, n_rows = word(thread, abi.THREAD_TEAM_INDEX), word(control, abi.STEP_N_ROWS)
    while row < n_rows:
        ids, weights = word(args, ARG.ids) + 8 * n_used * row, word(args, ARG.weights) + 4 * n_used * row
        route(args, scratch, row, ids, weights)
        row += word(thread, abi.THREAD_TEAM_SIZE)


@kernel
def best_ranks(ids, n_entries, n_expert, n_used, best):
    """int64[n_expert] at `best`: the lowest rank at which any row has the expert, n_used where none has."""
    for expert in range(n_expert):
        store_i64(best + 8 * expert, n_used)
    for i in range(n_entries):
        expert = load64(ids + 8 * i)
        if is_expert(expert, n_expert) and i % n_used < load_i64(best + 8 * expert):
            store_i64(best + 8 * expert, i % n_used)


@op
def route_tail_one(control, args, thread):
    """Every thread leaves the last ranks out of its own scratch; the first one counts them."""
    ids = word(thread, abi.THREAD_SCRATCH) + word(args, TAIL.route_scratch)
    skipped = 0
    for rank in range(word(args, TAIL.tail_skip), word(args, TAIL.n_used)):
        skipped += is_expert(load_i64(ids + 8 * rank), word(args, TAIL.n_expert))
        store_i64(ids + 8 * rank, NO_EXPERT)
    if word(thread, abi.THREAD_TEAM_INDEX) == 0:
        fetch_add(word(args, TAIL.skipped), skipped)


@op
def route_tail_many(control, args, thread):
    """Every thread finds each expert's best rank in the step, and the team shares the rows.

    A thread may see ids that others have taken out already: they are of experts that are left out anyway.
    """
    n_expert, n_used = word(args, TAIL.n_expert), word(args, TAIL.n_used)
    ids, n_rows = word(args, TAIL.ids), word(control, abi.STEP_N_ROWS)
    best = word(thread, abi.THREAD_SCRATCH) + word(args, TAIL.list_scratch)
    best_ranks(ids, n_rows * n_used, n_expert, n_used, best)
    skipped, row = 0, word(thread, abi.THREAD_TEAM_INDEX)
    while row < n_rows:
        for rank in range(word(args, TAIL.tail_skip), n_used):
            entry = ids + 8 * (n_used * row + rank)
            expert = load64(entry)
            if is_expert(expert, n_expert) and load_i64(best + 8 * expert) >= word(args, TAIL.tail_skip):
                store64(entry, NO_EXPERT)
                skipped += 1
        row += word(thread, abi.THREAD_TEAM_SIZE)
    if skipped > 0:
        fetch_add(word(args, TAIL.skipped), skipped)
