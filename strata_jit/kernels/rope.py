"""Rotary position embedding: the op `rope_angles`, once a step, and the rotation of one head.

Owns the two pair orders and the definition: angle = position * freq in float64; cos and sin by
`mathx.sincos`, times a factor, rounded once to float32; then a' = a*cos - b*sin and b' = a*sin + b*cos, every
operation rounded. Does not know where frequencies come from (scaling is in them).
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    ROW_POSITION,
    ROW_WORDS,
    STEP_N_ROWS,
    STEP_ROWS,
    THREAD_TEAM_INDEX,
    THREAD_TEAM_SIZE,
    WORD_BYTES,
)
from strata_jit.kernels.mathx import sincos
from strata_jit.kernels.registry import ROPE_NEOX, arg_index
from strata_jit.kernels.vec import (
    even8,
    float_word,
    load8,
    load_f32,
    load_f64,
    odd8,
    store8,
    store_f32,
    word,
    zip_high8,
    zip_low8,
)

A = arg_index("rope_angles")


@inline_kernel
def write_angles(position, freqs, n_half, factor, out):
    """float32[n_half][2] at `out`: cos and sin of position * freq, times factor; freqs: float64[n_half]."""
    for i in range(n_half):
        s, c = sincos(np.float64(position) * load_f64(freqs + i * WORD_BYTES))
        store_f32(out + i * WORD_BYTES, np.float32(c * factor))
        store_f32(out + i * WORD_BYTES + 4, np.float32(s * factor))


@op
def rope_angles(control, args, thread):
    """float32[row][n_half][2]: cos and sin of position * freq for all layers; rows in turn over the team."""
    n_half, factor = word(args, A.n_half), np.float64(float_word(args, A.factor))
    first, step = word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE)
    for row in range(first, word(control, STEP_N_ROWS), step):
        position = word(control + word(control, STEP_ROWS), row * ROW_WORDS + ROW_POSITION)
        out = word(args, A.angles) + row * n_half * WORD_BYTES
        write_angles(position, word(args, A.freqs), n_half, factor, out)


@glue
def _rotate1(a_address, b_address, angle):
    """Rotate the pair of float32 at two addresses by the (cos, sin) at `angle`."""
    a, b, c, s = load_f32(a_address), load_f32(b_address), load_f32(angle), load_f32(angle + 4)
    store_f32(a_address, a * c - b * s)
    store_f32(b_address, a * s + b * c)


@inline_kernel
def _rotate_neox(x, angles, n_half):
    """Pairs (i, i + n_half), eight at a time and the rest one by one."""
    n_vector = n_half & ~7
    for i in range(0, n_vector, 8):
        low, high = load8(angles + 8 * i), load8(angles + 8 * i + 32)
        c, s = even8(low, high), odd8(low, high)
        first, second = x + 4 * i, x + 4 * (i + n_half)
        a, b = load8(first), load8(second)
        store8(first, a * c - b * s)
        store8(second, a * s + b * c)
    for i in range(n_vector, n_half):
        _rotate1(x + 4 * i, x + 4 * (i + n_half), angles + 8 * i)


@inline_kernel
def _rotate_norm(x, angles, n_half):
    """Pairs (2i, 2i + 1), eight at a time and the rest one by one."""
    n_vector = n_half & ~7
    for i in range(0, n_vector, 8):
        low, high = load8(angles + 8 * i), load8(angles + 8 * i + 32)
        c, s = even8(low, high), odd8(low, high)
        low, high = load8(x + 8 * i), load8(x + 8 * i + 32)
        a, b = even8(low, high), odd8(low, high)
        first, second = a * c - b * s, a * s + b * c
        store8(x + 8 * i, zip_low8(first, second))
        store8(x + 8 * i + 32, zip_high8(first, second))
    for i in range(n_vector, n_half):
        _rotate1(x + 8 * i, x + 8 * i + 4, angles + 8 * i)


@glue
def rotate(x, angles, n_rot, mode):
    """Rotate the first n_rot elements of the head at `x` in place; `angles`: float32[n_rot / 2][2]."""
    if mode == ROPE_NEOX:
        _rotate_neox(x, angles, n_rot // 2)
    else:
        _rotate_norm(x, angles, n_rot // 2)
