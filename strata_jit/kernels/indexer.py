"""The indexer of block-sparse attention (QSA): index keys into KV memory, scores of index blocks.

An index block is `ratio` consecutive positions, complete once the last of them is there. Its key: the mean of
the positions' raw keys as float16 (sum ascending, divided by ratio), RMS norm, rotated by the angle of its
first position. A row's score for it: the sum over the index heads, ascending, of max(q . k, 0), q normed and
rotated at the row's own position, each dot product one `fma` chain over the dimensions.

Owns the layout of index keys in a KV block: raw keys float16[256][head_dim], then block keys
float32[256 / ratio / 8][head_dim][8 index blocks]. As in attention, a row's own keys are written by its node
before anything reads them: by `index_prepare` for many rows, by `index_score` for one.
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    KV_BLOCK,
    STEP_N_ROWS,
    THREAD_INDEX,
    THREAD_N_NODES,
    THREAD_N_THREADS,
    THREAD_NODE,
    THREAD_SCRATCH,
    THREAD_TEAM_INDEX,
    THREAD_TEAM_SIZE,
)
from strata_jit.kernels.kv import HALF_BYTES, row_position, row_sequence, slot_address
from strata_jit.kernels.norm import rms_norm, vector_address
from strata_jit.kernels.registry import ROPE_NEOX, arg_index
from strata_jit.kernels.rope import rotate, write_angles
from strata_jit.kernels.team import claim, first_unit
from strata_jit.kernels.vec import (
    float_word,
    fma8,
    keep_lanes8,
    load8,
    load8_f16,
    load_f32,
    max8,
    splat8,
    store8,
    store8_f16,
    store_f32,
    word,
)

INDEX = arg_index("index_prepare")
"""Arguments that the two ops have in common, at the same places."""
A = arg_index("index_score")
ZERO = np.float32(0)
NO_SCORE = np.float32(-1)
"""Stands behind the last score up to the end of its octet: below every score."""
OCTET_BLOCKS = 8


@glue
def raw_keys(control, args, thread, row, block):
    """Address of the raw keys in a KV block of the row's sequence; block keys follow."""
    slot = slot_address(control, thread, row, block, word(args, INDEX.slot_bytes))
    return slot + word(args, INDEX.layer_off)


@glue
def block_keys(keys, head_dim):
    """Address of the block keys behind the raw keys at `keys`."""
    return keys + HALF_BYTES * KV_BLOCK * head_dim


@glue
def row_key(args, row):
    """Address of a row's key, float32[head_dim], as its matrix gave it."""
    return word(args, INDEX.index_qk) + row * word(args, INDEX.index_stride) + word(args, INDEX.index_k_off)


@glue
def row_queries(args, row):
    """Address of a row's queries, float32[n_head][head_dim]."""
    return word(args, INDEX.index_qk) + row * word(args, INDEX.index_stride) + word(args, INDEX.index_q_off)


@glue
def complete_blocks(control, args, row):
    """Index blocks that a row can choose from."""
    return (row_position(control, row) + 1) // word(args, INDEX.ratio)


@inline_kernel
def store_raw(x, head_dim, to):
    """float16[head_dim] at `to` from float32."""
    for d in range(0, head_dim, 8):
        store8_f16(to + HALF_BYTES * d, load8(x + 4 * d))


@inline_kernel
def mean_key(raw, head_dim, ratio, mean):
    """float32[head_dim]: mean of the `ratio` raw keys at `raw`."""
    for d in range(0, head_dim, 8):
        total = load8_f16(raw + HALF_BYTES * d)
        for i in range(1, ratio):
            total = total + load8_f16(raw + HALF_BYTES * (i * head_dim + d))
        store8(mean + 4 * d, total / splat8(np.float32(ratio)))


