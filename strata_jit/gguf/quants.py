"""Blocks of quantised weights as NumPy dtypes, and their values in float32.

Owns the byte layouts and the definition of what they mean, written for clarity: the kernels are judged by it.
Knows no file. Sources: the layouts are `block_*` of ggml-common.h, the arithmetic `dequantize_row_*` of
ggml-quants.c; results are bit-equal to both, since every product is rounded to float32 in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from strata_jit.errors import ModelError
from strata_jit.gguf.grids import IQ3_S_GRID, IQ3_S_VALUES, IQ3_XXS_GRID, IQ3_XXS_VALUES
from strata_jit.gguf.types import GGMLType

Blocks = npt.NDArray[Any]
F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]

BLOCK_DTYPES: Mapping[GGMLType, np.dtype[Any]] = {
    GGMLType.F32: np.dtype("<f4"),
    GGMLType.F16: np.dtype("<f2"),
    GGMLType.BF16: np.dtype("<u2"),
    # block_q4_0: 32 columns; byte j holds the codes of columns j (low) and j + 16 (high)
    GGMLType.Q4_0: np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    GGMLType.Q4_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    # block_q5_0: as Q4_0; bit j of qh is the fifth bit of column j
    GGMLType.Q5_0: np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    GGMLType.Q5_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    # block_q8_0: 32 columns
    GGMLType.Q8_0: np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    # block_mxfp4: as Q4_0, with an exponent for a scale
    GGMLType.MXFP4: np.dtype([("e", "u1"), ("qs", "u1", 16)]),
    # block_iq4_nl: as Q4_0
    GGMLType.IQ4_NL: np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    # block_iq4_xs: 8 sub-blocks of 32 columns, each as in IQ4_NL; 6-bit scales, 2 bits of each in scales_h
    GGMLType.IQ4_XS: np.dtype(
        [("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", (8, 16))]
    ),
    # block_q2_K: 2 halves of 128 columns, a byte of scale (low nibble) and min per 16 columns; the code of
    # column 32i + j of a half is at bit 2i of qs[j]
    GGMLType.Q2_K: np.dtype([("scales", "u1", 16), ("qs", "u1", (2, 32)), ("d", "<f2"), ("dmin", "<f2")]),
    # block_q3_K: as Q2_K; bit i of hmask[j] is the third bit of column j of sub-block i of 32; see _q3_k
    GGMLType.Q3_K: np.dtype([("hmask", "u1", 32), ("qs", "u1", (2, 32)), ("scales", "u1", 12), ("d", "<f2")]),
    # block_q4_K: 8 sub-blocks of 32 columns; byte j of qs[i] holds column j of sub-blocks 2i and 2i + 1
    GGMLType.Q4_K: np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32))]),
    # block_q5_K: as Q4_K; bit i of qh[j] is the fifth bit of column j of sub-block i
    GGMLType.Q5_K: np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", (4, 32))]
    ),
    # block_q6_K: 2 halves of 128 columns, 16 scales of 16 columns each; see _q6_k
    GGMLType.Q6_K: np.dtype(
        [("ql", "u1", (2, 64)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2")]
    ),
    # block_iq3_xxs: an index into the grid for 4 columns, a word of scale and signs for 32; see _iq3_xxs
    GGMLType.IQ3_XXS: np.dtype([("d", "<f2"), ("qs", "u1", 64), ("scales_signs", "<u4", 8)]),
    # block_iq3_s: bit i of qh[j] is the ninth bit of index 8j + i; a nibble of scales for 32 columns
    GGMLType.IQ3_S: np.dtype(
        [("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]
    ),
}
"""One block of each type that can be dequantised; an element of the array is a block."""

KVALUES_IQ4NL: npt.NDArray[np.int8] = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
"""Values of the 16 codes of IQ4_NL and IQ4_XS: `kvalues_iq4nl` of ggml-common.h."""
KVALUES_IQ4NL.flags.writeable = False
KVALUES_MXFP4: npt.NDArray[np.int8] = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8
)
"""Twice the values of the 16 codes of MXFP4: `kvalues_mxfp4` of ggml-common.h."""
KVALUES_MXFP4.flags.writeable = False

_BITS: U8Array = np.arange(16, dtype=np.uint8)


def dequantize(ggml_type: GGMLType, data: U8Array, n_cols: int) -> F32Array:
    """Values of rows of packed weights.

    data    uint8[..., row_bytes]   rows as a file holds them, row_bytes = ggml_type.row_bytes(n_cols)
    returns float32[..., n_cols]

    Raises `ModelError` for a type without a definition here and for rows of another length.
    """
    dtype = BLOCK_DTYPES.get(ggml_type)
    if dtype is None:
        known = ", ".join(known_type.name for known_type in BLOCK_DTYPES)
        raise ModelError(f"type {GGMLType(ggml_type).name} is not supported, expected one of {known}")
    row_bytes = ggml_type.row_bytes(n_cols)
    if n_cols % ggml_type.block_size or data.dtype != np.uint8 or data.shape[-1:] != (row_bytes,):
        found = f"{data.dtype}{list(data.shape)} for rows of {n_cols} columns"
        expected = f"uint8[..., {row_bytes}] and a multiple of {ggml_type.block_size} columns"
        raise ModelError(f"{ggml_type.name} data: found {found}, expected {expected}")
    blocks = np.ascontiguousarray(data).reshape(-1).view(dtype)
    with np.errstate(invalid="ignore", over="ignore"):  # a scale may be inf, nan or huge, as in ggml
        values = _DEQUANTIZERS[ggml_type](blocks)
    return values.reshape(*data.shape[:-1], n_cols)


def _f32(numbers: npt.NDArray[Any]) -> F32Array:
    return numbers.astype(np.float32)


def _bf16(blocks: Blocks) -> F32Array:
    bits: npt.NDArray[np.uint32] = blocks.astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _q4_0(blocks: Blocks) -> F32Array:
    return _scaled(_f32(blocks["d"]), _f32(_nibbles(blocks["qs"])) - np.float32(8))


def _q4_1(blocks: Blocks) -> F32Array:
    return _scaled(_f32(blocks["d"]), _f32(_nibbles(blocks["qs"]))) + _f32(blocks["m"])[:, None]


def _q5_0(blocks: Blocks) -> F32Array:
    return _scaled(_f32(blocks["d"]), _f32(_five_bits(blocks)) - np.float32(16))


def _q5_1(blocks: Blocks) -> F32Array:
    return _scaled(_f32(blocks["d"]), _f32(_five_bits(blocks))) + _f32(blocks["m"])[:, None]


def _mxfp4(blocks: Blocks) -> F32Array:
    """The scale is 2**(e - 128), half of E8M0's, since the code book is doubled; e = 255 is no nan."""
    scales = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)
    return _scaled(scales, _f32(KVALUES_MXFP4[_nibbles(blocks["qs"])]))


