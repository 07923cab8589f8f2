"""Norm and rotation of q and k heads, k and v into the KV block; the op `attn_prepare`.

At one row `attention` calls the same helpers itself, so that the row needs one barrier less.
"""

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
def group_size(args):
    """Query heads that share a kv head."""
    return word(args, QKV.n_head) // word(args, QKV.n_head_kv)


@glue
def head_at(args, row, offset, head):
    """Address of head number `head` of the row's q, k or v, whichever starts at `offset`."""
    offset += row * word(args, QKV.qkv_stride) + 4 * head * word(args, QKV.head_dim)
    return word(args, QKV.qkv) + offset


@glue
def prepare_heads(args, row, head, n, queries, kv_head, n_keys, key):
    """`prepare_head` for n query heads from number `head` on, into float32[n][head_dim] at `queries`, and for
    n_keys (0 or 1) key heads, number `kv_head`, into `key`."""
    for i in range(n + n_keys):
        if i < n:
            x, norm = head_at(args, row, word(args, QKV.q_off), head + i), word(args, QKV.q_norm)
            out = queries + 4 * i * word(args, QKV.head_dim)
        else:
            x, norm = head_at(args, row, word(args, QKV.k_off), kv_head), word(args, QKV.k_norm)
            out = key
        prepare_head(args, row, x, norm, out)


@op
def attn_prepare(control, args, thread):
    """Units (row, kv head), in turn. Queries, in place, by the whole team; key and value by the threads of
    the node that has the row's block, which alone can write them."""
    n_head_kv, group, head_dim = word(args, QKV.n_head_kv), group_size(args), word(args, QKV.head_dim)
    key = word(thread, THREAD_SCRATCH) + word(args, QKV.work_scratch)
    for unit in range(word(control, STEP_N_ROWS) * n_head_kv):
        row, kv_head = unit // n_head_kv, unit % n_head_kv
        block, place = row_position(control, row) // KV_BLOCK, row_position(control, row) % KV_BLOCK
        has_queries = unit % word(thread, THREAD_TEAM_SIZE) == word(thread, THREAD_TEAM_INDEX)
        has_key = unit % word(thread, THREAD_N_THREADS) == word(thread, THREAD_INDEX)
        has_key = has_key and block % word(thread, THREAD_N_NODES) == word(thread, THREAD_NODE)
        n_queries, n_keys = group if has_queries else 0, 1 if has_key else 0
        queries = head_at(args, row, word(args, QKV.q_off), kv_head * group)
        prepare_heads(args, row, kv_head * group, n_queries, queries, kv_head, n_keys, key)
        if has_key:
            head = head_block(control, args, thread, row, block, kv_head)
            value = head_at(args, row, word(args, QKV.v_off), kv_head)
            store_key_value(head, head_dim, place, key, value)
