"""Float32 weights -> the blocks of a GGUF file: `quantizer(name)` gives a compiled function.

Owns the bytes of the blocks (ggml-common.h) and the refusal of values that they cannot hold; scales are
searched in `quant_search`. Twin: `ref/quantizers.py`. Knows no file.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from strata_jit.kernels._jit import OVERLOAD_OPTIONS, inline_kernel
from strata_jit.kernels.layout import CONVERSIONS, STORE_TYPES
from strata_jit.kernels.memory import u8_array
from strata_jit.kernels.quant_search import (
    WORK_BYTES,
    WORK_CODES,
    WORK_ERRORS,
    WORK_SQUARES,
    ZERO,
    add,
    error,
    half_bits,
    half_value,
    inverse,
    search,
    square_sum,
    store_codes,
    sub_blocks,
)
from strata_jit.kernels.quantise import QUANT_MAX, largest_magnitude
from strata_jit.kernels.vec import (
    F32,
    I32,
    f16_bits,
    fma8,
    load8,
    load_f32,
    max8,
    min8,
    round8,
    splat8,
    store8_i8,
    store_f32,
    store_u16,
    sum8,
    to_i32,
)

__all__ = ["LARGEST", "TYPES", "WORK_BYTES", "quantizer"]

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


@intrinsic
def float_bits(typingctx, x):
    """uint32 bits of a float32."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float_of_bits(typingctx, bits):
    """float32 of these bits (uint32)."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@inline_kernel
def _pack_iq4(codes, n, dst):
    """Byte j of each 32 columns: the codes of columns j (low nibble) and 16 + j."""
    source, target = u8_array(codes, n), u8_array(dst, n // 2)
    for group in range(0, n, 32):
        for j in range(16):
            target[group // 2 + j] = source[group + j] | source[group + 16 + j] << 4


# --- blocks: `name` is the type's, x, dst and work are addresses -------------------------------------------


def _iq4_nl(name, x, dst, work):
    bits = half_bits(search("IQ4", x, 32))
    # IQ4 has no code for 0: where the least d is too much, nothing is better
    squares, errors = square_sum(x, 32), error("IQ4", x, 32, half_value(bits))
    if squares < errors:
        bits, errors = np.uint16(0), squares
    add(work + WORK_ERRORS, errors)
    store_u16(dst, bits)
    store_codes("IQ4", x, 32, half_value(bits), work + WORK_CODES)
    _pack_iq4(work + WORK_CODES, 32, dst + 2)


def _iq4_xs(name, x, dst, work):
    sub_scales = dst + 8  # where the codes go later
    store_u16(dst, sub_blocks("IQ4", x, 32, 8, -32, work, sub_scales))
    high, scales, low = 0, u8_array(sub_scales, 8), u8_array(dst + 4, 4)
    for i in range(4):
        first, second = (scales[2 * i] + 32) & 63, (scales[2 * i + 1] + 32) & 63
        low[i] = first & 15 | (second & 15) << 4
        high |= (first >> 4 | (second >> 4) << 2) << 4 * i
    store_u16(dst + 2, high)
    _pack_iq4(work + WORK_CODES, 256, dst + 8)


def _q6_k(name, x, dst, work):
    store_u16(dst + 208, sub_blocks("Q6", x, 16, 16, -128, work, dst + 192))
    codes, low, high = u8_array(work + WORK_CODES, 256), u8_array(dst, 128), u8_array(dst + 128, 64)
    for half in range(2):
        c = codes[128 * half : 128 * half + 128]
        for j in range(32):
            low[64 * half + j] = c[j] & 15 | (c[64 + j] & 15) << 4
            low[64 * half + 32 + j] = c[32 + j] & 15 | (c[96 + j] & 15) << 4
            high[32 * half + j] = c[j] >> 4 | c[32 + j] >> 4 << 2 | c[64 + j] >> 4 << 4 | c[96 + j] >> 4 << 6


def _q8_0(name, x, dst, work):
    bits = half_bits(largest_magnitude(x, 128) / QUANT_MAX)
    d, total = half_value(bits), splat8(ZERO)
    store_u16(dst, bits)
    for k in range(0, 32, 8):
        v = load8(x + 4 * k)
        q = max8(min8(round8(v * splat8(inverse(d))), splat8(QUANT_MAX)), splat8(-QUANT_MAX))
        wrong = v - splat8(d) * q
        total = fma8(wrong, wrong, total)
        store8_i8(dst + 2 + k, to_i32(q))
    add(work + WORK_ERRORS, sum8(total))


def _f16(name, x, dst, work):
    bits = f16_bits(load_f32(x))
    store_u16(dst, bits)
    wrong = load_f32(x) - half_value(bits)
    add(work + WORK_ERRORS, np.float64(wrong) * wrong)


def _bf16(name, x, dst, work):
    bits = float_bits(load_f32(x))
    bits = np.uint32((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16))
    store_u16(dst, bits)
    wrong = load_f32(x) - float_of_bits(np.uint32(bits << np.uint32(16)))
    add(work + WORK_ERRORS, np.float64(wrong) * wrong)


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

    f turns float32 values at `x_addr` into `n_blocks` blocks of type `name`, one of `TYPES`, at `dst_addr`,
    and adds to the first two words of the work record, of `WORK_BYTES`, aligned to 8: float64 sums of squares
    and of squared errors. It returns -1, or the index of the first value that the type cannot hold, where it
    stops. This call compiles f, or reads it from the cache.
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
                add(work_addr + WORK_SQUARES, value * value)
            else:
                if not largest_magnitude(x, 4 * block_cols) <= largest:
                    return block_cols * block + _first_beyond(x, block_cols, largest)
                add(work_addr + WORK_SQUARES, square_sum(x, block_cols))
            _block(name, x, dst_addr + block_bytes * block, work_addr)
        return -1

    return quantize_blocks
