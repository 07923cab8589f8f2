"""Rows of a GGUF file taken apart into codes and scales, column by column as ggml defines them.

Owns the reading of ggml's blocks (layouts: llama.cpp `ggml-common.h`, decoding: `dequantize_row_*` of
`ggml-quants.c`) for the other twins. Knows neither octets nor activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_jit.gguf.grids import IQ3_S_GRID, IQ3_S_VALUES, IQ3_XXS_GRID, IQ3_XXS_VALUES

Array = NDArray[Any]

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int64)

MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int64)

BLOCK_COLS = {
    **dict.fromkeys(("IQ4_XS", "IQ3_XXS", "IQ3_S", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), 256),
    **dict.fromkeys(("IQ4_NL", "MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), 32),
}
BLOCK_BYTES = {
    "IQ4_XS": 136,
    "IQ3_XXS": 98,
    "IQ3_S": 110,
    "Q2_K": 84,
    "Q3_K": 110,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "IQ4_NL": 18,
    "MXFP4": 17,
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
}
OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32}
"""What a code exceeds its weight by."""
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F32_BF16": 4}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Quantised rows: value = scale_d * scale * weight(code) - dmin * min + m."""

    type_name: str
    codes: Array
    """int64[n_rows, n_cols]: codes as stored (unsigned; signed for Q8_0). Of IQ3: 4 bits, the number of a
    magnitude and bit 3 for a minus."""
    d: Array
    """float16[n_rows, n_blocks]; of MXFP4 uint8, an exponent."""
    dmin: Array | None = None
    """float16[n_rows, n_blocks]."""
    m: Array | None = None
    """float16[n_rows, n_blocks]."""
    scales: Array | None = None
    """int64[n_rows, n_sub], one per 32 columns (16 for Q2_K, Q3_K and Q6_K)."""
    mins: Array | None = None
    """int64[n_rows, n_sub]."""

    @property
    def weights(self) -> Array:
        """int64[n_rows, n_cols]: the integer that each code stands for."""
        if self.type_name in ("IQ4_XS", "IQ4_NL"):
            return np.asarray(IQ4_VALUES[self.codes])
        if self.type_name == "MXFP4":
            return np.asarray(MXFP4_VALUES[self.codes])
        if self.type_name in ("IQ3_XXS", "IQ3_S"):
            values = np.array(IQ3_S_VALUES if self.type_name == "IQ3_S" else IQ3_XXS_VALUES)
            magnitudes = values if self.type_name == "IQ3_S" else values // 2
            return np.asarray(np.where(self.codes >= 8, -1, 1) * magnitudes[self.codes & 7])
        return self.codes - OFFSETS.get(self.type_name, 0)

    @property
    def scale_d(self) -> Array:
        """float32[n_rows, n_blocks]: what `d` stands for; for IQ3_XXS half, to make its scales integers."""
        if self.type_name == "MXFP4":
            return np.ldexp(np.float32(1), self.d.astype(np.int32) - 128)
        return self.d.astype(np.float32) * np.float32(0.5 if self.type_name == "IQ3_XXS" else 1)


def read_blocks(type_name: str, rows: Array, n_cols: int) -> Blocks:
    """Take apart `rows` (uint8[n_rows, row bytes]) of a quantised type."""
    n_blocks = n_cols // BLOCK_COLS[type_name]
    blocks = rows.reshape(len(rows), n_blocks, BLOCK_BYTES[type_name])
    parts = _READERS[type_name](blocks)
    whole = {name: part.reshape(len(rows), -1) for name, part in parts.items()}
    return Blocks(type_name, **whole)


def read_floats(type_name: str, rows: Array, n_cols: int) -> Array:
    """float32[n_rows, n_cols] of float rows; `F32_BF16` drops the low 16 bits of each weight."""
    rows = np.ascontiguousarray(rows)
    if type_name == "F16":
        return rows.view(np.float16).astype(np.float32)
    if type_name == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    bits = rows.view(np.uint32)
    return (bits & 0xFFFF0000 if type_name == "F32_BF16" else bits).view(np.float32)


