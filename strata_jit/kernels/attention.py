"""The op `attention`: one KV block's part of the attention of a row's query heads.

Owns the order of every sum: a score has one accumulator, dimensions ascending; the sum of the weights has
eight lanes (position mod 8), positions ascending, then `vec.sum8`; an output element has one accumulator,
positions ascending. How heads, dimensions and positions are tiled is free, and changes no bit. What a window
hides, or an indexer has not selected, takes no part: whole blocks of it are no work, its octets and runs of
values are not read, its lanes weigh 0.

Both tiles work on four query heads at a time. Where fewer remain, the last head stands in for the missing
ones: it is computed and stored again, with the same result.
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    KV_BLOCK,
    STEP_N_ROWS,
    THREAD_N_NODES,
    THREAD_N_THREADS,
    THREAD_NODE,
    THREAD_SCRATCH,
)
from strata_jit.kernels.attn_prepare import (
    group_size,
    key_scale,
    prepare_heads,
    query_at,
    query_scale,
    store_head,
)
from strata_jit.kernels.kv import (
    HALF_BYTES,
    KEY_OCTET,
    first_visible,
    head_block,
    row_position,
    values_of,
)
from strata_jit.kernels.mathx import exp8
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.selection import any_selected, hide, hide_all, run_length, selected_word
from strata_jit.kernels.team import claim, first_unit
from strata_jit.kernels.vec import (
    float_word,
    fma8,
    hmax8,
    keep_lanes8,
    load8,
    load8_f16,
    load_f32,
    max8,
    prefetch,
    splat8,
    store8,
    store_f32,
    sum8,
    word,
)

A = arg_index("attention")
ZERO = np.float32(0)
LOWEST = np.float32(-np.inf)
SCORE_BYTES = 4 * KV_BLOCK
"""Bytes of one head's scores of a block."""
PARTIAL_HEADER = 32
"""Bytes before o in a partial result: m, l, unused."""
TILE_HEADS = 4
"""Query heads that share each load of keys and values."""
VALUE_TILE = 32
"""Positions whose values are read before the next ones: small enough to stay in the first-level cache."""


@glue
def _store_scores(score, scale, n_hidden, n_visible, to):
    """Scale a key octet's scores; the lanes before n_hidden and those from n_visible on become -inf."""
    lowest = splat8(LOWEST)
    store8(to, keep_lanes8(lowest, n_hidden, keep_lanes8(score * splat8(scale), n_visible, lowest)))


@inline_kernel
def _scores(q, q_stride, group, first, head_dim, keys, n_hidden, n_visible, scale, scores):
    """Scores of query heads first .. first+3 at the 16 positions at `keys`; `scores` is those of head 0."""
    last = group - 1
    h0, h1, h2, h3 = first, min(first + 1, last), min(first + 2, last), min(first + 3, last)
    q0, q1, q2, q3 = q + q_stride * h0, q + q_stride * h1, q + q_stride * h2, q + q_stride * h3
    s0, s1 = scores + h0 * SCORE_BYTES, scores + h1 * SCORE_BYTES
    s2, s3 = scores + h2 * SCORE_BYTES, scores + h3 * SCORE_BYTES
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat8(ZERO)
    octet_bytes = HALF_BYTES * KEY_OCTET * head_dim
    for d in range(head_dim):
        key = keys + HALF_BYTES * KEY_OCTET * d
        ka, kb = load8_f16(key), load8_f16(key + octet_bytes)
        prefetch(keys + 2 * octet_bytes + 32 * d)  # the next pair of octets, half a line each time
        x = splat8(load_f32(q0 + 4 * d))
        a0 = fma8(x, ka, a0)
        b0 = fma8(x, kb, b0)
        x = splat8(load_f32(q1 + 4 * d))
        a1 = fma8(x, ka, a1)
        b1 = fma8(x, kb, b1)
        x = splat8(load_f32(q2 + 4 * d))
        a2 = fma8(x, ka, a2)
        b2 = fma8(x, kb, b2)
        x = splat8(load_f32(q3 + 4 * d))
        a3 = fma8(x, ka, a3)
        b3 = fma8(x, kb, b3)
    _store_scores(a0, scale, n_hidden, n_visible, s0)
    _store_scores(a1, scale, n_hidden, n_visible, s1)
    _store_scores(a2, scale, n_hidden, n_visible, s2)
    _store_scores(a3, scale, n_hidden, n_visible, s3)
    _store_scores(b0, scale, n_hidden - KEY_OCTET, n_visible - KEY_OCTET, s0 + 32)
    _store_scores(b1, scale, n_hidden - KEY_OCTET, n_visible - KEY_OCTET, s1 + 32)
    _store_scores(b2, scale, n_hidden - KEY_OCTET, n_visible - KEY_OCTET, s2 + 32)
    _store_scores(b3, scale, n_hidden - KEY_OCTET, n_visible - KEY_OCTET, s3 + 32)


