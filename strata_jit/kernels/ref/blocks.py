"""Rows of a GGUF file taken apart into codes and scales, column by column as ggml defines them.

Owns the reading of ggml's blocks (layouts: llama.cpp `ggml-common.h`, decoding: `dequantize_row_*` of
`ggml-quants.c`) for the other twins. Knows neither octets nor activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int64)

BLOCK_COLS = {"IQ4_XS": 256, "IQ4_NL": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256, "Q8_0": 32}
BLOCK_BYTES = {"IQ4_XS": 136, "IQ4_NL": 18, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q8_0": 34}
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F32_BF16": 4}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Quantised rows: value = d * scale * weight(code) - dmin * min; no scale means 1, no min means 0."""

    type_name: str
    codes: Array
    """int64[n_rows, n_cols]: codes as stored (unsigned; signed for Q8_0)."""
    d: Array
    """float16[n_rows, n_blocks]."""
    dmin: Array | None = None
    """float16[n_rows, n_blocks]."""
    scales: Array | None = None
    """int64[n_rows, n_sub], one per 32 columns (16 for Q6_K)."""
    mins: Array | None = None
    """int64[n_rows, n_sub]."""

    @property
    def weights(self) -> Array:
        """int64[n_rows, n_cols]: the integer that each code stands for."""
        if self.type_name in ("IQ4_XS", "IQ4_NL"):
            return np.asarray(IQ4_VALUES[self.codes])
        return self.codes - 32 if self.type_name == "Q6_K" else self.codes


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

    values = spread(blocks.d) * blocks.weights
    if blocks.scales is not None:
        values *= spread(blocks.scales)
    if blocks.dmin is not None and blocks.mins is not None:
        values -= spread(blocks.dmin) * spread(blocks.mins)
    return np.asarray(values)


def _half(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _columns(columns: list[Array]) -> Array:
    return np.stack(columns, axis=-1).astype(np.int64)


def _nibble(byte: Array, high: bool) -> Array:
    return byte >> 4 if high else byte & 15


def _iq4_nl(blocks: Array) -> dict[str, Array]:
    qs = blocks[..., 2:]
    return {"d": _half(blocks, 0), "codes": _columns([_nibble(qs[..., k % 16], k >= 16) for k in range(32)])}


def _iq4_xs(blocks: Array) -> dict[str, Array]:
    scales_h = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)[..., 0].astype(np.int64)
    scales_l, qs = blocks[..., 4:8], blocks[..., 8:]
    scales, codes = [], []
    for j in range(8):
        low = _nibble(scales_l[..., j // 2], j % 2 == 1).astype(np.int64)
        scales.append((low | (scales_h >> 2 * j & 3) << 4) - 32)
        codes += [_nibble(qs[..., 16 * j + k % 16], k >= 16) for k in range(32)]
    return {"d": _half(blocks, 0), "scales": _columns(scales), "codes": _columns(codes)}


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
    "IQ4_NL": _iq4_nl,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