def dequantize(type_name: str, rows: Array, n_cols: int) -> Array:
    """float64[n_rows, n_cols]: the exact values of the weights, nothing rounded."""
    if type_name in FLOAT_BYTES:
        return read_floats(type_name, rows, n_cols).astype(np.float64)
    blocks = read_blocks(type_name, rows, n_cols)

    def spread(per_group: Array) -> Array:
        return np.repeat(per_group.astype(np.float64), n_cols // per_group.shape[1], axis=1)

    values = spread(blocks.scale_d) * blocks.weights
    if blocks.scales is not None:
        values *= spread(blocks.scales)
    if blocks.dmin is not None and blocks.mins is not None:
        values -= spread(blocks.dmin) * spread(blocks.mins)
    if blocks.m is not None:
        values += spread(blocks.m)
    return np.asarray(values)


def _half(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _columns(columns: list[Array]) -> Array:
    return np.stack(columns, axis=-1).astype(np.int64)


def _nibble(byte: Array, high: bool) -> Array:
    return byte >> 4 if high else byte & 15


def _four_bits(qs: Array) -> Array:
    """32 columns: byte j holds the codes of columns j and 16 + j."""
    return _columns([_nibble(qs[..., k % 16], k >= 16) for k in range(32)])


def _fifth_bits(qh: Array) -> Array:
    """32 columns: bit k % 8 of byte k // 8, as the fifth bit of a code."""
    return _columns([(qh[..., k // 8] >> k % 8 & 1) << 4 for k in range(32)])


def _q4_0(blocks: Array) -> dict[str, Array]:
    """And IQ4_NL."""
    return {"d": _half(blocks, 0), "codes": _four_bits(blocks[..., 2:])}


def _q4_1(blocks: Array) -> dict[str, Array]:
    return {"d": _half(blocks, 0), "m": _half(blocks, 2), "codes": _four_bits(blocks[..., 4:])}


def _q5_0(blocks: Array) -> dict[str, Array]:
    codes = _four_bits(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return {"d": _half(blocks, 0), "codes": codes}


def _q5_1(blocks: Array) -> dict[str, Array]:
    codes = _four_bits(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return {"d": _half(blocks, 0), "m": _half(blocks, 2), "codes": codes}


def _mxfp4(blocks: Array) -> dict[str, Array]:
    return {"d": blocks[..., 0], "codes": _four_bits(blocks[..., 1:])}


def _iq4_xs(blocks: Array) -> dict[str, Array]:
    scales_h = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)[..., 0].astype(np.int64)
    scales_l, qs = blocks[..., 4:8], blocks[..., 8:]
    scales, codes = [], []
    for j in range(8):
        low = _nibble(scales_l[..., j // 2], j % 2 == 1).astype(np.int64)
        scales.append((low | (scales_h >> 2 * j & 3) << 4) - 32)
        codes += [_nibble(qs[..., 16 * j + k % 16], k >= 16) for k in range(32)]
    return {"d": _half(blocks, 0), "scales": _columns(scales), "codes": _columns(codes)}


def _two_bits(qs: Array, k: int) -> Array:
    """Low two bits of column k of Q2_K and Q3_K."""
    half, within = k // 128, k % 128
    return qs[..., 32 * half + within % 32] >> 2 * (within // 32) & 3


def _q2_k(blocks: Array) -> dict[str, Array]:
    packed, qs = blocks[..., :16], blocks[..., 16:80]
    return {
        "d": _half(blocks, 80),
        "dmin": _half(blocks, 82),
        "scales": (packed & 15).astype(np.int64),
        "mins": (packed >> 4).astype(np.int64),
        "codes": _columns([_two_bits(qs, k) for k in range(256)]),
    }


def _q3_k(blocks: Array) -> dict[str, Array]:
    hmask, qs, packed = blocks[..., :32], blocks[..., 32:96], blocks[..., 96:108]
    scales = [_nibble(packed[..., s % 8], s >= 8) | (packed[..., 8 + s % 4] >> 2 * (s // 4) & 3) << 4
              for s in range(16)]  # fmt: skip
    codes = [_two_bits(qs, k) | (hmask[..., k % 32] >> k // 32 & 1) << 2 for k in range(256)]
    return {"d": _half(blocks, 108), "scales": _columns(scales) - 32, "codes": _columns(codes)}


def _iq3_xxs(blocks: Array) -> dict[str, Array]:
    """Value = d * (0.5 + s) * 0.5 * magnitude = (d / 2) * (1 + 2 s) * (magnitude / 2)."""
    numbers = IQ3_XXS_GRID[blocks[..., 2:66]].reshape(*blocks.shape[:2], 256)
    words = np.ascontiguousarray(blocks[..., 66:98]).view("<u4").astype(np.int64)
    codes = []
    for k in range(256):
        seven = words[..., k // 32] >> 7 * (k // 8 % 4) & 127
        bits = [seven >> i & 1 for i in range(7)]
        bits.append(sum(bits) % 2)
        codes.append(numbers[..., k] | bits[k % 8] << 3)
    return {"d": _half(blocks, 0), "scales": 1 + 2 * (words >> 28), "codes": _columns(codes)}


def _iq3_s(blocks: Array) -> dict[str, Array]:
    qs, qh, signs, packed = (blocks[..., i:j] for i, j in ((2, 66), (66, 74), (74, 106), (106, 110)))
    codes = []
    for k in range(256):
        index = qs[..., k // 4].astype(np.int64) | (qh[..., k // 32].astype(np.int64) >> k // 4 % 8 & 1) << 8
        codes.append(IQ3_S_GRID[index, k % 4] | (signs[..., k // 8] >> k % 8 & 1) << 3)
    scales = _columns([_nibble(packed[..., j // 2], j % 2 == 1) for j in range(8)])
    return {"d": _half(blocks, 0), "scales": 1 + 2 * scales, "codes": _columns(codes)}


def _scale_min(packed: Array, j: int) -> tuple[Array, Array]:
    """6-bit scale and min of sub-block j from the 12 bytes of Q4_K and Q5_K (ggml's get_scale_min_k4)."""
    if j < 4:
        return packed[..., j] & 63, packed[..., j + 4] & 63
    scale = packed[..., j + 4] & 15 | packed[..., j - 4] >> 6 << 4
    return scale, packed[..., j + 4] >> 4 | packed[..., j] >> 6 << 4


def _k_scales(blocks: Array) -> dict[str, Array]:
    pairs = [_scale_min(blocks[..., 4:16], j) for j in range(8)]
    scales, mins = _columns([s for s, _ in pairs]), _columns([m for _, m in pairs])
    return {"d": _half(blocks, 0), "dmin": _half(blocks, 2), "scales": scales, "mins": mins}


def _q4_k(blocks: Array) -> dict[str, Array]:
    qs = blocks[..., 16:]
    codes = [_nibble(qs[..., 32 * (k // 64) + k % 32], k % 64 >= 32) for k in range(256)]
    return {**_k_scales(blocks), "codes": _columns(codes)}


def _q5_k(blocks: Array) -> dict[str, Array]:
    qh, qs = blocks[..., 16:48], blocks[..., 48:]
    codes = []
    for k in range(256):
        low = _nibble(qs[..., 32 * (k // 64) + k % 32], k % 64 >= 32)
        codes.append(low | (qh[..., k % 32] >> k // 32 & 1) << 4)
    return {**_k_scales(blocks), "codes": _columns(codes)}


def _q6_k(blocks: Array) -> dict[str, Array]:
    ql, qh, scales = blocks[..., :128], blocks[..., 128:192], blocks[..., 192:208]
    codes = []
    for k in range(256):
        half, within = k // 128, k % 128
        low = _nibble(ql[..., 64 * half + within % 64], within >= 64)
        high = qh[..., 32 * half + within % 32] >> 2 * (within // 32) & 3
        codes.append(low | high << 4)
    return {
        "d": _half(blocks, 208),
        "scales": scales.view(np.int8).astype(np.int64),
        "codes": _columns(codes),
    }


def _q8_0(blocks: Array) -> dict[str, Array]:
    return {
        "d": _half(blocks, 0),
        "codes": np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.int64),
    }


_READERS = {
    "IQ4_XS": _iq4_xs,
    "IQ4_NL": _q4_0,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "MXFP4": _mxfp4,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
