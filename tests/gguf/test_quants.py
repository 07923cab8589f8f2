"""Dequantisation against the gguf package, bit for bit, and against values worked out by hand."""

from __future__ import annotations

import gguf as oracle
import numpy as np
import numpy.typing as npt
import pytest

from strata_jit.errors import ModelError
from strata_jit.gguf.quants import BLOCK_DTYPES, KVALUES_IQ4NL, dequantize
from strata_jit.gguf.types import GGMLType

TYPES = list(BLOCK_DTYPES)
N_ROWS = 64
N_COLS = 512

U8Array = npt.NDArray[np.uint8]


def oracle_values(kind: GGMLType, data: U8Array) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        values: npt.NDArray[np.float32] = oracle.dequantize(data, oracle.GGMLQuantizationType[kind.name])
    return values


def assert_same_bits(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
    """Bit-equal, except that one nan is as good as another."""
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    known = ~np.isnan(ours)
    np.testing.assert_array_equal(ours[known].view(np.uint32), theirs[known].view(np.uint32))


@pytest.mark.parametrize("kind", TYPES)
def test_block_dtype_has_type_size(kind: GGMLType) -> None:
    assert BLOCK_DTYPES[kind].itemsize == kind.type_size


@pytest.mark.parametrize("kind", TYPES)
def test_dequantize_matches_oracle_on_random_bytes(kind: GGMLType, rng: np.random.Generator) -> None:
    """Any bytes are a block: scales that are denormal, infinite or nan are among these."""
    data = rng.integers(0, 256, (N_ROWS, kind.row_bytes(N_COLS)), dtype=np.uint8)
    assert_same_bits(dequantize(kind, data, N_COLS), oracle_values(kind, data))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x0F, 0x3B, 0x7F, 0x80, 0xFF])
def test_dequantize_matches_oracle_on_edge_blocks(kind: GGMLType, byte: int) -> None:
    data = np.full((1, kind.row_bytes(N_COLS)), byte, dtype=np.uint8)
    assert_same_bits(dequantize(kind, data, N_COLS), oracle_values(kind, data))


@pytest.mark.parametrize("kind", [kind for kind in TYPES if BLOCK_DTYPES[kind].names])
@pytest.mark.parametrize("d", [0.0, -0.0, 6e-8, -65504.0, 1.0])
def test_dequantize_matches_oracle_at_scale(kind: GGMLType, d: float, rng: np.random.Generator) -> None:
    """Extreme scales over random quants."""
    data = rng.integers(0, 256, (4, kind.row_bytes(N_COLS)), dtype=np.uint8)
    blocks = data.reshape(-1).view(BLOCK_DTYPES[kind])
    for field in ("d", "dmin", "m"):
        if field in (blocks.dtype.names or ()):
            blocks[field] = d
    assert_same_bits(dequantize(kind, data, N_COLS), oracle_values(kind, data))


@pytest.mark.parametrize("kind", TYPES)
def test_dequantize_keeps_leading_axes(kind: GGMLType, rng: np.random.Generator) -> None:
    row_bytes = kind.row_bytes(256)
    data = rng.integers(0, 256, (2, 3, row_bytes), dtype=np.uint8)
    values = dequantize(kind, data, 256)
    assert values.shape == (2, 3, 256)
    assert_same_bits(values[1, 2], dequantize(kind, data[1, 2], 256))
    assert_same_bits(values[:, ::2], dequantize(kind, data[:, ::2], 256))
    assert dequantize(kind, data[:0], 256).shape == (0, 3, 256)


def test_dequantize_reads_read_only_data() -> None:
    data = np.frombuffer(bytes(34), np.uint8)
    assert dequantize(GGMLType.Q8_0, data, 32).tolist() == [0.0] * 32


def test_dequantize_q8_0_by_hand() -> None:
    block = np.zeros(1, BLOCK_DTYPES[GGMLType.Q8_0])
    block["d"] = 0.5
    block["qs"] = np.arange(-16, 16)
    values = dequantize(GGMLType.Q8_0, block.view(np.uint8), 32)
    assert values.tolist() == [q / 2 for q in range(-16, 16)]


def test_dequantize_iq4_xs_by_hand() -> None:
    """Sub-block 5 alone has a scale other than zero: 6 bits 0b110001, less 32."""
    block = np.zeros(1, BLOCK_DTYPES[GGMLType.IQ4_XS])
    block["d"] = 2.0
    block["scales_h"] = 0b1010_1010_1010_1010 ^ (0b01 << 10)  # high bits 10 everywhere, 11 in sub-block 5
    block["scales_l"][0, 2] = 0b0001_0000
    block["qs"][0, 5] = np.arange(16) | (15 - np.arange(16)) << 4
    values = dequantize(GGMLType.IQ4_XS, block.view(np.uint8), 256).reshape(8, 32)
    expected = 2.0 * 17 * np.concatenate([KVALUES_IQ4NL, KVALUES_IQ4NL[::-1]]).astype(np.float32)
    assert values[5].tolist() == expected.tolist()
    assert not values[[0, 1, 2, 3, 4, 6, 7]].any()


def test_dequantize_mxfp4_of_every_exponent() -> None:
    """All 256 exponents stand for powers of two, the two lowest being subnormal."""
    blocks = np.zeros(256, BLOCK_DTYPES[GGMLType.MXFP4])
    blocks["e"] = np.arange(256)
    blocks["qs"] = 0x91  # 1 and -1
    values = dequantize(GGMLType.MXFP4, blocks.view(np.uint8), 256 * 32).reshape(256, 32)
    powers = [2.0 ** (e - 128) for e in range(256)]
    assert values[:, 0].tolist() == powers and values[:, 31].tolist() == [-p for p in powers]


@pytest.mark.parametrize("kind", sorted(set(GGMLType) - set(TYPES)))
def test_dequantize_raises_on_types_without_definition(kind: GGMLType) -> None:
    with pytest.raises(ModelError, match=f"type {kind.name} is not supported, expected one of F32, "):
        dequantize(kind, np.zeros(kind.type_size, np.uint8), kind.block_size)


@pytest.mark.parametrize(
    ("data", "n_cols"),
    [
        (np.zeros(33, np.uint8), 32),
        (np.zeros(34, np.uint8), 33),
        (np.zeros(34, np.int8), 32),
        (np.zeros((34, 1), np.uint8), 32),
        (np.uint8(0).reshape(()), 32),
    ],
)
def test_dequantize_raises_on_wrong_rows(data: U8Array, n_cols: int) -> None:
    with pytest.raises(ModelError, match=r"Q8_0 data: found u?int8\[.*\] for rows of .* expected uint8"):
        dequantize(GGMLType.Q8_0, data, n_cols)
