"""Float32 weights -> the blocks of a GGUF file: `quantizer(name)` gives a compiled function.

Owns the search of scales, the rounding and the packing (blocks: ggml-common.h). What is minimised, and in
which order: twin `ref/quantizers.py`. Generic vector code, so the same bits on every CPU. Knows no file.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from strata_jit.kernels._jit import OVERLOAD_OPTIONS, inline_kernel
from strata_jit.kernels.blocks import KVALUES_IQ4NL
from strata_jit.kernels.layout import CONVERSIONS, STORE_TYPES
from strata_jit.kernels.memory import u8_array, u32_array
from strata_jit.kernels.vec import (
    F32,
    I16,
    call_llvm,
    const,
    emit_half_to_f32,
    f16_bits,
    f32x8,
    fma8,
    hmax8,
    hmax_magnitude8,
    i32x8,
    load8,
    load_f32,
    load_f64,
    max8,
    max_magnitude8,
    min8,
    round8,
    splat8,
    store8_i8,
    store_f32,
    store_f64,
    store_u8,
    store_u16,
    sum8,
    to_i32,
    vector,
)

WORK_SQUARES, WORK_ERRORS = 0, 8
"""Bytes of the work record: float64 sums, to which a quantiser adds x * x and the squared errors."""
_SCALES, _CODES = 16, 80
WORK_BYTES = 80 + 256
"""After the sums: scratch for 16 float32 scales and 256 codes."""

LARGEST_HALF = 65504.0
LARGEST = {
    "IQ4_XS": LARGEST_HALF * 31 * 113,
    "IQ4_NL": LARGEST_HALF * 113,
    "Q6_K": LARGEST_HALF * 127 * 31,
    "Q8_0": LARGEST_HALF * 127,
    "F16": LARGEST_HALF,
    "BF16": float(np.uint32(0x7F7F0000).view(np.float32)),
    "F32": float(np.finfo(np.float32).max),
}
"""Magnitude that a type can hold with either sign; larger values, infinities and NaNs are refused."""
TYPES = tuple(LARGEST)

PEAK_CODES = {
    "IQ4": tuple(float(end + 3 * step) for end in (-127, 113) for step in range(-8, 9)),
    "Q6": tuple(-32 - step / 4 for step in range(-8, 9)),
}
LEAST = np.float32(2.0**-25)
HALF_MAX = np.float32(LARGEST_HALF)
HALF_SIGN = np.uint16(0x8000)
ZERO, ONE = np.float32(0), np.float32(1)
INT8_MAX = np.float32(127)


# --- codes -------------------------------------------------------------------------------------------------


def _emit_steps(b, x, first, steps):
    """`first` plus the second number of each step (threshold, number) whose threshold is at most x."""
    total = const(i32x8.llvm, first)
    for threshold, number in steps:
        reached = b.sext(b.fcmp_ordered(">=", x, const(f32x8.llvm, threshold)), i32x8.llvm)
        total = b.add(total, b.and_(reached, const(i32x8.llvm, number)))
    return total


_PAIRS = tuple(zip(KVALUES_IQ4NL[:-1], KVALUES_IQ4NL[1:], strict=True))
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
        return b.sitofp(_emit_steps(b, args[1], KVALUES_IQ4NL[0], _VALUE_STEPS), f32x8.llvm)

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
        one = b.insert_element(const(vector(I16, 1), 0), args[0], ir.Constant(ir.IntType(32), 0))
        return b.extract_element(emit_half_to_f32(context, b, one), ir.Constant(ir.IntType(32), 0))

    return types.float32(types.uint16), codegen


@intrinsic
def float_bits(typingctx, x):
    """uint32 bits of a float32."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def float_of_bits(typingctx, bits):
    """float32 of these bits (uint32)."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


# --- parts of a block; x is the address of n float32, n a multiple of 8 -----------------------------------


@inline_kernel
def _largest(x, n):
    largest = splat8(ZERO)
    for k in range(0, 4 * n, 32):
        largest = max_magnitude8(load8(x + k), largest)
    return hmax_magnitude8(largest)


@inline_kernel
def _peak(x, n):
    """The value of largest magnitude, the positive one of two."""
    high = low = load8(x)
    for k in range(32, 4 * n, 32):
        high, low = max8(load8(x + k), high), min8(load8(x + k), low)
    highest, lowest = hmax8(high), -hmax8(-low)
    return highest if highest >= -lowest else lowest


@inline_kernel
def _square_sum(x, n):
    total = splat8(ZERO)
    for k in range(0, 4 * n, 32):
        total = fma8(load8(x + k), load8(x + k), total)
    return sum8(total)


@inline_kernel
def _half_bits(d):
    """Bits of d as f16, nearest even, but kept finite, and not 0 unless it is."""
    bits = f16_bits(min(max(d, -HALF_MAX), HALF_MAX))
    if bits & ~HALF_SIGN == 0 and d != ZERO:
        bits = np.uint16(bits | 1)
    return bits


@inline_kernel
def _inverse(scale):
    """1 / scale, 0 for 0."""
    return ONE / scale if scale != ZERO else ZERO


@inline_kernel
def _add(address, value):
    store_f64(address, load_f64(address) + np.float64(value))


def _search(kind, x, n):
    """Scale of a group; nopython only, as all below that take a literal `kind`."""
    raise NotImplementedError


@overload(_search, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _search_of(kind, x, n):
    codes = np.array(PEAK_CODES[kind.literal_value], np.float32)

    def search(kind, x, n):
        peak = _peak(x, n)
        if abs(peak) < LEAST:
            return ZERO
        best_qx, best_qq = ZERO, ONE
        for code in codes:
            inverse = splat8(code / peak)
            qx, qq = splat8(ZERO), splat8(ZERO)
            for k in range(0, 4 * n, 32):
                v = load8(x + k)
                q = nearest8(kind, v * inverse)
                qx, qq = fma8(q, v, qx), fma8(q, q, qq)
            sum_qx, sum_qq = sum8(qx), sum8(qq)
            wide_qx, wide_best = np.float64(sum_qx), np.float64(best_qx)
            if wide_qx * wide_qx * best_qq > wide_best * wide_best * sum_qq:
                best_qx, best_qq = sum_qx, sum_qq
        return best_qx / best_qq

    return search


def _error(kind, x, n, scale):
    """Sum of squared errors of a group with that scale."""
    raise NotImplementedError


@overload(_error, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _error_of(kind, x, n, scale):
    def error(kind, x, n, scale):
        wide, inverse = splat8(scale), splat8(_inverse(scale))
        total = splat8(ZERO)
        for k in range(0, 4 * n, 32):
            v = load8(x + k)
            wrong = v - wide * nearest8(kind, v * inverse)
            total = fma8(wrong, wrong, total)
        return sum8(total)

    return error


def _store_codes(kind, x, n, scale, codes):
    """One byte for each code, at `codes`."""
    raise NotImplementedError


@overload(_store_codes, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _store_codes_of(kind, x, n, scale, codes):
    def store(kind, x, n, scale, codes):
        inverse = splat8(_inverse(scale))
        for k in range(0, n, 8):
            store8_i8(codes + k, index8(kind, load8(x + 4 * k) * inverse))

    return store


def _sub_blocks(kind, x, n, n_sub, least, work, sub_scales):
    """Search, round and code `n_sub` groups of n columns; bits of d.

    Integer scales, from `least` to -least - 1, go as bytes to `sub_scales`, codes to the work record.
    """
    raise NotImplementedError


@overload(_sub_blocks, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _sub_blocks_of(kind, x, n, n_sub, least, work, sub_scales):
    def sub_blocks(kind, x, n, n_sub, least, work, sub_scales):
        scales = work + _SCALES
        for i in range(n_sub):
            store_f32(scales + 4 * i, _search(kind, x + 4 * n * i, n))
        bits = _half_bits(_peak(scales, n_sub) / np.float32(least))
        d = half_value(bits)
        for i in range(n_sub):
            group = x + 4 * n * i
            middle = np.float32(np.rint(load_f32(scales + 4 * i) / d)) if d != ZERO else ZERO
            chosen, best = ZERO, np.float32(np.inf)
            for step in (ZERO, -ONE, ONE):
                k = min(max(middle + step, np.float32(least)), np.float32(-least - 1))
                error = _error(kind, group, n, d * k)
                if error < best:
                    chosen, best = k, error
            _add(work + WORK_ERRORS, best)
            store_u8(sub_scales + i, np.int64(chosen) & 255)
            _store_codes(kind, group, n, d * chosen, work + _CODES + n * i)
        return bits

    return sub_blocks


@inline_kernel
def _pack_iq4(codes, n, dst):
    """Byte j of each 32 columns: the codes of columns j (low nibble) and 16 + j."""
    source, target = u8_array(codes, n), u8_array(dst, n // 2)
    for group in range(0, n, 32):
        for j in range(16):
            target[group // 2 + j] = source[group + j] | source[group + 16 + j] << 4


# --- blocks: `name` is the type's, x, dst and work are addresses -------------------------------------------


def _iq4_nl(name, x, dst, work):
    bits = _half_bits(_search("IQ4", x, 32))
    # IQ4 has no code for 0: where the least d is too much, nothing is better
    squares, error = _square_sum(x, 32), _error("IQ4", x, 32, half_value(bits))
    if squares < error:
        bits, error = np.uint16(0), squares
    _add(work + WORK_ERRORS, error)
    store_u16(dst, bits)
    _store_codes("IQ4", x, 32, half_value(bits), work + _CODES)
    _pack_iq4(work + _CODES, 32, dst + 2)


def _iq4_xs(name, x, dst, work):
    sub_scales = dst + 8  # where the codes go later
    store_u16(dst, _sub_blocks("IQ4", x, 32, 8, -32, work, sub_scales))
    high, scales, low = 0, u8_array(sub_scales, 8), u8_array(dst + 4, 4)
    for i in range(4):
        first, second = (scales[2 * i] + 32) & 63, (scales[2 * i + 1] + 32) & 63
        low[i] = first & 15 | (second & 15) << 4
        high |= (first >> 4 | (second >> 4) << 2) << 4 * i
    store_u16(dst + 2, high)
    _pack_iq4(work + _CODES, 256, dst + 8)


def _q6_k(name, x, dst, work):
    store_u16(dst + 208, _sub_blocks("Q6", x, 16, 16, -128, work, dst + 192))
    codes, low, high = u8_array(work + _CODES, 256), u8_array(dst, 128), u8_array(dst + 128, 64)
    for half in range(2):
        c = codes[128 * half : 128 * half + 128]
        for j in range(32):
            low[64 * half + j] = c[j] & 15 | (c[64 + j] & 15) << 4
            low[64 * half + 32 + j] = c[32 + j] & 15 | (c[96 + j] & 15) << 4
            high[32 * half + j] = c[j] >> 4 | c[32 + j] >> 4 << 2 | c[64 + j] >> 4 << 4 | c[96 + j] >> 4 << 6


def _q8_0(name, x, dst, work):
    bits = _half_bits(_largest(x, 32) / INT8_MAX)
    d, total = half_value(bits), splat8(ZERO)
    store_u16(dst, bits)
    for k in range(0, 32, 8):
        v = load8(x + 4 * k)
        q = max8(min8(round8(v * splat8(_inverse(d))), splat8(INT8_MAX)), splat8(-INT8_MAX))
        wrong = v - splat8(d) * q
        total = fma8(wrong, wrong, total)
        store8_i8(dst + 2 + k, to_i32(q))
    _add(work + WORK_ERRORS, sum8(total))


def _f16(name, x, dst, work):
    bits = f16_bits(load_f32(x))
    store_u16(dst, bits)
    wrong = load_f32(x) - half_value(bits)
    _add(work + WORK_ERRORS, np.float64(wrong) * wrong)


def _bf16(name, x, dst, work):
    bits = float_bits(load_f32(x))
    bits = np.uint32((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16))
    store_u16(dst, bits)
    wrong = load_f32(x) - float_of_bits(np.uint32(bits << np.uint32(16)))
    _add(work + WORK_ERRORS, np.float64(wrong) * wrong)


def _f32(name, x, dst, work):
    store_f32(dst, load_f32(x))


_BLOCKS = {
    "IQ4_XS": _iq4_xs,
    "IQ4_NL": _iq4_nl,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "F16": _f16,
    "BF16": _bf16,
    "F32": _f32,
}


def _block(name, x, dst, work):
    """One block of the type `name`, a literal; nopython only."""
    raise NotImplementedError


@overload(_block, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _block_of(name, x, dst, work):
    return _BLOCKS[name.literal_value]


@inline_kernel
def _first_beyond(x, n, largest):
    """Index of the first of n values whose magnitude is no number up to `largest`; -1 if there is none."""
    for i in range(n):
        if not abs(load_f32(x + 4 * i)) <= largest:
            return i
    return -1


@cache
def quantizer(name: str) -> Any:
    """Compiled `f(x_addr, n_blocks, dst_addr, work_addr) -> int64`, all int64, no GIL.

    f turns float32 values at `x_addr` into `n_blocks` blocks of the type `name` (one of `TYPES`) at `dst_addr`
    and adds to the sums of the work record (`WORK_BYTES`, aligned to 8). It returns -1, or the index of the
    first value that the type cannot hold, where it stops. This call compiles f, or reads it from the cache.
    """
    conversion = CONVERSIONS[name]
    is_float = name in ("F16", "BF16", "F32")
    block_cols = 1 if is_float else STORE_TYPES[name].block_cols
    block_bytes = {"F16": 2, "BF16": 2, "F32": 4}.get(name, conversion.block_bytes)
    largest = np.float32(LARGEST[name])

    @njit("int64(int64, int64, int64, int64)", nogil=True, cache=True, error_model="numpy")
    def quantize_blocks(x_addr, n_blocks, dst_addr, work_addr):
        for block in range(n_blocks):
            x = x_addr + 4 * block_cols * block
            if is_float:
                value = np.float64(load_f32(x))
                if not abs(value) <= largest:
                    return block
                _add(work_addr + WORK_SQUARES, value * value)
            else:
                if not _largest(x, block_cols) <= largest:
                    return block_cols * block + _first_beyond(x, block_cols, largest)
                _add(work_addr + WORK_SQUARES, _square_sum(x, block_cols))
            _block(name, x, dst_addr + block_bytes * block, work_addr)
        return -1

    return quantize_blocks
