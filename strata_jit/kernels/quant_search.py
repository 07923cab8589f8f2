"""The search for the scale of a group of weights, and the codes that go with it.

Owns what all quantisers of weights share: codes, sums, rounding of scales, blocks of groups with integer
scales. What is minimised, and in which order: twin `ref/quantizers.py`. Generic vector code, so the same bits
on every CPU. Knows no block's bytes.

In all of it `x` is the address of n float32, n a multiple of 8, and `kind` a literal: "IQ4" or "Q6".
"""

from itertools import pairwise

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from strata_jit.kernels._jit import OVERLOAD_OPTIONS, inline_kernel
from strata_jit.kernels.vec import (
    I16,
    I32,
    call_llvm,
    const,
    emit_half_to_f32,
    f16_bits,
    f32x8,
    fma8,
    hmax8,
    i32x8,
    load8,
    load_f32,
    load_f64,
    max8,
    min8,
    splat8,
    store8_i8,
    store_f32,
    store_f64,
    store_u8,
    sum8,
    vector,
)
from strata_jit.kernels.weights import BOOKS

WORK_SQUARES, WORK_ERRORS, WORK_SCALES, WORK_CODES = 0, 8, 16, 80
"""Bytes in the work record: float64 sums of squares and of squared errors; scratch: 16 float32, 256 bytes."""
WORK_BYTES = WORK_CODES + 256

PEAK_CODES = {
    "IQ4": tuple(float(end + 3 * step) for end in (-127, 113) for step in range(-8, 9)),
    "Q6": tuple(-32 - step / 4 for step in range(-8, 9)),
}
"""Codes that a group's peak is tried as."""
LEAST = np.float32(2.0**-25)
"""Groups below it are 0: half of the least value but 0 that any block can hold."""
HALF_MAX = np.float32(65504)
HALF_SIGN = np.uint16(0x8000)
ZERO, ONE = np.float32(0), np.float32(1)


# --- codes -------------------------------------------------------------------------------------------------


def _emit_steps(b, x, first, steps):
    """`first` plus the second number of each step (threshold, number) whose threshold is at most x."""
    total = const(i32x8.llvm, first)
    for threshold, number in steps:
        reached = b.sext(b.fcmp_ordered(">=", x, const(f32x8.llvm, threshold)), i32x8.llvm)
        total = b.add(total, b.and_(reached, const(i32x8.llvm, number)))
    return total


_PAIRS = tuple(pairwise(BOOKS["IQ4_NL"]))
_VALUE_STEPS = [((low + high) / 2, high - low) for low, high in _PAIRS]
_INDEX_STEPS = [((low + high) / 2, 1) for low, high in _PAIRS]


def _emit_q6(b, x):
    """The integer from -32 to 31 nearest to x."""
    x = call_llvm(b, "llvm.nearbyint.v8f32", f32x8.llvm, x)
    for condition, end in (("<", 31.0), (">", -32.0)):
        bound = const(f32x8.llvm, end)
        x = b.select(b.fcmp_ordered(condition, x, bound), x, bound)
    return x


@intrinsic(prefer_literal=True)
def nearest8(typingctx, kind, x):
    """f32x8: value of the code nearest to each lane; `kind` is a literal, "IQ4" or "Q6"."""
    if not isinstance(kind, types.Literal):
        return None
    is_q6 = kind.literal_value == "Q6"

    def codegen(context, b, signature, args):
        if is_q6:
            return _emit_q6(b, args[1])
        return b.sitofp(_emit_steps(b, args[1], BOOKS["IQ4_NL"][0], _VALUE_STEPS), f32x8.llvm)

    return f32x8(kind, f32x8), codegen


@intrinsic(prefer_literal=True)
def index8(typingctx, kind, x):
    """i32x8: what is stored for the code nearest to each lane."""
    if not isinstance(kind, types.Literal):
        return None
    is_q6 = kind.literal_value == "Q6"

    def codegen(context, b, signature, args):
        if is_q6:
            return b.add(b.fptosi(_emit_q6(b, args[1]), i32x8.llvm), const(i32x8.llvm, 32))
        return _emit_steps(b, args[1], 0, _INDEX_STEPS)

    return i32x8(kind, f32x8), codegen


@intrinsic
def half_value(typingctx, bits):
    """float32 of the f16 with these bits (uint16)."""

    def codegen(context, b, signature, args):
        one = b.insert_element(const(vector(I16, 1), 0), args[0], ir.Constant(I32, 0))
        return b.extract_element(emit_half_to_f32(context, b, one), ir.Constant(I32, 0))

    return types.float32(types.uint16), codegen


# --- groups ------------------------------------------------------------------------------------------------


