"""The ops `route`, a row's router logits -> the experts it goes to and their weights, and `route_tail`.

Owns probabilities and selection, and which choices `route_tail` leaves out. By mode p is
  ROUTE_SOFTMAX      exp(l - max) / sum, the sum in 8 lanes (expert mod 8) ascending, then the tree of `sum8`
  ROUTE_SIGMOID      1 / (1 + exp(-l))
  ROUTE_TOP_SOFTMAX  l itself
An expert's key is p, or p + bias; of several groups only the best n_group_used keep theirs, a group's score
being the sum of its two largest keys. The n_used largest keys are chosen in descending order; ties go to the
lower id, of groups too. weight = p, or the softmax of the chosen p by rank (ROUTE_TOP_SOFTMAX); then `norm_w`
divides by the sum of the weights by rank, at least WEIGHT_SUM_MIN; then times `w_scale`.

A key that is no number counts as the lowest float32, so that no id is ever invalid; its weight stays NaN. In
ROUTE_SOFTMAX a NaN or +inf, or no finite logit, makes all of them so: the lowest ids with NaN weights.
"""

import numpy as np

from strata_jit.kernels import abi
from strata_jit.kernels._jit import inline_kernel, kernel, op
from strata_jit.kernels.atomics import fetch_add, load64, store64
from strata_jit.kernels.grouping import is_expert
from strata_jit.kernels.mathx import exp8, sigmoid8
from strata_jit.kernels.registry import (
    ROUTE_GIVEN,
    ROUTE_SIGMOID,
    ROUTE_SOFTMAX,
    ROUTE_TOP_SOFTMAX,
    arg_index,
)
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
WEIGHT_SUM_MIN = np.float32(6.103515625e-5)
"""Smallest normal f16; ggml's bound on the sum of the weights."""
LOWEST_KEY = np.finfo(np.float32).min
"""Key of what is no number or below every float32."""
TAKEN = np.float32(-np.inf)
"""Key of an expert that cannot be chosen (any more): below every other."""


@inline_kernel
def n_octets(n):
    """Groups of eight that hold n values."""
    return (n + 7) // 8


@inline_kernel
def softmax(x, n, p):
    """float32[n] at `p` from float32[n] at `x`, which may be `p`; both have room for whole octets."""
    largest = splat8(TAKEN)
    for g in range(n_octets(n)):
        largest = max8(keep_lanes8(load8(x + 32 * g), n - 8 * g, splat8(TAKEN)), largest)
    top, sums = splat8(hmax8(largest)), splat8(np.float32(0))
    for g in range(n_octets(n)):
        e = exp8(load8(x + 32 * g) - top)
        store8(p + 32 * g, e)
        sums = sums + keep_lanes8(e, n - 8 * g, splat8(np.float32(0)))
    total = splat8(sum8(sums))
    for g in range(n_octets(n)):
        store8(p + 32 * g, load8(p + 32 * g) / total)


@inline_kernel
def probabilities(mode, logits, n_expert, p):
    """float32[n_expert] at `p`, by mode."""
    if mode == ROUTE_SOFTMAX:
        softmax(logits, n_expert, p)
        return
    for g in range(n_octets(n_expert)):
        x = load8(logits + 32 * g)
        if mode == ROUTE_SIGMOID:
            x = sigmoid8(x)
        store8(p + 32 * g, x)


# --- keys: float32[8 * n_octets], then float32[n_octets], the largest of each octet ------------------------


@inline_kernel
def index_keys(keys, n):
    """Close the keys' last octet, and note the largest key of each."""
    for g in range(n_octets(n)):
        octet = keep_lanes8(load8(keys + 32 * g), n - 8 * g, splat8(TAKEN))
        store8(keys + 32 * g, octet)
        store_f32(keys + 32 * n_octets(n) + 4 * g, hmax8(octet))


@inline_kernel
def expert_keys(p, bias, n_expert, keys):
    """Key of every expert; `bias`: address of float32[n_expert] with room for whole octets, or 0."""
    for g in range(n_octets(n_expert)):
        key = load8(p + 32 * g)
        if bias != 0:
            key = key + load8(bias + 32 * g)
        store8(keys + 32 * g, max8(key, splat8(LOWEST_KEY)))
    index_keys(keys, n_expert)


