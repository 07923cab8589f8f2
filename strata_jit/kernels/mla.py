"""The op `mla_prepare`: what multi-head latent attention does before its scores.

Attention runs in the absorbed form: a position's one key is its normed latent followed by a rotated part,
its value is the latent itself, so that all heads share one kv head. A head's query is its unrotated part
times the head's k_b (the op `head_linear`), followed by its rotated part. Rotary pairs are neighbours.
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
from strata_jit.kernels.kv import row_position, slot_address, store_key_value
from strata_jit.kernels.norm import rms_norm, vector_address
from strata_jit.kernels.quantise import quantise_row
from strata_jit.kernels.registry import ROPE_NORM, arg_index
from strata_jit.kernels.rope import rotate
from strata_jit.kernels.vec import float_word, load8, store8, word

A = arg_index("mla_prepare")


@inline_kernel
def rotated(args, row, x, out):
    """float32[n_rot] at `out` = the rotated part at `x`, for a row of the step."""
    n_rot = word(args, A.n_rot)
    for k in range(0, 4 * n_rot, 32):
        store8(out + k, load8(x + k))
    rotate(out, word(args, A.angles) + 4 * n_rot * row, n_rot, ROPE_NORM)


@glue
def prepare_query(args, row, head):
    """Activation planes of a head's unrotated part; its rotated part to the end of its query."""
    n_nope, n_rot, n_latent = word(args, A.n_nope), word(args, A.n_rot), word(args, A.n_latent)
    x = word(args, A.q) + row * word(args, A.q_stride) + 4 * head * (n_nope + n_rot)
    dst = word(args, A.act_shared) + (row * word(args, A.n_head) + head) * word(args, A.act_stride)
    quantise_row(x, n_nope, dst, args, A.act_scratch)
    query = word(args, A.queries) + row * word(args, A.queries_stride) + 4 * head * (n_latent + n_rot)
    rotated(args, row, x + 4 * n_nope, query + 4 * n_latent)


@glue
def store_latent(control, args, thread, row):
    """Norm and rotate a row's key, and write it and its latent into the row's block, this node's."""
    n_latent, position = word(args, A.n_latent), row_position(control, row)
    x = word(args, A.kv) + row * word(args, A.kv_stride)
    key = word(thread, THREAD_SCRATCH) + word(args, A.work_scratch)
    rms_norm(x, vector_address(word(args, A.kv_norm)), n_latent, float_word(args, A.eps), key)
    rotated(args, row, x + 4 * n_latent, key + 4 * n_latent)
    base = slot_address(control, thread, row, position // KV_BLOCK, word(args, A.slot_bytes))
    base += word(args, A.layer_off)
    store_key_value(base, n_latent + word(args, A.n_rot), n_latent, position % KV_BLOCK, key, key)


@op
def mla_prepare(control, args, thread):
    """Queries: (row, head) in turn over the team. Keys: rows in turn over the threads of the node that has
    the row's block."""
    n_rows, n_head = word(control, STEP_N_ROWS), word(args, A.n_head)
    for entry in range(word(thread, THREAD_TEAM_INDEX), n_rows * n_head, word(thread, THREAD_TEAM_SIZE)):
        prepare_query(args, entry // n_head, entry % n_head)
    n_nodes, node = word(thread, THREAD_N_NODES), word(thread, THREAD_NODE)
    for row in range(word(thread, THREAD_INDEX), n_rows, word(thread, THREAD_N_THREADS)):
        if row_position(control, row) // KV_BLOCK % n_nodes == node:
            store_latent(control, args, thread, row)
