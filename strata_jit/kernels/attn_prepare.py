"""Norm and rotation of q and k heads, k and v into the KV block; the op `attn_prepare`.

At one row `attention` calls the same helpers itself, so that the row needs one barrier less.
"""

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    KV_BLOCK,
    STEP_N_ROWS,
    THREAD_N_NODES,
    THREAD_NODE,
    THREAD_SCRATCH,
    THREAD_TEAM_INDEX,
    THREAD_TEAM_SIZE,
)
from strata_jit.kernels.kv import QKV, head_block, row_position, store_key_value
from strata_jit.kernels.norm import rms_norm, vector_address
from strata_jit.kernels.rope import rotate
from strata_jit.kernels.vec import float_word, load8, store8, word


@inline_kernel
def prepare_head(args, row, x, norm, out):
    """RMS norm (unless the tensor `norm` is 0) and rotation of the head at `x`, for a row of the step.

    x, out: float32[head_dim]; `out` may be `x`.
    """
    head_dim, n_rot = word(args, QKV.head_dim), word(args, QKV.n_rot)
    if norm != 0:
        rms_norm(x, vector_address(norm), head_dim, float_word(args, QKV.eps), out)
    elif out != x:
        for k in range(0, 4 * head_dim, 32):
            store8(out + k, load8(x + k))
    rotate(out, word(args, QKV.angles) + 4 * row * n_rot, n_rot, word(args, QKV.rope_mode))


@glue
def qkv_row(args, row):
    """Address of the row's q, k and v."""
    return word(args, QKV.qkv) + row * word(args, QKV.qkv_stride)


@glue
def query_head(args, row, head):
    """Address of a query head."""
    return qkv_row(args, row) + word(args, QKV.q_off) + 4 * head * word(args, QKV.head_dim)


@glue
def key_head(args, row, kv_head):
    """Address of a key head, before norm and rotation."""
    return qkv_row(args, row) + word(args, QKV.k_off) + 4 * kv_head * word(args, QKV.head_dim)


@glue
def value_head(args, row, kv_head):
    """Address of a value head."""
    return qkv_row(args, row) + word(args, QKV.v_off) + 4 * kv_head * word(args, QKV.head_dim)


@op
def attn_prepare(control, args, thread):
    """Heads in turn over the team, all query heads in place. Keys and values are written by their block's node:
    there its threads, in the place of the team, take the key heads of the rows whose block it has."""
    n_head, n_head_kv = word(args, QKV.n_head), word(args, QKV.n_head_kv)
    head_dim, n_rows = word(args, QKV.head_dim), word(control, STEP_N_ROWS)
    key = word(thread, THREAD_SCRATCH) + word(args, QKV.work_scratch)