@inline_kernel
def take_largest(keys, n):
    """Index of the largest of n keys, the lowest of equal ones; it is marked as taken."""
    group, key, tops = 0, TAKEN, keys + 32 * n_octets(n)
    for g in range(n_octets(n)):
        if load_f32(tops + 4 * g) > key:
            group, key = g, load_f32(tops + 4 * g)
    index = 8 * group
    while load_f32(keys + 4 * index) < key:
        index += 1
    store_f32(keys + 4 * index, TAKEN)
    store_f32(tops + 4 * group, hmax8(load8(keys + 32 * group)))
    return index


@inline_kernel
def keep_best_groups(keys, n_expert, n_group, n_group_used, scores):
    """Take all experts but those of the best groups; at `scores` room for the keys of n_group."""
    size = n_expert // n_group
    for group in range(n_group):
        best, second = TAKEN, TAKEN
        for expert in range(group * size, (group + 1) * size):
            key = load_f32(keys + 4 * expert)
            if key > best:
                best, second = key, best
            elif key > second:
                second = key
        score = best + second
        store_f32(scores + 4 * group, score if score > LOWEST_KEY else LOWEST_KEY)
    index_keys(scores, n_group)
    for _ in range(n_group_used):
        take_largest(scores, n_group)
    for expert in range(n_expert):
        if load_f32(scores + 4 * (expert // size)) > TAKEN:
            store_f32(keys + 4 * expert, TAKEN)
    index_keys(keys, n_expert)


# --- rows -------------------------------------------------------------------------------------------------


@inline_kernel
def weigh(chosen, n_used, norm_w, w_scale, weights):
    """float32 weights[n_used] from what the chosen experts have."""
    total = np.float32(0)
    for rank in range(n_used):
        total += load_f32(chosen + 4 * rank)
    divisor = total if total > WEIGHT_SUM_MIN else WEIGHT_SUM_MIN
    for rank in range(n_used):
        weight = load_f32(chosen + 4 * rank)
        if norm_w != 0:
            weight = weight / divisor
        store_f32(weights + 4 * rank, weight * w_scale)


@kernel
def route_row(args, logits, room, ids, weights):
    """int64 ids[n_used] and float32 weights[n_used] of one row of logits.

    `room`: bytes for p float32[8 * n_octets], the experts' keys, and the groups' keys.
    """
    n_expert, n_used, mode = word(args, ARG.n_expert), word(args, ARG.n_used), word(args, ARG.mode)
    p, keys = room, room + 32 * n_octets(n_expert)
    probabilities(mode, logits, n_expert, p)
    bias = word(args, ARG.bias)
    expert_keys(p, 0 if bias == 0 else word(bias, abi.TENSOR_ADDR), n_expert, keys)
    if word(args, ARG.n_group) > 1:
        scores = keys + 36 * n_octets(n_expert)
        keep_best_groups(keys, n_expert, word(args, ARG.n_group), word(args, ARG.n_group_used), scores)
    for rank in range(n_used):
        store_i64(ids + 8 * rank, take_largest(keys, n_expert))
    chosen = keys  # whose room is free now
    for rank in range(n_used):
        store_f32(chosen + 4 * rank, load_f32(p + 4 * load_i64(ids + 8 * rank)))
    if mode == ROUTE_TOP_SOFTMAX:
        softmax(chosen, n_used, chosen)
    weigh(chosen, n_used, word(args, ARG.norm_w), float_word(args, ARG.w_scale), weights)


@inline_kernel
def route(args, scratch, row, ids, weights):
    """Route one row of the logits buffer."""
    logits = word(args, ARG.logits) + row * word(args, ARG.logits_stride)
    room = scratch + (12 * word(args, ARG.n_used) + 63) // 64 * 64  # scratch.probabilities_offset
    route_row(args, logits, room, ids, weights)


@op
def route_one(control, args, thread):
    """Every thread routes the only row for itself, into its scratch."""
    ids = word(thread, abi.THREAD_SCRATCH) + word(args, ARG.route_scratch)
    n_used = word(args, ARG.n_used)
    weights = ids + 8 * n_used
    if word(args, ARG.mode) != ROUTE_GIVEN:
        route(args, ids, 0, ids, weights)
        return
    for rank in range(n_used):
        store_i64(ids + 8 * rank, load_i64(word(args, ARG.ids) + 8 * rank))
        store_f32(weights + 4 * rank, load_f32(word(args, ARG.weights) + 4 * rank))


@op
def route_many(control, args, thread):
    """The team shares the rows; ids and weights go to the shared buffers."""
    if word(args, ARG.mode) == ROUTE_GIVEN:
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
