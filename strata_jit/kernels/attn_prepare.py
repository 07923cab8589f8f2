"""Norm and rotation of q and k heads, k and v into the KV block; the op `attn_prepare`.

Owns the meaning of the norms: a weight of head_dim elements is one for each head by itself, a longer one is a
norm over all heads together. At one row `attention` calls the same helpers itself, so that the row needs one
barrier less.
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    KV_BLOCK,
    STEP_N_ROWS,
    TENSOR_N_COLS,
    THREAD_INDEX,
    THREAD_N_NODES,
    THREAD_N_THREADS,
    THREAD_NODE,
    THREAD_SCRATCH,
    THREAD_TEAM_INDEX,
    THREAD_TEAM_SIZE,
)
from strata_jit.kernels.kv import QKV, head_block, row_position, store_key_value
from strata_jit.kernels.norm import rms_scale, scale_weigh, vector_address
from strata_jit.kernels.rope import rotate
from strata_jit.kernels.vec import float_word, load8, store8, word

ONE = np.float32(1)


@glue
def is_joint(args, norm):
    """Whether the norm (0: none) runs over all heads together."""
    return norm != 0 and word(norm, TENSOR_N_COLS) != word(args, QKV.head_dim)


@glue
def joint_scale(args, norm, heads):
    """`rms_scale` of all heads of a row, at `heads`, where the norm is joint; else 1."""
    if is_joint(args, norm):
        return rms_scale(heads, word(norm, TENSOR_N_COLS), float_word(args, QKV.eps))
    return ONE


@inline_kernel
def prepare_head(args, row, x, norm, head, joint, out):
    """RMS norm (unless the tensor `norm` is 0) and rotation of head number `head`, for a row of the step.

    x, out: float32[head_dim]; `out` may be `x`. joint: `joint_scale` of the row.
    """
    head_dim, n_rot = word(args, QKV.head_dim), word(args, QKV.n_rot)
    if is_joint(args, norm):
        scale_weigh(x, joint, vector_address(norm) + 4 * head_dim * head, head_dim, out)
    elif norm != 0:
        scale_weigh(x, rms_scale(x, head_dim, float_word(args, QKV.eps)), vector_address(norm), head_dim, out)
    elif out != x:
        for k in range(0, 4 * head_dim, 32):
            store8(out + k, load8(x + k))
    rotate(out, word(args, QKV.angles) + 4 * row * n_rot, n_rot, word(args, QKV.rope_mode))


@glue
def group_size(args):
    """Query heads that share a kv head."""
    return word(args, QKV.n_head) // word(args, QKV.n_head_kv)


@glue
def query_at(args, row, head):
    """Address of head number `head` of the row's q."""
    offset = word(args, QKV.q_off) + head * word(args, QKV.q_stride)
    return word(args, QKV.qkv) + row * word(args, QKV.qkv_stride) + offset


@glue
def key_at(args, row, head):
    """Address of head number `head` of the row's k."""
    offset = word(args, QKV.k_off) + 4 * head * word(args, QKV.head_dim)
    return word(args, QKV.qkv) + row * word(args, QKV.qkv_stride) + offset


@glue
def store_head(control, args, thread, row, kv_head, key):
    """Write the prepared key at `key` and the value of a kv head into the row's block (this node's)."""
    position = row_position(control, row)
    head = head_block(control, args, thread, row, position // KV_BLOCK, kv_head)
    head_dim, value_dim = word(args, QKV.head_dim), word(args, QKV.value_dim)
    value = word(args, QKV.qkv) + word(args, QKV.v_off) + row * word(args, QKV.qkv_stride)
    store_key_value(head, head_dim, value_dim, position % KV_BLOCK, key, value + 4 * value_dim * kv_head)


@glue
def query_scale(args, row):
    """`joint_scale` of a row's query heads, which must not have been normed yet."""
    return joint_scale(args, word(args, QKV.q_norm), query_at(args, row, 0))


@glue
def key_scale(args, row):
    """`joint_scale` of a row's key heads."""
    return joint_scale(args, word(args, QKV.k_norm), key_at(args, row, 0))


@glue
def prepare_heads(args, row, head, n, queries, queries_stride, q_joint, kv_head, n_keys, key, k_joint):
    """`prepare_head` for n query heads from number `head` on, to `queries` and every `queries_stride` bytes,
    and for n_keys (0 or 1) key heads, number `kv_head`, into `key`. q_joint, k_joint: scales of the row."""
    for i in range(n + n_keys):
        if i < n:
            number, norm, joint = head + i, word(args, QKV.q_norm), q_joint
            x, out = query_at(args, row, number), queries + i * queries_stride
        else:
            number, norm, joint = kv_head, word(args, QKV.k_norm), k_joint
            x, out = key_at(args, row, number), key
        prepare_head(args, row, x, norm, number, joint, out)


@op
def attn_prepare(control, args, thread):
    """Units (row, kv head), in turn. Queries, in place, by the whole team; key and value by the threads of
    the node that has the row's block, which alone can write them.

    Where the queries' norm is joint, one thread has all queries of a row: it takes their scale before it
    changes the first of them.
    """
    n_head_kv, group = word(args, QKV.n_head_kv), group_size(args)
    key = word(thread, THREAD_SCRATCH) + word(args, QKV.work_scratch)
    joint, q_joint = is_joint(args, word(args, QKV.q_norm)), ONE
    for unit in range(word(control, STEP_N_ROWS) * n_head_kv):
        row, kv_head = unit // n_head_kv, unit % n_head_kv
        block = row_position(control, row) // KV_BLOCK
        turn = row if joint else unit
        has_queries = turn % word(thread, THREAD_TEAM_SIZE) == word(thread, THREAD_TEAM_INDEX)
        if has_queries and kv_head == 0:
            q_joint = query_scale(args, row)
        has_key = unit % word(thread, THREAD_N_THREADS) == word(thread, THREAD_INDEX)
        has_key = has_key and block % word(thread, THREAD_N_NODES) == word(thread, THREAD_NODE)
        n_queries, n_keys = group if has_queries else 0, 1 if has_key else 0
        queries, q_stride = query_at(args, row, kv_head * group), word(args, QKV.q_stride)
        k_joint = key_scale(args, row) if has_key else ONE
        head = kv_head * group
        prepare_heads(args, row, head, n_queries, queries, q_stride, q_joint, kv_head, n_keys, key, k_joint)
        if has_key:
            store_head(control, args, thread, row, kv_head, key)
