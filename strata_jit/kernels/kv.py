"""Where keys and values of a (sequence, block, kv head) lie, and how one position is written.

Owns the layout of a KV head block: keys float16 [256 / 8][head_dim][8 positions], then values float16
[256][value_dim]. A block belongs to node `block % n_nodes`; only that node's threads can address it.
"""

from strata_jit.kernels._jit import glue, inline_kernel
from strata_jit.kernels.abi import (
    KV_BLOCK,
    ROW_POSITION,
    ROW_SEQUENCE,
    ROW_WORDS,
    STEP_KV_TABLE,
    STEP_KV_TABLE_STRIDE,
    STEP_ROWS,
    THREAD_KV,
)
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.vec import f16_bits, load8, load_f32, store8_f16, store_u16, word

QKV = arg_index("attn_prepare")
"""Arguments that `attn_prepare` and `attention` have in common, at the same places."""
HALF_BYTES = 2
KEY_OCTET = 8
"""Positions that lie side by side for each dimension of the keys."""


@glue
def row_position(control, row):
    """Position of a row of the step in its sequence."""
    return word(control + word(control, STEP_ROWS), row * ROW_WORDS + ROW_POSITION)


@glue
def row_sequence(control, row):
    """Sequence of a row of the step."""
    return word(control + word(control, STEP_ROWS), row * ROW_WORDS + ROW_SEQUENCE)


@glue
def first_visible(position, window):
    """First position that `position` attends to: of the last `window` ones, itself included, or all (0)."""
    return max(position - window + 1, 0) if window > 0 else 0


@glue
def slot_address(control, thread, row, block, slot_bytes):
    """Address of the row's sequence's block, all layers of it; the block must be this node's."""
    entry = row_sequence(control, row) * word(control, STEP_KV_TABLE_STRIDE) + block
    return word(thread, THREAD_KV) + word(control + word(control, STEP_KV_TABLE), entry) * slot_bytes


@glue
def head_block(control, args, thread, row, block, kv_head):
    """Address of one kv head's block of the row's sequence; the block must be this node's."""
    base = slot_address(control, thread, row, block, word(args, QKV.slot_bytes)) + word(args, QKV.layer_off)
    return base + kv_head * (HALF_BYTES * KV_BLOCK) * (word(args, QKV.head_dim) + word(args, QKV.value_dim))


@glue
def values_of(head, head_dim):
    """Address of the values in the head block at `head`."""
    return head + HALF_BYTES * KV_BLOCK * head_dim


@inline_kernel
def store_key_value(head, head_dim, value_dim, place, key, value):
    """Write key float32[head_dim] and value float32[value_dim] as position number `place` of a head block."""
    octet, lane = place // KEY_OCTET, place % KEY_OCTET
    to = head + HALF_BYTES * (octet * KEY_OCTET * head_dim + lane)
    for d in range(head_dim):
        store_u16(to + HALF_BYTES * KEY_OCTET * d, f16_bits(load_f32(key + 4 * d)))
    to = values_of(head, head_dim) + HALF_BYTES * value_dim * place
    for d in range(0, value_dim, 8):
        store8_f16(to + HALF_BYTES * d, load8(value + 4 * d))
