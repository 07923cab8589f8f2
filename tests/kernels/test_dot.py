"""Dot kernels against their twin, bit for bit: every type, instruction set, and number of tokens."""

import ctypes
from functools import cache

import numpy as np
import pytest
from numba import njit

from strata_jit.gguf.grids import IQ3_S_GRID, IQ3_XXS_GRID
from strata_jit.kernels import isa, layout, vec
from strata_jit.kernels.dot import dot_many_kernel, dot_one_kernel, many_scratch_bytes
from strata_jit.kernels.ref.activations import KIND_OF_TYPE, quantize_activation
from strata_jit.kernels.ref.blocks import FLOAT_BYTES
from strata_jit.kernels.ref.dot import dot
from strata_jit.kernels.ref.octets import pack_octets
from strata_jit.kernels.weights import BOOKS, FORMATS

TYPES = list(layout.STORE_TYPES)
RUNNABLE = [name for name, target in isa.ISAS.items() if target.needs <= isa.host_features()]
VARIANTS = [
    (name, target) for name in TYPES for target in (RUNNABLE if name not in FLOAT_BYTES else ["portable"])
]
HALVES_AT = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Byte offsets of the f16 scales in a block of the file, where there is not one at its start."""


def aligned(n_bytes):
    """uint8[n_bytes] at a multiple of 64."""
    raw = np.zeros(n_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes]


def random_rows(rng, name, n_rows, n_cols, fill=None):
    """uint8[n_rows, row bytes] of valid blocks with scales near 1; `fill` sets every other byte."""
    if name in FLOAT_BYTES:
        values = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return values.view(np.uint8)
    size = layout.CONVERSIONS[name].block_bytes
    n_blocks = n_cols // layout.STORE_TYPES[name].block_cols
    blocks = rng.integers(0, 256, (n_rows, n_blocks, size), np.uint8)
    if fill is not None:
        blocks[:] = fill
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(120, 130, (n_rows, n_blocks))
    for at in HALVES_AT.get(name, (0,)):
        scales = rng.uniform(-1, 1, (n_rows, n_blocks, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(n_rows, -1)


@cache
def one_kernel(name, target):
    return dot_one_kernel(name, target)


@cache
def many_kernel(name, target):
    return dot_many_kernel(name, target)


def run_one(name, target, octets, stride, n_octets, n_cols, act):
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(one_kernel(name, target).address)
    out = np.full(8 * n_octets + 8, np.nan, np.float32)
    kernel(octets.ctypes.data, stride, n_octets, n_cols, act.ctypes.data, out.ctypes.data)
    assert np.isnan(out[8 * n_octets :]).all(), "wrote past the last octet"
    return out[: 8 * n_octets]


def run_many(name, target, octets, stride, n_octets, n_cols, acts):
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)(many_kernel(name, target).address)
    n_tok = len(acts)
    out = np.full((n_tok, 8 * n_octets + 8), np.nan, np.float32)
    act_ptrs = np.array([a.ctypes.data for a in acts], np.int64)
    out_ptrs = np.array([row.ctypes.data for row in out], np.int64)
    scratch = aligned(many_scratch_bytes(n_tok))
    kernel(
        octets.ctypes.data,
        stride,
        n_octets,
        n_cols,
        n_tok,
        act_ptrs.ctypes.data,
        out_ptrs.ctypes.data,
        scratch.ctypes.data,
    )
    assert np.isnan(out[:, 8 * n_octets :]).all(), "wrote past the last octet"
    return out[:, : 8 * n_octets]


def stored(rows, name, n_cols):
    """(octets, stride, count), with a gap between octets as where gate and up alternate."""
    packed = pack_octets(name, rows, n_cols).reshape(layout.n_octets(len(rows)), -1)
    memory = aligned(2 * packed.nbytes).reshape(len(packed), -1)
    memory[:, : packed.shape[1]] = packed
    memory[:, packed.shape[1] :] = 0xFF
    return memory, memory.shape[1], len(packed)


def activation(name, x):
    row = quantize_activation(KIND_OF_TYPE[name], x)
    memory = aligned(row.row().nbytes)
    memory[:] = row.row()
    return row, memory


def check(name, target, rows, n_cols, xs):
    octets, stride, n_octets = stored(rows, name, n_cols)
    acts = [activation(name, x) for x in xs]
    expected = np.zeros((len(xs), 8 * n_octets), np.float32)
    for t, (twin, _) in enumerate(acts):
        expected[t, : len(rows)] = dot(name, rows, n_cols, twin)
    for t, (_, memory) in enumerate(acts):
        np.testing.assert_array_equal(
            run_one(name, target, octets, stride, n_octets, n_cols, memory), expected[t]
        )
    many = run_many(name, target, octets, stride, n_octets, n_cols, [memory for _, memory in acts])
    np.testing.assert_array_equal(many, expected)


@pytest.mark.parametrize(("name", "target"), VARIANTS)
@pytest.mark.parametrize("n_tok", [1, 2, 3, 4, 9])
def test_dot_matches_twin(name, target, n_tok):
    rng = np.random.default_rng(n_tok)
    for n_rows, n_blocks in ((1, 1), (8, 3), (21, 2)):
        n_cols = max(32, layout.STORE_TYPES[name].block_cols) * n_blocks
        xs = rng.standard_normal((n_tok, n_cols)).astype(np.float32)
        check(name, target, random_rows(rng, name, n_rows, n_cols), n_cols, xs)


@pytest.mark.parametrize(("name", "target"), [v for v in VARIANTS if v[0] not in FLOAT_BYTES])
@pytest.mark.parametrize("fill", [0x00, 0x0F, 0x77, 0x7F, 0x80, 0xF0, 0xFF])
def test_dot_matches_twin_at_the_ends_of_the_range(name, target, fill):
    rng = np.random.default_rng(fill)
    n_cols = 2 * layout.STORE_TYPES[name].block_cols
    x = np.where(rng.integers(0, 2, (3, n_cols)) > 0, 127.0, -127.0).astype(np.float32)
    x[1], x[2] = 127, -127
    check(name, target, random_rows(rng, name, 9, n_cols, fill), n_cols, x)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize(("name", "grid"), [("IQ3_XXS", IQ3_XXS_GRID), ("IQ3_S", IQ3_S_GRID)])
@pytest.mark.parametrize("minus", [False, True])
def test_dot_of_the_largest_grid_entries(name, grid, minus, target):
    """Every index at the grid's largest entry, scales of 31, equal signs (but one of 8 in IQ3_XXS)."""
    index = int(grid.sum(axis=1, dtype=int).argmax())
    rows = np.full((9, layout.CONVERSIONS[name].block_bytes), 0xFF, np.uint8)
    rows[:, :2] = np.array([-0.37], np.float16).view(np.uint8)
    rows[:, 2:66] = index & 255
    if name == "IQ3_S":
        rows[:, 66:74], rows[:, 74:106] = 255 * (index >> 8), 255 * minus
    else:
        rows[:, 66:98] = np.full(8, 0xF0000000 | minus * 0x0FFFFFFF, "<u4").view(np.uint8)
    x = np.repeat(np.array([[127], [-127], [127]], np.float32), 256, axis=1)
    check(name, target, rows, 256, x)


