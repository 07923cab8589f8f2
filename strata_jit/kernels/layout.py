"""Byte layout of stored matrices (octets) and of quantised activation rows.

Owns every size and offset that both the host (which sizes memory) and the kernels (which read it) need.
Pure integer arithmetic: knows no array, no kernel, no file, and never loads Numba. `docs/kernels.md` draws
the bytes.

An **octet** is eight output rows of one matrix, one row per 32-bit lane: a header with the f16 scales of all
blocks, padded to 64 bytes, then the payload of each block in order. Missing rows of the last octet are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_jit.errors import ModelError

ALIGN = 64
"""Every octet, header and activation plane starts at a multiple of this many bytes."""
OCTET_ROWS = 8
ABSENT = -1
"""Offset of a plane that the activation kind does not have."""


@dataclass(frozen=True, slots=True)
class StoreType:
    """How one type of matrix lies in memory; bytes are those of all eight rows."""

    name: str
    block_cols: int
    """Columns of one block; `n_cols` is a multiple of it."""
    header_bytes: int
    """Bytes that a block adds to the header: eight f16 `d` (of MXFP4 eight exponent bytes), and eight f16
    `dmin` or `m` where the type has them."""
    payload_bytes: int
    act_kind: str
    """Activation row that the type's dot kernel reads: "F32", "Q256" or "Q32"."""
    header_lane: int = 2
    """Bytes of the header that one row takes at a time: the eight rows stand side by side."""
    payload_lane: int = 4
    """Likewise of the payload."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """One way from the rows of a file to octets: the names that `kernels.repack.repack` takes."""

    name: str
    store: str
    block_bytes: int
    """Bytes of `block_cols` columns (of the store type) in a row of the file."""


@dataclass(frozen=True, slots=True)
class ActPlanes:
    """Byte offsets of the planes of one activation row, `ABSENT` where the kind has none.

    `pairs`: per 32 columns int8 a[32], then |a|[32]; `a16`: int16, per 4 columns a0 a2 a1 a3; `d`: float32
    per block; `sums`: int16 per 16 columns, the sum of a, for Q256 in the order 0 2 1 3. Kind "F32" has none:
    the row is float32[n_cols].
    """

    pairs: int
    a16: int
    d: int
    sums: int
    nbytes: int
    """Bytes of the whole row, a multiple of `ALIGN`."""


STORE_TYPES: dict[str, StoreType] = {
    t.name: t
    for t in (
        StoreType("IQ4_XS", 256, 16, 64 + 8 * 128, "Q256"),
        StoreType("IQ4_NL", 32, 16, 128, "Q32"),
        StoreType("IQ3_XXS", 256, 16, 64 + 8 * 128, "Q256"),
        StoreType("IQ3_S", 256, 16, 64 + 8 * 128, "Q256"),
        StoreType("MXFP4", 32, 8, 128, "Q32", header_lane=1),
        StoreType("Q2_K", 256, 32, 128 + 8 * 64, "Q256"),
        StoreType("Q3_K", 256, 16, 128 + 8 * 96, "Q256"),
        StoreType("Q4_K", 256, 32, 128 + 8 * 128, "Q256"),
        StoreType("Q5_K", 256, 32, 128 + 8 * 160, "Q256"),
        StoreType("Q6_K", 256, 16, 128 + 8 * 192, "Q256"),
        StoreType("Q4_0", 32, 16, 128, "Q32"),
        StoreType("Q4_1", 32, 32, 128, "Q32"),
        StoreType("Q5_0", 32, 16, 160, "Q32"),
        StoreType("Q5_1", 32, 32, 160, "Q32"),
        StoreType("Q8_0", 32, 16, 256, "Q32"),
        StoreType("BF16", 4, 0, 64, "F32"),
        StoreType("F16", 4, 0, 64, "F32", payload_lane=2),
        StoreType("F32", 4, 0, 128, "F32"),
    )
}

CONVERSIONS: dict[str, Conversion] = {
    c.name: c
    for c in (
        Conversion("IQ4_XS", "IQ4_XS", 136),
        Conversion("IQ4_NL", "IQ4_NL", 18),
        Conversion("IQ3_XXS", "IQ3_XXS", 98),
        Conversion("IQ3_S", "IQ3_S", 110),
        Conversion("MXFP4", "MXFP4", 17),
        Conversion("Q2_K", "Q2_K", 84),
        Conversion("Q3_K", "Q3_K", 110),
        Conversion("Q4_K", "Q4_K", 144),
        Conversion("Q5_K", "Q5_K", 176),
        Conversion("Q6_K", "Q6_K", 210),
        Conversion("Q4_0", "Q4_0", 18),
        Conversion("Q4_1", "Q4_1", 20),
        Conversion("Q5_0", "Q5_0", 22),
        Conversion("Q5_1", "Q5_1", 24),
        Conversion("Q8_0", "Q8_0", 34),
        Conversion("BF16", "BF16", 8),
        Conversion("F16", "F16", 8),
        Conversion("F32", "F32", 16),
        Conversion("F32_BF16", "BF16", 16),
    )
}
"""`F32_BF16` drops the low 16 bits of each weight: only for matrices where all of them are zero."""

FILE_TYPES: dict[str, str] = {name: c.store for name, c in CONVERSIONS.items() if name != "F32_BF16"}
"""Type of a matrix in the file -> type that it is stored as."""

QUANT_KINDS: dict[str, int] = {"Q256": 256, "Q32": 32}
"""Quantised activation kind -> columns that share one scale."""


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= n."""
    return (n + multiple - 1) // multiple * multiple