@inline_kernel
def _peak(x, n):
    """The value of largest magnitude, the positive one of two."""
    high = low = load8(x)
    for k in range(32, 4 * n, 32):
        high, low = max8(load8(x + k), high), min8(load8(x + k), low)
    highest, lowest = hmax8(high), -hmax8(-low)
    return highest if highest >= -lowest else lowest


@inline_kernel
def square_sum(x, n):
    """Sum of x * x in the twin's order."""
    total = splat8(ZERO)
    for k in range(0, 4 * n, 32):
        total = fma8(load8(x + k), load8(x + k), total)
    return sum8(total)


@inline_kernel
def half_bits(d):
    """Bits of d as f16, nearest even, but kept finite, and not 0 unless it is."""
    bits = f16_bits(min(max(d, -HALF_MAX), HALF_MAX))
    if bits & ~HALF_SIGN == 0 and d != ZERO:
        bits = np.uint16(bits | 1)
    return bits


@inline_kernel
def inverse(scale):
    """1 / scale, 0 for 0."""
    return ONE / scale if scale != ZERO else ZERO


@inline_kernel
def add(address, value):
    """Add to the float64 at `address`."""
    store_f64(address, load_f64(address) + np.float64(value))


def search(kind, x, n):
    """Scale of a group; nopython only, as all below that take a literal `kind`."""
    raise NotImplementedError


@overload(search, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _search_of(kind, x, n):
    codes = np.array(PEAK_CODES[kind.literal_value], np.float32)

    def search_group(kind, x, n):
        peak = _peak(x, n)
        if abs(peak) < LEAST:
            return ZERO
        best_qx, best_qq = ZERO, ONE
        for code in codes:
            factor = splat8(code / peak)
            qx, qq = splat8(ZERO), splat8(ZERO)
            for k in range(0, 4 * n, 32):
                v = load8(x + k)
                q = nearest8(kind, v * factor)
                qx, qq = fma8(q, v, qx), fma8(q, q, qq)
            sum_qx, sum_qq = sum8(qx), sum8(qq)
            wide_qx, wide_best = np.float64(sum_qx), np.float64(best_qx)
            if wide_qx * wide_qx * best_qq > wide_best * wide_best * sum_qq:
                best_qx, best_qq = sum_qx, sum_qq
        return best_qx / best_qq

    return search_group


def error(kind, x, n, scale):
    """Sum of squared errors of a group with that scale."""
    raise NotImplementedError


@overload(error, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _error_of(kind, x, n, scale):
    def group_error(kind, x, n, scale):
        wide, factor = splat8(scale), splat8(inverse(scale))
        total = splat8(ZERO)
        for k in range(0, 4 * n, 32):
            v = load8(x + k)
            wrong = v - wide * nearest8(kind, v * factor)
            total = fma8(wrong, wrong, total)
        return sum8(total)

    return group_error


def store_codes(kind, x, n, scale, codes):
    """One byte for each code, at `codes`."""
    raise NotImplementedError


@overload(store_codes, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _store_codes_of(kind, x, n, scale, codes):
    def store(kind, x, n, scale, codes):
        factor = splat8(inverse(scale))
        for k in range(0, n, 8):
            store8_i8(codes + k, index8(kind, load8(x + 4 * k) * factor))

    return store


def sub_blocks(kind, x, n, n_sub, least, work, sub_scales):
    """Search, round and code `n_sub` groups of n columns; bits of d.

    Integer scales, from `least` to -least - 1, go as bytes to `sub_scales`, codes to the work record.
    """
    raise NotImplementedError


@overload(sub_blocks, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _sub_blocks_of(kind, x, n, n_sub, least, work, sub_scales):
    def all_groups(kind, x, n, n_sub, least, work, sub_scales):
        scales = work + WORK_SCALES
        for i in range(n_sub):
            store_f32(scales + 4 * i, search(kind, x + 4 * n * i, n))
        bits = half_bits(_peak(scales, n_sub) / np.float32(least))
        d = half_value(bits)
        for i in range(n_sub):
            group = x + 4 * n * i
            middle = np.float32(np.rint(load_f32(scales + 4 * i) / d)) if d != ZERO else ZERO
            chosen, best = ZERO, np.float32(np.inf)
            for step in (ZERO, -ONE, ONE):
                k = min(max(middle + step, np.float32(least)), np.float32(-least - 1))
                squares = error(kind, group, n, d * k)
                if squares < best:
                    chosen, best = k, squares
            add(work + WORK_ERRORS, best)
            store_u8(sub_scales + i, np.int64(chosen) & 255)
            store_codes(kind, group, n, d * chosen, work + WORK_CODES + n * i)
        return bits

    return all_groups
