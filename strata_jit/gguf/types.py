"""The tensor types of ggml: ids, names, and the bytes that a block of each takes.

Owns the table; knows neither files nor what the bytes of a block mean (see `quants`). It lists every type of
ggml, not only those that can be computed with, so that the others can be named.
Source: ggml.h `enum ggml_type`; sizes from the static asserts on `block_*` in ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class GGMLType(IntEnum):
    """Type of a tensor's elements; the value is the id that a GGUF file stores."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block_size(self) -> int:
        """Columns of one block; a row's length is a multiple of it."""
        return QUANT_TYPES[self].block_size

    @property
    def type_size(self) -> int:
        """Bytes of one block."""
        return QUANT_TYPES[self].type_size

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of a row of `n_cols` columns, a multiple of the block size."""
        return n_cols // self.block_size * self.type_size


@dataclass(frozen=True, slots=True)
class QuantType:
    """How a type is packed: `type_size` bytes for every `block_size` columns of a row."""

    name: str
    block_size: int
    type_size: int


_BLOCKS: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    # Two f16 and 32 int8; the gguf package for Python says 40. Activations only, never stored in files.
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
    GGMLType.Q2_0: (64, 18),
}

QUANT_TYPES: Mapping[GGMLType, QuantType] = {
    ggml_type: QuantType(ggml_type.name, block_size, type_size)
    for ggml_type, (block_size, type_size) in _BLOCKS.items()
}
"""Packing of every type that ggml has."""

REMOVED_TYPES: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Ids that ggml has given up: old files may hold them, nothing can read them."""
