"""The op `attn_merge`: the partial results of a row's KV blocks -> its attention output, quantised.

Owns the order of the merge: blocks ascending whatever node they come from. The first is taken as it is; then
M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L = fma(l, b, L*a), O = fma(o, b, O*a); the result is O / L.
"""

from strata_jit.kernels._jit import inline_kernel, op
from strata_jit.kernels.abi import KV_BLOCK, STEP_N_ROWS, THREAD_SCRATCH, THREAD_TEAM_INDEX, THREAD_TEAM_SIZE
from strata_jit.kernels.attention import PARTIAL_HEADER, partial_bytes
from strata_jit.kernels.kv import row_position
from strata_jit.kernels.mathx import exp8
from strata_jit.kernels.quantise import act_row, float_plane, quantise_row
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.vec import (
    fma1,
    fma8,
    keep_lanes8,
    lane8,
    load8,
    load_f32,
    splat8,
    store8,
    word,
)

A = arg_index("attn_merge")


@inline_kernel
def merge_head(partial, n_blocks, head_dim, out):
    """float32[head_dim] at `out` from the partial results of n_blocks blocks, side by side at `partial`."""
    m, total = load_f32(partial), load_f32(partial + 4)
    for d in range(0, 4 * head_dim, 32):
        store8(out + d, load8(partial + PARTIAL_HEADER + d))
    for _ in range(1, n_blocks):
        partial += partial_bytes(head_dim)
        block_m = load_f32(partial)
        larger = m if m > block_m else block_m
        factors = exp8(keep_lanes8(splat8(m - larger), 1, splat8(block_m - larger)))
        a, b = lane8(factors, 0), lane8(factors, 1)
        m, total = larger, fma1(load_f32(partial + 4), b, total * a)
        for d in range(0, 4 * head_dim, 32):
            store8(out + d, fma8(load8(partial + PARTIAL_HEADER + d), splat8(b), load8(out + d) * splat8(a)))
    for d in range(0, 4 * head_dim, 32):
        store8(out + d, load8(out + d) / splat8(total))


@op
def attn_merge(control, args, thread):
    """Merge and quantise. One row: every thread, into its scratch. Many rows: rows in turn over the team."""
    n_rows, n_head, head_dim = word(control, STEP_N_ROWS), word(args, A.n_head), word(args, A.head_dim)
    first, step = word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE)
    if n_rows == 1:
        first, step = 0, 1
    temporary = word(thread, THREAD_SCRATCH) + word(args, A.out_scratch)
    stride = word(args, A.partial_blocks) * partial_bytes(head_dim)
    for row in range(first, n_rows, step):
        dst = act_row(args, A.act_scratch, thread, row, n_rows)
        out = float_plane(dst, args, A.act_scratch, temporary)
        n_blocks = row_position(control, row) // KV_BLOCK + 1
        for h in range(n_head):
            partial = word(args, A.partial) + (row * n_head + h) * stride
            merge_head(partial, n_blocks, head_dim, out + 4 * h * head_dim)
        quantise_row(out, n_head * head_dim, dst, args, A.act_scratch)