@inline_kernel
def store_block_key(key, head_dim, index_block, keys):
    """Write float32[head_dim] as number `index_block` of the block keys at `keys`."""
    to = keys + 32 * head_dim * (index_block // OCTET_BLOCKS) + 4 * (index_block % OCTET_BLOCKS)
    for d in range(head_dim):
        store_f32(to + 32 * d, load_f32(key + 4 * d))


@glue
def complete_block(args, keys, position, mean):
    """The key of the index block that ends at `position`, from raw keys. `mean`: room for key and angles."""
    head_dim, ratio, n_rot = word(args, INDEX.head_dim), word(args, INDEX.ratio), word(args, INDEX.n_rot)
    index_block = position % KV_BLOCK // ratio
    mean_key(keys + HALF_BYTES * head_dim * ratio * index_block, head_dim, ratio, mean)
    weight, angles = vector_address(word(args, INDEX.k_norm)), mean + 4 * head_dim
    rms_norm(mean, weight, head_dim, float_word(args, INDEX.eps), mean)
    factor = np.float64(float_word(args, INDEX.angle_factor))
    write_angles(position - ratio + 1, word(args, INDEX.freqs), n_rot // 2, factor, angles)
    rotate(mean, angles, n_rot, ROPE_NEOX)
    store_block_key(mean, head_dim, index_block, block_keys(keys, head_dim))


@glue
def is_predecessor(control, row, back):
    """Whether row - back of the step is the position `back` before the row's, in the same sequence."""
    other = row - back
    if other < 0 or row_sequence(control, other) != row_sequence(control, row):
        return False
    return row_position(control, other) == row_position(control, row) - back


@glue
def store_keys(control, args, row, keys, spare):
    """Write a row's raw key and, if it completes an index block, that block's key.

    keys: raw keys of the row's KV block. Rows of the same index block stand right before it in the step, and
    their raw keys are written once more by this thread: the same bytes as by the threads whose they are.
    """
    position, head_dim = row_position(control, row), word(args, INDEX.head_dim)
    ratio = word(args, INDEX.ratio)
    completes = (position + 1) % ratio == 0
    for back in range(ratio if completes else 1):
        if is_predecessor(control, row, back):
            to = keys + HALF_BYTES * head_dim * ((position - back) % KV_BLOCK)
            store_raw(row_key(args, row - back), head_dim, to)
    if completes:
        complete_block(args, keys, position, spare)


@glue
def prepare_queries(args, row, queries):
    """Norm and rotate a row's index queries, into float32[n_head][head_dim] at `queries`."""
    head_dim, n_rot, x = word(args, INDEX.head_dim), word(args, INDEX.n_rot), row_queries(args, row)
    weight, angles = vector_address(word(args, INDEX.q_norm)), word(args, INDEX.angles) + 4 * row * n_rot
    for h in range(word(args, INDEX.n_head)):
        out = queries + 4 * h * head_dim
        rms_norm(x + 4 * h * head_dim, weight, head_dim, float_word(args, INDEX.eps), out)
        rotate(out, angles, n_rot, ROPE_NEOX)


@op
def index_prepare(control, args, thread):
    """Rows in turn. Queries, in place, by the whole team; keys by the threads of the block's node."""
    spare = word(thread, THREAD_SCRATCH) + word(args, INDEX.work_scratch)
    n_nodes, n_threads = word(thread, THREAD_N_NODES), word(thread, THREAD_N_THREADS)
    for row in range(word(control, STEP_N_ROWS)):
        block = row_position(control, row) // KV_BLOCK
        if row % word(thread, THREAD_TEAM_SIZE) == word(thread, THREAD_TEAM_INDEX):
            prepare_queries(args, row, row_queries(args, row))
        if block % n_nodes == word(thread, THREAD_NODE) and row % n_threads == word(thread, THREAD_INDEX):
            store_keys(control, args, row, raw_keys(control, args, thread, row, block), spare)


@inline_kernel
def score_octet(queries, n_head, head_dim, keys):
    """f32x8: scores of the eight index blocks whose keys are at `keys`."""
    total = splat8(ZERO)
    for h in range(0, n_head & ~3, 4):
        q0 = queries + 4 * head_dim * h
        q1, q2, q3 = q0 + 4 * head_dim, q0 + 8 * head_dim, q0 + 12 * head_dim
        a0 = a1 = a2 = a3 = splat8(ZERO)
        for d in range(0, 4 * head_dim, 4):
            key = load8(keys + 8 * d)
            a0 = fma8(splat8(load_f32(q0 + d)), key, a0)
            a1 = fma8(splat8(load_f32(q1 + d)), key, a1)
            a2 = fma8(splat8(load_f32(q2 + d)), key, a2)
            a3 = fma8(splat8(load_f32(q3 + d)), key, a3)
        total = total + max8(a0, splat8(ZERO))
        total = total + max8(a1, splat8(ZERO))
        total = total + max8(a2, splat8(ZERO))
        total = total + max8(a3, splat8(ZERO))
    for h in range(n_head & ~3, n_head):
        a0 = splat8(ZERO)
        for d in range(0, 4 * head_dim, 4):
            a0 = fma8(splat8(load_f32(queries + 4 * head_dim * h + d)), load8(keys + 8 * d), a0)
        total = total + max8(a0, splat8(ZERO))
    return total


@glue
def score_block(args, queries, keys, n_complete, scores):
    """Scores of the index blocks in a KV block, n_complete of them complete; whole octets are written."""
    head_dim = word(args, A.head_dim)
    n = min(n_complete, KV_BLOCK // word(args, A.ratio))
    for first in range(0, n, OCTET_BLOCKS):
        score = score_octet(queries, word(args, A.n_head), head_dim, keys + 4 * head_dim * first)
        store8(scores + 4 * first, keep_lanes8(score, n - first, splat8(NO_SCORE)))


@op
def index_score(control, args, thread):
    """Claim units (block of this node, row). At one row every thread prepares the queries for itself, where
    there is a choice, and whoever has the row's own block first stores its keys."""
    n_rows, ratio, n_best = word(control, STEP_N_ROWS), word(args, A.ratio), word(args, A.n_best)
    node, n_nodes = word(thread, THREAD_NODE), word(thread, THREAD_N_NODES)
    queries = word(thread, THREAD_SCRATCH) + word(args, A.work_scratch)
    spare = queries + 4 * word(args, A.n_head) * word(args, A.head_dim)
    if n_rows == 1 and complete_blocks(control, args, 0) > n_best:
        prepare_queries(args, 0, queries)
    last = 0
    for row in range(n_rows):
        last = max(last, row_position(control, row) // KV_BLOCK)
    n_units = ((last - node) // n_nodes + 1) * n_rows
    unit = first_unit(thread)
    while unit < n_units:
        row, block = unit % n_rows, node + unit // n_rows * n_nodes
        own, n_complete = row_position(control, row) // KV_BLOCK, complete_blocks(control, args, row)
        if block <= own:
            keys = raw_keys(control, args, thread, row, block)
            if n_rows == 1 and block == own:
                store_keys(control, args, row, keys, spare)
            if n_complete > n_best:
                q = queries if n_rows == 1 else row_queries(args, row)
                first = block * (KV_BLOCK // ratio)
                scores = word(args, A.scores) + row * word(args, A.scores_stride) + 4 * first
                score_block(args, q, block_keys(keys, word(args, A.head_dim)), n_complete - first, scores)
        unit = claim(thread)