@pytest.mark.parametrize(("name", "target"), VARIANTS)
def test_dot_of_zero_activations_is_zero(name, target):
    rng = np.random.default_rng(0)
    n_cols = max(32, layout.STORE_TYPES[name].block_cols)
    rows = random_rows(rng, name, 8, n_cols)
    octets, stride, n_octets = stored(rows, name, n_cols)
    _, memory = activation(name, np.zeros(n_cols, np.float32))
    assert not run_one(name, target, octets, stride, n_octets, n_cols, memory).any()


def test_mxfp4_of_every_exponent():
    """Rows with one exponent each: 0 and 1 are subnormal, 255 is no nan."""
    rows = np.zeros((256, 17), np.uint8)
    rows[:, 0] = np.arange(256)
    rows[:, 1:] = np.random.default_rng(0).integers(0, 256, 16)
    check("MXFP4", "portable", rows, 32, np.random.default_rng(1).standard_normal((3, 32), np.float32))


@pytest.mark.parametrize("values", [[1.0, np.inf, -np.inf, np.nan], [6e-8, -6.1e-5, 65504, -0.0]])
def test_f16_of_special_values(values):
    rows = np.resize(np.array(values, np.float16), (9, 8)).view(np.uint8)
    check("F16", "portable", rows, 8, np.array([[1] * 8, [0.5] * 8, [-3e38] * 8], np.float32))


@pytest.mark.parametrize("hardware", [True, False])
def test_every_f16_as_f32(monkeypatch, hardware):
    """By the CPU's instruction and by integer arithmetic; a signalling nan may stay one."""
    if not hardware:
        monkeypatch.setattr(vec, "has_half", lambda context: False)

    @njit
    def widen(halves, floats, n):
        for i in range(0, n, 8):
            vec.store8(floats + 4 * i, vec.load8_f16(halves + 2 * i))

    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = np.zeros(1 << 16, np.float32)
    widen(halves.ctypes.data, floats.ctypes.data, len(halves))
    expected = halves.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(floats), nan)
    np.testing.assert_array_equal(floats[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_pair_sums_fit_int16(name):
    """The bound that `group` states, for the largest w + offset of a type."""
    fmt = FORMATS[name]
    bits = {"Q2_K": 2, "Q3_K": 3, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 7}.get(name, 4)
    book = BOOKS.get(name, [0, (1 << bits) - 1 - fmt.offset])
    largest = max(abs(w + fmt.offset) for w in (min(book), max(book)))
    assert fmt.group * 2 * largest * 127 < 1 << 15
    assert fmt.pairs != "pairs_unsigned" or min(book) + fmt.offset >= 0


def test_unknown_isa_is_refused():
    with pytest.raises(ValueError, match="unknown instruction set 'mmx'"):
        isa.choose("mmx")