def _q8_0(blocks: Blocks) -> F32Array:
    return _scaled(_f32(blocks["d"]), _f32(blocks["qs"]))


def _iq4_nl(blocks: Blocks) -> F32Array:
    return _scaled(_f32(blocks["d"]), _f32(KVALUES_IQ4NL[_nibbles(blocks["qs"])]))


def _iq4_xs(blocks: Blocks) -> F32Array:
    """The scale of sub-block i has 6 bits, less 32: nibble i of scales_l, 2 more at bit 2i of scales_h."""
    low = np.stack([blocks["scales_l"] & 15, blocks["scales_l"] >> 4], axis=-1).reshape(-1, 8)
    high = (blocks["scales_h"][:, None] >> _BITS[::2]) & 3
    scales = _scaled(_f32(blocks["d"]), _f32(low | high << 4) - np.float32(32))
    return _scaled(scales, _f32(KVALUES_IQ4NL[_nibbles(blocks["qs"])]))


def _q2_k(blocks: Blocks) -> F32Array:
    packed: U8Array = blocks["scales"]
    scales = _scaled(_f32(blocks["d"]), _f32(packed & 15))
    mins = _scaled(_f32(blocks["dmin"]), _f32(packed >> 4))
    return _scaled(scales, _f32(_two_bits(blocks["qs"]).reshape(-1, 16, 16))) - mins[..., None]


def _q3_k(blocks: Blocks) -> F32Array:
    """Scales of 16 columns have 6 bits, less 32: the low 4 are nibble s // 8 of byte s % 8, the high 2 are at
    bit 2 * (s // 4) of byte 8 + s % 4. Codes have 3 bits, less 4.
    """
    packed: U8Array = blocks["scales"]
    high = (packed[:, None, 8:] >> _BITS[:8:2, None]) & np.uint8(3)
    codes = _nibbles(packed[:, :8]) | high.reshape(-1, 16) << 4
    scales = _scaled(_f32(blocks["d"]), _f32(codes) - np.float32(32))
    third = (blocks["hmask"][:, None, :] >> _BITS[:8, None]) & np.uint8(1)
    weights = _f32(_two_bits(blocks["qs"]) | third.reshape(-1, 256) << 2) - np.float32(4)
    return _scaled(scales, weights.reshape(-1, 16, 16))


def _q4_k(blocks: Blocks) -> F32Array:
    return _scaled_less_min(blocks, _nibbles(blocks["qs"]).reshape(-1, 8, 32))


def _q5_k(blocks: Blocks) -> F32Array:
    qh: U8Array = blocks["qh"]
    high = (qh[:, None, :] >> _BITS[:8, None]) & np.uint8(1)
    return _scaled_less_min(blocks, _nibbles(blocks["qs"]).reshape(-1, 8, 32) | high << np.uint8(4))