def store_type_of(file_type: str) -> StoreType:
    """Store type of a matrix whose type in the file is `file_type`; ModelError if no kernel reads it."""
    try:
        return STORE_TYPES[FILE_TYPES[file_type]]
    except KeyError:
        known = ", ".join(sorted(FILE_TYPES))
        raise ModelError(f"tensor type {file_type} is not supported (supported: {known})") from None


def n_octets(n_rows: int) -> int:
    """Octets that hold `n_rows` rows."""
    return (n_rows + OCTET_ROWS - 1) // OCTET_ROWS


def n_blocks(type_name: str, n_cols: int) -> int:
    """Blocks of one row; ModelError if the columns do not make whole blocks."""
    block_cols = STORE_TYPES[type_name].block_cols
    if n_cols <= 0 or n_cols % block_cols:
        raise ModelError(f"{type_name} matrix has {n_cols} columns, expected a multiple of {block_cols}")
    return n_cols // block_cols


def header_bytes(type_name: str, n_cols: int) -> int:
    """Bytes of an octet's header, padding included."""
    return round_up(n_blocks(type_name, n_cols) * STORE_TYPES[type_name].header_bytes, ALIGN)


def octet_bytes(type_name: str, n_cols: int) -> int:
    """Bytes of one octet of the store type `type_name`, a multiple of `ALIGN`."""
    payload = n_blocks(type_name, n_cols) * STORE_TYPES[type_name].payload_bytes
    return round_up(header_bytes(type_name, n_cols) + payload, ALIGN)


def matrix_bytes(type_name: str, n_rows: int, n_cols: int) -> int:
    """Bytes of all octets of an `n_rows` x `n_cols` matrix."""
    return n_octets(n_rows) * octet_bytes(type_name, n_cols)


def act_planes(kind: str, n_cols: int) -> ActPlanes:
    """Planes of an activation row of `n_cols` columns; ModelError if the columns do not make whole blocks."""
    if kind == "F32":
        return ActPlanes(ABSENT, ABSENT, ABSENT, ABSENT, round_up(4 * n_cols, ALIGN))
    block_cols = QUANT_KINDS[kind]
    if n_cols <= 0 or n_cols % block_cols:
        raise ModelError(f"{kind} activation has {n_cols} columns, expected a multiple of {block_cols}")
    a16 = 2 * n_cols
    d = a16 + 2 * n_cols
    after_d = d + round_up(4 * (n_cols // block_cols), ALIGN)
    return ActPlanes(0, a16, d, after_d, after_d + round_up(2 * (n_cols // 16), ALIGN))