@inline_kernel
def _softmax(scores, octet, n_octets, partial):
    """Turn the scores of one head, from octet number `octet` on, into exp(score - m); store m and the sum l
    in the partial result."""
    largest = splat8(LOWEST)
    for k in range(32 * octet, 32 * n_octets, 32):
        largest = max8(load8(scores + k), largest)
    m = hmax8(largest)
    total = splat8(ZERO)
    for k in range(32 * octet, 32 * n_octets, 32):
        p = exp8(load8(scores + k) - splat8(m))
        store8(scores + k, p)
        total = total + p
    store_f32(partial, m)
    store_f32(partial + 4, sum8(total))


@inline_kernel
def _add_values(p0, p1, p2, p3, values, stride, n, o0, o1, o2, o3):
    """o += p * v over n positions, for four heads and the 16 dimensions at `values`."""
    a0, a1, a2, a3 = load8(o0), load8(o1), load8(o2), load8(o3)
    b0, b1, b2, b3 = load8(o0 + 32), load8(o1 + 32), load8(o2 + 32), load8(o3 + 32)
    ahead = VALUE_TILE * stride
    for i in range(0, 4 * n, 4):
        va, vb = load8_f16(values), load8_f16(values + 16)
        prefetch(values + ahead)  # the same place of the next tile
        values += stride
        x = splat8(load_f32(p0 + i))
        a0 = fma8(x, va, a0)
        b0 = fma8(x, vb, b0)
        x = splat8(load_f32(p1 + i))
        a1 = fma8(x, va, a1)
        b1 = fma8(x, vb, b1)
        x = splat8(load_f32(p2 + i))
        a2 = fma8(x, va, a2)
        b2 = fma8(x, vb, b2)
        x = splat8(load_f32(p3 + i))
        a3 = fma8(x, va, a3)
        b3 = fma8(x, vb, b3)
    store8(o0, a0)
    store8(o1, a1)
    store8(o2, a2)
    store8(o3, a3)
    store8(o0 + 32, b0)
    store8(o1 + 32, b1)
    store8(o2 + 32, b2)
    store8(o3 + 32, b3)


@inline_kernel
def _add_values_8(p, values, stride, n, o):
    """o += p * v over n positions, for one head and the 8 dimensions at `values`."""
    total = load8(o)
    for i in range(n):
        total = fma8(splat8(load_f32(p + 4 * i)), load8_f16(values + i * stride), total)
    store8(o, total)


@glue
def _tile_outputs(p, group, value_dim, values, n, o, o_stride):
    """o += p * v over n positions, for all heads of the group and all dimensions; p and o are head 0's."""
    stride, last, even = HALF_BYTES * value_dim, group - 1, value_dim & ~15
    for h0 in range(0, group, TILE_HEADS):
        h1, h2, h3 = min(h0 + 1, last), min(h0 + 2, last), min(h0 + 3, last)
        p0, p1 = p + h0 * SCORE_BYTES, p + h1 * SCORE_BYTES
        p2, p3 = p + h2 * SCORE_BYTES, p + h3 * SCORE_BYTES
        o0, o1, o2, o3 = o + h0 * o_stride, o + h1 * o_stride, o + h2 * o_stride, o + h3 * o_stride
        for d in range(0, even, 16):
            v, to = values + HALF_BYTES * d, 4 * d
            _add_values(p0, p1, p2, p3, v, stride, n, o0 + to, o1 + to, o2 + to, o3 + to)
    if even < value_dim:
        for h in range(group):
            to = o + h * o_stride + 4 * even
            _add_values_8(p + h * SCORE_BYTES, values + HALF_BYTES * even, stride, n, to)


@glue
def attend_block(
    q, q_stride, group, head_dim, value_dim, head, start, stop, bits, ratio, scale, scores, partial, stride
):
    """Partial results of the query heads at `q` over positions start .. stop-1 of the block at `head`.

    q: float32[head_dim] of each head, `q_stride` bytes to the next; bits, ratio: which positions are
    selected, one of them at least; scores: scratch float32[group][256]; partial: of the first query head,
    `stride` bytes to the next.
    """
    first_octet, n_octets = start // (2 * KEY_OCTET) * 2, (stop + KEY_OCTET - 1) // KEY_OCTET
    for octet in range(first_octet, n_octets, 2):
        place = octet * KEY_OCTET
        keys, to = head + HALF_BYTES * place * head_dim, scores + 4 * place
        is_read = any_selected(bits, ratio, place, 2 * KEY_OCTET)
        for first in range(0, group if is_read else 0, TILE_HEADS):
            _scores(q, q_stride, group, first, head_dim, keys, start - place, stop - place, scale, to)
        for h in range(group):
            if is_read:
                hide(bits, ratio, place, 2 * KEY_OCTET, to + h * SCORE_BYTES)
            else:
                hide_all(2 * KEY_OCTET, to + h * SCORE_BYTES)
    for h in range(group):
        to = partial + h * stride
        _softmax(scores + h * SCORE_BYTES, first_octet, n_octets, to)
        for d in range(0, 4 * value_dim, 32):
            store8(to + PARTIAL_HEADER + d, splat8(ZERO))
    place = start
    while place < stop:
        n = run_length(bits, ratio, place, min(place + VALUE_TILE, stop))
        if n > 0:
            values = values_of(head, head_dim) + HALF_BYTES * value_dim * place
            _tile_outputs(scores + 4 * place, group, value_dim, values, n, partial + PARTIAL_HEADER, stride)
        place += n if n > 0 else ratio - place % ratio