def _q6_k(blocks: Blocks) -> F32Array:
    """Column 32i + j of a half has 6 bits, less 32: the high 2 are at bit 2i of qh[j].

    The low 4 are the low nibble of ql[32i + j] for the first 64 columns, for the others the high nibble of
    ql[32(i - 2) + j].
    """
    low = _nibbles(blocks["ql"])
    qh: U8Array = blocks["qh"]
    high = (qh[:, :, None, :] >> _BITS[:8:2, None]) & np.uint8(3)
    codes = low | high.reshape(-1, 2, 128) << 4
    scales = _scaled(_f32(blocks["d"]), _f32(blocks["scales"]))
    return _scaled(scales, _f32(codes.reshape(-1, 16, 16)) - np.float32(32))


def _iq3_xxs(blocks: Blocks) -> F32Array:
    """A word has four times 7 sign bits, whose eighth makes their number even, and 4 bits of scale on top."""
    words = blocks["scales_signs"]
    scales = _scaled(_f32(blocks["d"]), np.float32(0.5) + _f32(words >> 28)) * np.float32(0.5)
    seven = (words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)).astype(np.uint8) & np.uint8(127)
    parity = np.bitwise_xor.reduce(seven[..., None] >> _BITS[:7] & np.uint8(1), axis=-1)
    weights = _signed(IQ3_XXS_VALUES, IQ3_XXS_GRID[blocks["qs"]], seven | parity << 7)
    return _scaled(scales, weights)


def _iq3_s(blocks: Blocks) -> F32Array:
    packed: U8Array = blocks["scales"]
    halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 8)
    scales = _scaled(_f32(blocks["d"]), _f32(1 + 2 * halves))
    ninth = (blocks["qh"][..., None] >> _BITS[:8]) & np.uint8(1)
    grid = IQ3_S_GRID[blocks["qs"] | ninth.reshape(-1, 64).astype(np.uint16) << 8]
    return _scaled(scales, _signed(IQ3_S_VALUES, grid, blocks["signs"]))


def _signed(values: tuple[int, ...], grid: U8Array, signs: U8Array) -> F32Array:
    """float32[n_blocks, 8, 32]: magnitudes `values[grid]`, negative where a column's sign bit is set."""
    bits = (signs.reshape(-1, 32, 1) >> _BITS[:8]) & np.uint8(1)
    magnitudes: F32Array = np.array(values, np.float32)[grid.reshape(-1, 8, 32)]
    return np.where(bits.reshape(-1, 8, 32), -magnitudes, magnitudes)


def _scaled(scales: F32Array, quants: F32Array) -> F32Array:
    """float32[..., n] from scales float32[...] and quants float32[..., n]."""
    product: F32Array = scales[..., None] * quants
    return product


def _scaled_less_min(blocks: Blocks, codes: U8Array) -> F32Array:
    """Q4_K and Q5_K: (d * scale) * q - dmin * min for codes uint8[n_blocks, 8, 32]."""
    scales, mins = _scales_mins(blocks["scales"])
    scaled = _scaled(_scaled(_f32(blocks["d"]), _f32(scales)), _f32(codes))
    return scaled - _scaled(_f32(blocks["dmin"]), _f32(mins)).reshape(-1, 8, 1)


def _scales_mins(packed: U8Array) -> tuple[U8Array, U8Array]:
    """Eight 6-bit scales and eight mins out of 12 bytes, uint8[n_blocks, 8] each.

    Bytes 0-3 and 4-7 hold scales and mins 0-3, and in their high 2 bits those of scales and mins 4-7; bytes
    8-11 hold the low 4 bits of scales (low nibble) and mins (high nibble) 4-7: `get_scale_min_k4`.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scales, mins


def _two_bits(packed: U8Array) -> U8Array:
    """uint8[n_blocks, 256] from uint8[n_blocks, 2, 32]: bit pairs 0 of 32 bytes, then pairs 1, 2 and 3."""
    pairs: U8Array = (packed[:, :, None, :] >> _BITS[:8:2, None]) & np.uint8(3)
    return pairs.reshape(-1, 256)


def _five_bits(blocks: Blocks) -> U8Array:
    """Codes of Q5_0 and Q5_1: uint8[n_blocks, 32]."""
    fifth: U8Array = (blocks["qh"][..., None] >> _BITS[:8]) & np.uint8(1)
    return _nibbles(blocks["qs"]) | fifth.reshape(-1, 32) << np.uint8(4)


def _nibbles(packed: U8Array) -> U8Array:
    """Low nibbles of the last axis, then its high nibbles: uint8[..., n] to uint8[..., 2n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


_DEQUANTIZERS: Mapping[GGMLType, Callable[[Blocks], F32Array]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f32,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ3_S: _iq3_s,
}
