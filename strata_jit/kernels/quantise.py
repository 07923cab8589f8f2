"""Float rows -> the activation planes that dot kernels read, and the op `ff_quant`.

Owns the int8 quantisation of activations, and where a row goes (the ACT arguments of an op). Per block of
256 or 32 columns: amax = max |x|, d = amax / 127, a = rint(x * (127 / amax)), ties to even; where 127 / amax
is not finite, a = 0. `layout.act_planes` has the layout. Knows no matrix type, only the kinds F32, Q256, Q32.
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import STEP_N_ROWS, THREAD_SCRATCH, THREAD_TEAM_INDEX, THREAD_TEAM_SIZE
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.vec import (
    abs_i32,
    hmax_magnitude8,
    load8,
    max_magnitude8,
    round8,
    splat8,
    store8,
    store8_i8,
    store8_i16,
    store_f32,
    store_u16,
    sum_i32,
    swap_middle_i32,
    to_i32,
    word,
)

FF = arg_index("ff_quant")
QUANT_MAX = np.float32(127)
LARGEST = np.float32(np.finfo(np.float32).max)
ZERO = np.float32(0)


@glue
def _inverse(amax):
    """127 / amax; 0 where that is not finite (nothing to quantise, or not representable)."""
    inverse = QUANT_MAX / amax
    return inverse if inverse <= LARGEST else ZERO


@glue
def _quantise8(x, inverse, pairs, a16):
    """Round x * inverse; store eight a, |a| and (in pair order) int16 a; returns a as i32x8."""
    a = to_i32(round8(x * inverse))
    store8_i8(pairs, a)
    store8_i8(pairs + 32, abs_i32(a))
    store8_i16(a16, swap_middle_i32(a))
    return a


@glue
def _round_up_64(n):
    return (n + 63) & ~63


@inline_kernel
def largest_magnitude(x, nbytes):
    """Largest magnitude of the float32 in `nbytes` at `x`."""
    largest = splat8(ZERO)
    for k in range(0, nbytes, 32):
        largest = max_magnitude8(load8(x + k), largest)
    return hmax_magnitude8(largest)


@inline_kernel
def _quantise32(x, inverse, pairs, a16, sums, second):
    """`_quantise8` of 32 columns; stores the sums of 16 at `sums` and at `sums` + `second`."""
    inverse = splat8(inverse)
    for half in range(2):
        total = _quantise8(load8(x), inverse, pairs, a16)
        total = total + _quantise8(load8(x + 32), inverse, pairs + 8, a16 + 16)
        store_u16(sums + second * half, sum_i32(total))
        x, pairs, a16 = x + 64, pairs + 16, a16 + 32


@glue
def quantise_q256(x, n, dst):
    """Planes of kind Q256 at `dst` from float32[n] at `x`, n % 256 == 0."""
    a16 = dst + 2 * n
    d = a16 + 2 * n
    sums = d + _round_up_64(n // 64)
    for block in range(0, n, 256):
        amax = largest_magnitude(x + 4 * block, 1024)
        store_f32(d + block // 64, amax / QUANT_MAX)
        inverse = _inverse(amax)
        for k in range(block, block + 256, 32):
            # sums of 16 columns in the order 0 2 1 3
            to = sums + k // 64 * 8 + k // 32 % 2 * 2
            _quantise32(x + 4 * k, inverse, dst + 2 * k, a16 + 2 * k, to, 4)


@glue
def quantise_q32(x, n, dst):
    """Planes of kind Q32 at `dst` from float32[n] at `x`, n % 32 == 0."""
    a16 = dst + 2 * n
    d = a16 + 2 * n
    sums = d + _round_up_64(n // 8)
    for k in range(0, n, 32):
        amax = largest_magnitude(x + 4 * k, 128)
        store_f32(d + k // 8, amax / QUANT_MAX)
        _quantise32(x + 4 * k, _inverse(amax), dst + 2 * k, a16 + 2 * k, sums + k // 8, 2)


@glue
def quantise_row(x, n, dst, args, act):
    """Write the wanted planes of float32[n] at `x` to the activation row at `dst`.

    `args` and `act`: the op's arguments and the index of the first of its ACT fields, which hold the offsets.
    `x` may be the row's own F32 plane.
    """
    off_f32, off_q256, off_q32 = word(args, act + 3), word(args, act + 4), word(args, act + 5)
    if off_f32 >= 0 and dst + off_f32 != x:
        for k in range(0, 4 * n, 32):
            store8(dst + off_f32 + k, load8(x + k))
    if off_q256 >= 0:
        quantise_q256(x, n, dst + off_q256)
    if off_q32 >= 0:
        quantise_q32(x, n, dst + off_q32)


@glue
def float_plane(dst, args, act, otherwise):
    """Address where a row's float32 may be written: its F32 plane if that is wanted, else `otherwise`."""
    off_f32 = word(args, act + 3)
    return dst + off_f32 if off_f32 >= 0 else otherwise


@glue
def act_row(args, act, thread, row, n_rows):
    """Address of activation row `row` of `n_rows`: in the scratch for a one-row step, else shared."""
    if n_rows == 1:
        return word(thread, THREAD_SCRATCH) + word(args, act)
    return word(args, act + 1) + row * word(args, act + 2)


@op
def ff_quant(control, args, thread):
    """Activation planes of every (row, expert rank) from the experts' inner values; an id of -1 is skipped.

    One row: every thread, all ranks, into its scratch. Many rows: entries in turn over the team.
    """
    n_rows, n_used = word(control, STEP_N_ROWS), word(args, FF.n_used)
    first, step, ids = word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE), word(args, FF.ids)
    if n_rows == 1:
        first, step, ids = 0, 1, word(thread, THREAD_SCRATCH) + word(args, FF.route_scratch)
    rows = act_row(args, FF.act_scratch, thread, 0, n_rows)
    for entry in range(first, n_rows * n_used, step):
        if word(ids, entry) >= 0:
            x = word(args, FF.ff) + entry * word(args, FF.ff_stride)
            dst = rows + entry * word(args, FF.act_stride)
            quantise_row(x, word(args, FF.n_ff), dst, args, FF.act_scratch)
