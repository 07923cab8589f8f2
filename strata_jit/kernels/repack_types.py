"""From the blocks of each type of a file to an octet's header and payload: one function a conversion.

Owns the reading of ggml's blocks (layouts: llama.cpp `ggml-common.h`) and the order of vectors in the octets
that `kernels/layout.py` sizes and docs/kernels.md draws. Lossless for every type: codes and scales move, no
value is computed; the grid indices of IQ3 become codes of 4 bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from strata_jit.gguf.grids import IQ3_S_GRID, IQ3_XXS_GRID
from strata_jit.kernels.repack_block import BYTES, LOW_NIBBLES, WORDS, Block, Value
from strata_jit.kernels.vec import I32, const


def _put_nibbles(o: Block, q: list[Value], merge: Callable[[Value, Value], Value]) -> None:
    for i in range(0, len(q), 2):
        o.put(merge(q[i], q[i + 1]))


def _iq4_sub_block(o: Block, offset: int) -> None:
    """32 columns of IQ4: byte j holds the codes of columns j and 16 + j."""
    q = o.words(offset, 4)
    _put_nibbles(o, q, o.low_nibbles)
    _put_nibbles(o, q, o.high_nibbles)


def _iq4_nl(o: Block) -> None:
    """IQ4_NL and Q4_0."""
    o.put_header(o.halves(0))
    _iq4_sub_block(o, 2)


def _mxfp4(o: Block) -> None:
    o.put_header(o.bytes_(0))
    _iq4_sub_block(o, 1)


def _q4_1(o: Block) -> None:
    o.put_header(o.halves(0))
    o.put_header(o.halves(2), 16)
    _iq4_sub_block(o, 4)


def _fifth_bits(o: Block, offset: int) -> None:
    """Word of bits by column -> byte t of a lane holds those of columns t, 4 + t .. 28 + t."""
    bits = o.words(offset, 2)[0]
    fifth = o.spread(o.mask(bits, 15))
    for i in range(1, 8):
        fifth = o.or_(fifth, o.shl(o.spread(o.mask(o.shr(bits, 4 * i), 15)), i))
    o.put(fifth)


def _q5_0(o: Block) -> None:
    o.put_header(o.halves(0))
    _iq4_sub_block(o, 6)
    _fifth_bits(o, 2)


def _q5_1(o: Block) -> None:
    o.put_header(o.halves(0))
    o.put_header(o.halves(2), 16)
    _iq4_sub_block(o, 8)
    _fifth_bits(o, 4)


def _iq4_xs(o: Block) -> None:
    first, low, _, _ = o.words(0, 4)  # d | scales_h << 16, scales_l, two words of quants
    o.put_header(o.low_halves(first))
    for h in range(2):
        # spread four nibbles of scales_l, and four 2-bit fields of scales_h, one to a byte
        x = o.mask(o.shr(low, 16 * h), 0xFFFF)
        x = o.mask(o.or_(x, o.shl(x, 8)), 0x00FF00FF)
        x = o.mask(o.or_(x, o.shl(x, 4)), 0x0F0F0F0F)
        y = o.mask(o.shr(first, 16 + 8 * h), 0xFF)
        y = o.mask(o.or_(y, o.shl(y, 12)), 0x000F000F)
        y = o.mask(o.or_(y, o.shl(y, 6)), 0x03030303)
        scales = o.b.bitcast(o.or_(x, o.shl(y, 4)), BYTES)
        o.put(o.b.sub(scales, const(BYTES, 32)))
    for j in range(8):
        _iq4_sub_block(o, 8 + 16 * j)


def _iq3_table(o: Block, name: str, grid: Any) -> Value:
    """Constant of the module: for every entry of a grid a word of its four numbers."""
    words = np.ascontiguousarray(grid).view("<u4").ravel()
    table = ir.Constant(ir.ArrayType(I32, len(words)), [int(word) for word in words])
    return cgutils.global_constant(o.b, name, table)


def _iq3_sub_block(o: Block, numbers: list[Value], signs: list[Value]) -> None:
    """32 columns of IQ3: numbers of magnitudes of four columns each, and their signs as 4 bits of a word.

    Bit 3 of a code is its sign.
    """
    codes = [o.or_(n, o.shl(o.spread(s), 3)) for n, s in zip(numbers, signs, strict=True)]
    _put_nibbles(o, codes, o.low_nibbles)


def _iq3_xxs(o: Block) -> None:
    o.put_header(o.halves(0))
    words = o.words(66, 8)  # four times 7 sign bits, then 4 bits of scale, by sub-block
    for h in range(2):
        scales = o.shr(words[4 * h], 28)
        for t in range(1, 4):
            scales = o.or_(scales, o.shl(o.shr(words[4 * h + t], 28), 8 * t))
        o.put(o.or_(o.shl(scales, 1), const(WORDS, 0x01010101)))
    table = _iq3_table(o, "iq3_xxs_grid", IQ3_XXS_GRID)
    for j, word in enumerate(words):
        signs = []
        for k in range(4):
            seven = o.mask(o.shr(word, 7 * k), 127)
            parity = seven  # the eighth sign makes their number even
            for shift in (4, 2, 1):
                parity = o.b.xor(parity, o.shr(parity, shift))
            eight = o.or_(seven, o.shl(o.mask(parity, 1), 7))
            signs += [o.mask(eight, 15), o.shr(eight, 4)]
        _iq3_sub_block(o, [o.look_up(table, 2 + 8 * j + i) for i in range(8)], signs)


def _iq3_s(o: Block) -> None:
    o.put_header(o.halves(0))
    nibbles = o.words(102, 2)[1]  # 32 bits of scales, of which the first byte serves sub-blocks 0 and 1
    for h in range(2):
        scales = o.mask(o.shr(nibbles, 16 * h), 0xFFFF)
        scales = o.mask(o.or_(scales, o.shl(scales, 8)), 0x00FF00FF)
        scales = o.mask(o.or_(scales, o.shl(scales, 4)), LOW_NIBBLES)
        o.put(o.or_(o.shl(scales, 1), const(WORDS, 0x01010101)))
    table = _iq3_table(o, "iq3_s_grid", IQ3_S_GRID)
    ninths, signs = o.words(66, 2), o.words(74, 8)
    for j in range(8):
        numbers = []
        for i in range(8):
            bit = o.mask(o.shr(ninths[j // 4], 8 * (j % 4) + i), 1)
            numbers.append(o.look_up(table, 2 + 8 * j + i, o.shl(bit, 8)))
        _iq3_sub_block(o, numbers, [o.mask(o.shr(signs[j], 4 * i), 15) for i in range(8)])


def _q2_k(o: Block) -> None:
    o.put_header(o.halves(80))
    o.put_header(o.halves(82), 16)
    for scales_mins in o.words(0, 4):
        o.put(scales_mins)
    for half in range(2):
        for pairs in _bit_pairs(o, 16 + 32 * half):
            o.put(pairs)


def _bit_pairs(o: Block, offset: int) -> list[Value]:
    """Of 128 columns with 2 bits each in 32 bytes: per sub-block those of V_0 .. V_3, then of V_4 .. V_7."""
    first, second = (o.transpose_fields(o.words(offset + 16 * h, 4), 2) for h in range(2))
    return [v for pair in zip(first, second, strict=True) for v in pair]


def _q3_k(o: Block) -> None:
    o.put_header(o.halves(108))
    low, high = o.words(96, 2), o.words(100, 2)[1]
    for h in range(4):
        nibbles = o.mask(o.shr(low[h % 2], 4 * (h // 2)), LOW_NIBBLES)
        scales = o.or_(nibbles, o.shl(o.mask(o.shr(high, 2 * h), 0x03030303), 4))
        o.put(o.b.sub(o.b.bitcast(scales, BYTES), const(BYTES, 32)))
    third = o.transpose_fields(o.words(0, 8), 1)
    pairs = [v for half in range(2) for v in _bit_pairs(o, 32 + 32 * half)]
    for j in range(8):
        o.put(pairs[2 * j])
        o.put(pairs[2 * j + 1])
        o.put(third[j])


def _k_header(o: Block) -> None:
    """d, dmin, and the 6-bit scales and mins of Q4_K and Q5_K: the first 16 bytes of a block."""
    first, s, m, upper = o.words(0, 4)
    o.put_header(o.low_halves(first))
    o.put_header(o.low_halves(o.shr(first, 16)), 16)
    o.put(o.mask(s, 0x3F3F3F3F))
    o.put(o.or_(o.mask(upper, LOW_NIBBLES), o.mask(o.shr(s, 2), 0x30303030)))
    o.put(o.mask(m, 0x3F3F3F3F))
    o.put(o.or_(o.mask(o.shr(upper, 4), LOW_NIBBLES), o.mask(o.shr(m, 2), 0x30303030)))


def _q4_k(o: Block) -> None:
    _k_header(o)
    for pair in range(4):
        q = o.words(16 + 32 * pair, 8)
        _put_nibbles(o, q, o.low_nibbles)
        _put_nibbles(o, q, o.high_nibbles)


def _q5_k(o: Block) -> None:
    _k_header(o)
    fifth = o.transpose_fields(o.words(16, 8), 1)
    for pair in range(4):
        q = o.words(48 + 32 * pair, 8)
        _put_nibbles(o, q, o.low_nibbles)
        o.put(fifth[2 * pair])
        _put_nibbles(o, q, o.high_nibbles)
        o.put(fifth[2 * pair + 1])


def _q6_k(o: Block) -> None:
    o.put_header(o.halves(208))
    for scales in o.words(192, 4):
        o.put(scales)
    for half in range(2):
        q = o.words(64 * half, 16)
        high = _bit_pairs(o, 128 + 32 * half)
        for s in range(4):
            merge = o.high_nibbles if s >= 2 else o.low_nibbles
            _put_nibbles(o, q[8:] if s % 2 else q[:8], merge)
            o.put(high[2 * s])
            o.put(high[2 * s + 1])


def _q8_0(o: Block) -> None:
    o.put_header(o.halves(0))
    for v in o.words(2, 8):
        o.put(v)


def _bf16(o: Block) -> None:
    for v in o.words(0, 2):
        o.put(v)


def _f32(o: Block) -> None:
    for v in o.words(0, 4):
        o.put(v)


def _f16(o: Block) -> None:
    for v in o.words(0, 2):
        for half in (v, o.shr(v, 16)):
            o.put(o.low_halves(half))


def _f32_bf16(o: Block) -> None:
    w = o.words(0, 4)
    for i in (0, 2):
        o.put(o.or_(o.shr(w[i], 16), o.mask(w[i + 1], 0xFFFF0000)))


EMIT: dict[str, Callable[[Block], None]] = {
    "IQ4_XS": _iq4_xs,
    "IQ4_NL": _iq4_nl,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q4_0": _iq4_nl,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "BF16": _bf16,
    "F32": _f32,
    "F16": _f16,
    "F32_BF16": _f32_bf16,
}
"""Key of `layout.CONVERSIONS` -> what emits the conversion of one block."""