@glue
def partial_bytes(value_dim):
    """Bytes of the partial result of one (row, head, block)."""
    return PARTIAL_HEADER + 4 * value_dim


@glue
def _attend(control, args, thread, n_rows, row, block, bits, kv_head, query_head, n):
    """One unit of work: n query heads of a kv head's group over one block; `bits`: what of it is selected."""
    head_dim, value_dim = word(args, A.head_dim), word(args, A.value_dim)
    position = row_position(control, row)
    start = max(first_visible(position, word(args, A.window)) - block * KV_BLOCK, 0)
    stop = min(position - block * KV_BLOCK + 1, KV_BLOCK)
    head = head_block(control, args, thread, row, block, kv_head)
    key = word(thread, THREAD_SCRATCH) + word(args, A.work_scratch)
    queries, q_stride = query_at(args, row, query_head), word(args, A.q_stride)
    if n_rows == 1 and word(args, A.prepared) == 0:
        n_keys = 1 if block == position // KV_BLOCK else 0
        queries, q_stride = key + 4 * head_dim, 4 * head_dim
        q_joint, k_joint = query_scale(args, row), key_scale(args, row)
        prepare_heads(args, row, query_head, n, queries, q_stride, q_joint, kv_head, n_keys, key, k_joint)
        if n_keys != 0:
            store_head(control, args, thread, row, kv_head, key)
    scores, scale = key + 4 * (group_size(args) + 1) * head_dim, float_word(args, A.scale)
    stride, ratio = word(args, A.partial_blocks) * partial_bytes(value_dim), word(args, A.ratio)
    partial = word(args, A.partial) + (row * word(args, A.n_head) + query_head) * stride
    partial += block * partial_bytes(value_dim)
    if bits != 0:
        attend_block(
            queries, q_stride, n, head_dim, value_dim, head, start, stop, bits, ratio,
            scale, scores, partial, stride,
        )  # fmt: skip


@glue
def _unit_heads(group, n_units, n_threads):
    """Query heads of one unit, given n_units units of a whole group: a tile's where the node's threads would
    else go short of work. Two units then write the same bytes of the row's own key and value."""
    return min(group, TILE_HEADS) if n_threads > 1 and n_units < 2 * n_threads else group


@op
def attention(control, args, thread):
    """Claim units (block of this node, kv head, query heads, row). At one row, unless all is `prepared`, each
    unit prepares its own queries, and those of the row's own block first store its key and value."""
    n_rows, n_head_kv, group = word(control, STEP_N_ROWS), word(args, A.n_head_kv), group_size(args)
    node, n_nodes = word(thread, THREAD_NODE), word(thread, THREAD_N_NODES)
    window = word(args, A.window)
    first, last = first_visible(row_position(control, 0), window) // KV_BLOCK, 0
    for row in range(n_rows):
        position = row_position(control, row)
        first, last = min(first, first_visible(position, window) // KV_BLOCK), max(last, position // KV_BLOCK)
    first += (node - first) % n_nodes  # this node's first block
    n_units = ((last - first) // n_nodes + 1) * n_head_kv * n_rows
    heads = _unit_heads(group, n_units, word(thread, THREAD_N_THREADS))
    parts = (group + heads - 1) // heads
    unit = first_unit(thread)
    while unit < n_units * parts:
        row, rest = unit % n_rows, unit // n_rows
        part, rest = rest % parts, rest // parts
        kv_head, block = rest % n_head_kv, first + rest // n_head_kv * n_nodes
        position, end = row_position(control, row), (block + 1) * KV_BLOCK
        if block * KV_BLOCK <= position and first_visible(position, window) < end:
            query_head, n = kv_head * group + part * heads, min(heads, group - part * heads)
            bits = selected_word(args, A.mask_scratch, thread, row, n_rows, block)
            if bits != 0 or block == position // KV_BLOCK:
                _attend(control, args, thread, n_rows, row, block, bits, kv_head, query_head, n)
        unit = claim(thread)
