"""The ops `attn_merge`, `attn_merge_heads`: partial results of KV blocks -> attention output, quantised.

Owns the order of the merge: blocks ascending whatever node they come from. The first is taken as it is; then
M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L = fma(l, b, L*a), O = fma(o, b, O*a). A head's sink, a
score that has no value, comes last: L = L*a + b, O = O*a. The result is O / L, times sigmoid(gate) where the
query projection brings a gate for each element.
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import KV_BLOCK, STEP_N_ROWS, THREAD_SCRATCH, THREAD_TEAM_INDEX, THREAD_TEAM_SIZE
from strata_jit.kernels.attention import PARTIAL_HEADER, partial_bytes
from strata_jit.kernels.kv import first_visible, row_position
from strata_jit.kernels.mathx import exp8, sigmoid8
from strata_jit.kernels.norm import vector_address
from strata_jit.kernels.quantise import act_row, float_plane, quantise_row
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.selection import selected_words
from strata_jit.kernels.vec import (
    fma1,
    fma8,
    keep_lanes8,
    lane8,
    load8,
    load_f32,
    load_i64,
    splat8,
    store8,
    word,
)

A = arg_index("attn_merge")
ONE = np.float32(1)


@glue
def _rescale(m, other):
    """(larger maximum, factor of what had m, factor of what had `other`)."""
    larger = m if m > other else other
    factors = exp8(keep_lanes8(splat8(m - larger), 1, splat8(other - larger)))
    return larger, lane8(factors, 0), lane8(factors, 1)


@inline_kernel
def merge_head(partial, n_blocks, masks, value_dim, sink, out):
    """float32[value_dim] at `out` from the partial results of n_blocks blocks, side by side at `partial`.

    masks: address of the blocks' words, 0 for none; a block whose word is 0 has no result, the first has one.
    sink: address of the head's sink, 0 for none.
    """
    m, total = load_f32(partial), load_f32(partial + 4)
    for d in range(0, 4 * value_dim, 32):
        store8(out + d, load8(partial + PARTIAL_HEADER + d))
    for block in range(1, n_blocks):
        partial += partial_bytes(value_dim)
        if masks != 0 and load_i64(masks + 8 * block) == 0:
            continue
        m, a, b = _rescale(m, load_f32(partial))
        total = fma1(load_f32(partial + 4), b, total * a)
        for d in range(0, 4 * value_dim, 32):
            store8(out + d, fma8(load8(partial + PARTIAL_HEADER + d), splat8(b), load8(out + d) * splat8(a)))
    rest = ONE
    if sink != 0:
        m, rest, b = _rescale(m, load_f32(sink))
        total = total * rest + b
    for d in range(0, 4 * value_dim, 32):
        store8(out + d, load8(out + d) * splat8(rest) / splat8(total))


@glue
def apply_gate(args, row, head, out):
    """Multiply a merged head by the sigmoid of its gate, if it has one."""
    if word(args, A.gate_off) >= 0:
        gate = word(args, A.gate) + row * word(args, A.gate_row)
        gate += word(args, A.gate_off) + head * word(args, A.gate_head)
        for d in range(0, 4 * word(args, A.value_dim), 32):
            store8(out + d, load8(out + d) * sigmoid8(load8(gate + d)))


@glue
def sink_of(sinks, head):
    """Address of a head's sink; 0 where there are none."""
    return sinks + 4 * head if sinks != 0 else 0


@glue
def head_partials(args, row, head, first):
    """Address of the partial result of a row's head for block number `first`."""
    block = (row * word(args, A.n_head) + head) * word(args, A.partial_blocks) + first
    return word(args, A.partial) + block * partial_bytes(word(args, A.value_dim))


@glue
def row_blocks(control, args, thread, row):
    """(first block with a result, number of blocks from there on, address of the first's word or 0)."""
    position, n_rows = row_position(control, row), word(control, STEP_N_ROWS)
    first = first_visible(position, word(args, A.window)) // KV_BLOCK
    masks = selected_words(args, A.mask_scratch, thread, row, n_rows)
    while masks != 0 and load_i64(masks + 8 * first) == 0:
        first += 1
    return first, position // KV_BLOCK - first + 1, masks + 8 * first if masks != 0 else 0


@op
def attn_merge(control, args, thread):
    """Merge and quantise. One row: every thread, into its scratch. Many rows: rows in turn over the team."""
    n_rows, n_head, value_dim = word(control, STEP_N_ROWS), word(args, A.n_head), word(args, A.value_dim)
    first, step = word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE)
    if n_rows == 1:
        first, step = 0, 1
    temporary = word(thread, THREAD_SCRATCH) + word(args, A.out_scratch)
    sinks = vector_address(word(args, A.sinks))
    for row in range(first, n_rows, step):
        dst = act_row(args, A.act_scratch, thread, row, n_rows)
        out = float_plane(dst, args, A.act_scratch, temporary)
        block, n_blocks, masks = row_blocks(control, args, thread, row)
        for h in range(n_head):
            partial, sink = head_partials(args, row, h, block), sink_of(sinks, h)
            merge_head(partial, n_blocks, masks, value_dim, sink, out + 4 * h * value_dim)
            apply_gate(args, row, h, out + 4 * h * value_dim)
        quantise_row(out, n_head * value_dim, dst, args, A.act_scratch)


@op
def attn_merge_heads(control, args, thread):
    """Merge and quantise each head to an activation row of its own, in the shared buffer at one row too:
    (row, head) in turn over the team."""
    n_head, value_dim = word(args, A.n_head), word(args, A.value_dim)
    temporary = word(thread, THREAD_SCRATCH) + word(args, A.out_scratch)
    sinks = vector_address(word(args, A.sinks))
    n_entries, step = word(control, STEP_N_ROWS) * n_head, word(thread, THREAD_TEAM_SIZE)
    for entry in range(word(thread, THREAD_TEAM_INDEX), n_entries, step):
        row, head = entry // n_head, entry % n_head
        dst = word(args, A.act_shared) + entry * word(args, A.act_stride)
        out = float_plane(dst, args, A.act_scratch, temporary)
        block, n_blocks, masks = row_blocks(control, args, thread, row)
        partial = head_partials(args, row, head, block)
        merge_head(partial, n_blocks, masks, value_dim, sink_of(sinks, head), out)
        apply_gate(args, row, head, out)
        quantise_row(out, value_dim, dst, args, A.act_scratch)
