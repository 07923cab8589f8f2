"""Compiled repacking against its twin, bit for bit."""

import numpy as np
import pytest

from strata_jit.kernels import layout
from strata_jit.kernels.ref.octets import pack_octets
from strata_jit.kernels.repack import repack

GUARD = 0xA5
ROW_COUNTS = (1, 7, 8, 9, 23)
BLOCK_COUNTS = {256: (1, 2, 9), 32: (1, 3, 24), 4: (1, 2, 5, 64)}
CASES = [
    (name, n_blocks)
    for name, conversion in layout.CONVERSIONS.items()
    for n_blocks in BLOCK_COUNTS[layout.STORE_TYPES[conversion.store].block_cols]
]


def random_rows(name, n_rows, n_blocks, seed):
    """Any bytes, so every code, scale and bit pattern of a float."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n_rows, n_blocks * layout.CONVERSIONS[name].block_bytes), np.uint8)


def run(name, rows, n_cols, stride=None, offset=0):
    """Octets written by the kernel: uint8[n_octets, stride], bytes that it did not write are GUARD."""
    n_rows, row_bytes = rows.shape
    nbytes = layout.octet_bytes(layout.CONVERSIONS[name].store, n_cols)
    stride = stride or nbytes
    n_octets = layout.n_octets(n_rows)
    memory = np.full(n_octets * stride + 64, GUARD, np.uint8)
    start = -memory.ctypes.data % 64
    src = np.zeros(rows.size + offset, np.uint8)
    src[offset:] = rows.reshape(-1)
    repack(name)(src.ctypes.data + offset, row_bytes, n_rows, n_cols, memory.ctypes.data + start, stride)
    assert (memory[:start] == GUARD).all()
    assert (memory[start + n_octets * stride :] == GUARD).all()
    return memory[start : start + n_octets * stride].reshape(n_octets, stride)


def columns(name, n_blocks):
    return n_blocks * layout.STORE_TYPES[layout.CONVERSIONS[name].store].block_cols


@pytest.mark.parametrize(("name", "n_blocks"), CASES)
def test_repack_matches_ref(name, n_blocks):
    n_cols = columns(name, n_blocks)
    for n_rows in ROW_COUNTS:
        rows = random_rows(name, n_rows, n_blocks, seed=n_rows)
        np.testing.assert_array_equal(
            run(name, rows, n_cols), pack_octets(name, rows, n_cols), f"{n_rows} rows"
        )


@pytest.mark.parametrize("name", layout.CONVERSIONS)
def test_repack_alternates_two_matrices(name):
    """Gate and up share one stretch of memory at twice the stride; neither touches the other's octets."""
    n_cols = columns(name, 2)
    nbytes = layout.octet_bytes(layout.CONVERSIONS[name].store, n_cols)
    rows = random_rows(name, 17, 2, seed=1)
    octets = run(name, rows, n_cols, stride=2 * nbytes)
    np.testing.assert_array_equal(octets[:, :nbytes], pack_octets(name, rows, n_cols))
    assert (octets[:, nbytes:] == GUARD).all()


@pytest.mark.parametrize("name", layout.CONVERSIONS)
def test_repack_reads_unaligned_rows(name):
    n_cols = columns(name, 2)
    rows = random_rows(name, 9, 2, seed=2)
    np.testing.assert_array_equal(run(name, rows, n_cols, offset=1), run(name, rows, n_cols))


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_repack_extreme_bytes(byte):
    for name in layout.CONVERSIONS:
        n_cols = columns(name, 1)
        rows = np.full((8, layout.CONVERSIONS[name].block_bytes), byte, np.uint8)
        np.testing.assert_array_equal(run(name, rows, n_cols), pack_octets(name, rows, n_cols))


def test_repack_nothing():
    rows = np.zeros((0, layout.CONVERSIONS["Q8_0"].block_bytes), np.uint8)
    assert run("Q8_0", rows, 32).size == 0


def test_f32_as_bf16_is_lossless_where_low_halves_are_zero():
    weights = np.random.default_rng(3).standard_normal((8, 8), np.float32)
    rows = (weights.view(np.uint32) & 0xFFFF0000).view(np.uint8)
    bf16 = np.ascontiguousarray((weights.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    np.testing.assert_array_equal(run("F32_BF16", rows, 8), run("BF16", bf16, 8))
