"""The twins themselves: fused multiply-add, block decoding, activation quantisation, dot product."""

import itertools

import gguf
import numpy as np
import pytest
from numba import njit

from strata_jit.kernels import layout
from strata_jit.kernels.ref import blocks
from strata_jit.kernels.ref.activations import KIND_OF_TYPE, quantize_activation
from strata_jit.kernels.ref.dot import dot, dot_float
from strata_jit.kernels.ref.fma import fma32
from strata_jit.kernels.vec import fma1

F32_ROUNDING = 1e-6
"""Allowed error of a float32 accumulation, as a share of the sum of |products|: some 8 roundings."""

QUANT_TYPES = tuple(blocks.BLOCK_COLS)
FLOAT_TYPES = tuple(blocks.FLOAT_BYTES)
D_OFFSETS = {
    **dict.fromkeys(QUANT_TYPES, (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


def random_rows(name, n_rows, n_cols, seed=0):
    """GGUF rows with any codes and scales, block scales d and dmin around 0.01."""
    rng = np.random.default_rng(seed)
    if name in FLOAT_TYPES:
        values = rng.standard_normal((n_rows, n_cols), np.float32)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        if name == "BF16":
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        return values.view(np.uint8)
    block_bytes = blocks.BLOCK_BYTES[name]
    rows = rng.integers(0, 256, (n_rows, n_cols // blocks.BLOCK_COLS[name], block_bytes), np.uint8)
    if name == "MXFP4":
        rows[..., 0] = rng.integers(118, 124, rows.shape[:2])
    for at in D_OFFSETS[name]:
        d = (0.01 * rng.standard_normal(rows.shape[:2])).astype(np.float16)
        rows[..., at : at + 2] = d[..., None].view(np.uint8)
    return rows.reshape(n_rows, -1)


# --- fma32 --------------------------------------------------------------------------------------------------


@njit
def _hardware_fma(a, b, c, out):
    for i in range(a.size):
        out[i] = fma1(a[i], b[i], c[i])


def assert_fma_equal(a, b, c):
    a, b, c = (np.ascontiguousarray(v, np.float32) for v in (a, b, c))
    expected = np.empty_like(a)
    _hardware_fma(a, b, c, expected)
    ours = fma32(a, b, c)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def random_floats(rng, n):
    return rng.integers(0, 2**32, n, np.uint32).view(np.float32)


def test_fma32_random_bits():
    rng = np.random.default_rng(0)
    assert_fma_equal(*(random_floats(rng, 200_000) for _ in range(3)))


def test_fma32_similar_exponents():
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(200_000, np.float32) for _ in range(2))
    c = rng.standard_normal(a.size, np.float32) * np.exp2(rng.integers(-60, 60, a.size)).astype(np.float32)
    assert_fma_equal(a, b, c)
    assert_fma_equal(a, b, -(a * b))


def test_fma32_near_ties():
    """Sums within a hair of the midpoint of two float32, where rounding twice goes wrong."""
    rng = np.random.default_rng(2)
    a, b, target = (rng.standard_normal(200_000, np.float32) for _ in range(3))
    a *= np.exp2(rng.integers(-40, 5, a.size)).astype(np.float32)
    middle = (np.float64(target) + np.float64(np.nextafter(target, np.float32(9)))) / 2
    assert_fma_equal(a, b, (middle - np.float64(a) * b).astype(np.float32))
    tiny = np.exp2(rng.integers(-149, -30, a.size)).astype(np.float32)
    odd = (rng.integers(2**23, 2**24, a.size) | 1).astype(np.float32)
    assert_fma_equal(odd, np.full_like(odd, 1.5), tiny)  # 1.5 * odd is a midpoint or next to one
    assert_fma_equal(odd, np.full_like(odd, 1.5), -tiny)
    naive = (np.float64(odd) * 1.5 + tiny).astype(np.float32)
    assert (naive != fma32(odd, 1.5, tiny)).any()  # the inputs do tell a correct fma from a naive one


def test_fma32_subnormal_results():
    rng = np.random.default_rng(3)
    a = rng.standard_normal(100_000, np.float32) * np.float32(1e-20)
    b = rng.standard_normal(a.size, np.float32) * np.float32(1e-20)
    c = rng.integers(-(2**24), 2**24, a.size).astype(np.float64) * 2.0**-149
    assert_fma_equal(a, b, c.astype(np.float32))


def test_fma32_special_values():
    ulp = np.float32(2.0**-23)
    one, big = np.float32(1), np.finfo(np.float32).max
    positive = [0.0, 2.0**-149, 2.0**-126, 2.0**-75, one - ulp / 2, one, one + ulp, 3.0, 2.0**24 + 2, big]
    values = [*positive, np.inf, np.nan, *(-v for v in positive), -np.inf]
    a, b, c = np.array(list(itertools.product(values, repeat=3)), np.float32).T
    assert_fma_equal(a, b, c)


# --- blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*QUANT_TYPES, "F32", "F16", "BF16"])
def test_dequantize_matches_gguf(name):
    rows = random_rows(name, 5, 768)
    oracle = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    np.testing.assert_allclose(blocks.dequantize(name, rows, 768), oracle, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("name", QUANT_TYPES)
def test_dequantize_matches_package(name):
    quants = pytest.importorskip("strata_jit.gguf.quants")
    ggml_type = pytest.importorskip("strata_jit.gguf.types").GGMLType[name]
    rows = random_rows(name, 5, 768, seed=1)
    package = quants.dequantize(ggml_type, rows, 768)
    np.testing.assert_allclose(blocks.dequantize(name, rows, 768), package, rtol=3e-7, atol=1e-6)


# --- activations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q256", "Q32", "F32"])
def test_activation_row_matches_layout(kind):
    n_cols = 768
    planes = layout.act_planes(kind, n_cols)
    act = quantize_activation(kind, np.random.default_rng(0).standard_normal(n_cols, np.float32))
    row = act.row()
    assert row.nbytes == planes.nbytes
    if kind == "F32":
        np.testing.assert_array_equal(row.view(np.float32), act.x)
        return
    pairs = row[: 2 * n_cols].view(np.int8).reshape(-1, 2, 32)
    np.testing.assert_array_equal(pairs[:, 0].reshape(-1), act.a)
    np.testing.assert_array_equal(pairs[:, 1].reshape(-1), np.abs(act.a))
    a16 = row[planes.a16 : planes.a16 + 2 * n_cols].view(np.int16)
    np.testing.assert_array_equal(a16[:8], act.a[[0, 2, 1, 3, 4, 6, 5, 7]])
    np.testing.assert_array_equal(row[planes.d :][: act.d.nbytes].view(np.float32), act.d)
    sums = row[planes.sums :][: n_cols // 8].view(np.int16)
    expected = act.a.reshape(-1, 16).astype(int).sum(axis=1)
    order = [0, 2, 1, 3] if kind == "Q256" else [0, 1, 2, 3]
    np.testing.assert_array_equal(sums, expected.reshape(-1, 4)[:, order].ravel())


@pytest.mark.parametrize("kind", ["Q256", "Q32"])
def test_quantize_activation_error_is_half_a_step(kind):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(1024, np.float32) * np.float32(3)
    act = quantize_activation(kind, x)
    step = np.repeat(act.d, x.size // act.d.size)
    assert (np.abs(act.values - x) <= 0.50001 * step).all()
    assert np.abs(act.a.astype(int)).reshape(act.d.size, -1).max(axis=1).tolist() == [127] * act.d.size


def test_quantize_activation_extremes():
    big = np.finfo(np.float32).max
    x = np.zeros((5, 32), np.float32)
    x[1], x[2], x[3], x[4] = -big, 1e-42, np.linspace(-127, 127, 32), 0.1
    act = quantize_activation("Q32", x.reshape(-1))
    a = act.a.reshape(-1, 32)
    assert not a[0].any() and not a[2].any()
    assert (a[1] == -127).all() and (a[4] == 127).all()
    assert a[3].min() == -127 and a[3].max() == 127
    assert act.d[0] == 0 and np.isfinite(act.d).all()


def test_quantize_activation_ties_to_even():
    x = np.zeros(32, np.float32)
    x[:6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    assert quantize_activation("Q32", x).a[:6].tolist() == [127, 0, 2, 2, 0, -2]


# --- dot ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*QUANT_TYPES, *FLOAT_TYPES])
@pytest.mark.parametrize("n_cols", [256, 2304])
def test_dot_is_the_product_of_what_is_stored(name, n_cols):
    """Against float64 on the same quantised activations only float32 roundings remain."""
    rows = random_rows(name, 9, n_cols, seed=n_cols)
    x = np.random.default_rng(2).standard_normal(n_cols, np.float32)
    act = quantize_activation(KIND_OF_TYPE[name], x)
    weights = blocks.dequantize(name, rows, n_cols)
    result = dot(name, rows, n_cols, act)
    assert result.dtype == np.float32 and result.shape == (9,)
    bound = F32_ROUNDING * (np.abs(weights) @ np.abs(act.values))
    assert (np.abs(result - weights @ act.values) <= bound).all()


@pytest.mark.parametrize("name", [*QUANT_TYPES, *FLOAT_TYPES])
def test_dot_within_activation_quantisation_error(name):
    n_cols = 1536
    rows = random_rows(name, 16, n_cols, seed=5)
    x = np.random.default_rng(3).standard_normal(n_cols, np.float32)
    act = quantize_activation(KIND_OF_TYPE[name], x)
    weights = np.abs(blocks.dequantize(name, rows, n_cols))
    error = np.abs(dot(name, rows, n_cols, act) - dot_float(name, rows, n_cols, x))
    bound = 4 * F32_ROUNDING * np.abs(x.astype(np.float64))
    if act.kind != "F32":
        bound += 0.50001 * np.repeat(act.d.astype(np.float64), n_cols // act.d.size)  # half a step
    assert (error <= weights @ bound).all()


@pytest.mark.parametrize("name", QUANT_TYPES)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_dot_extreme_codes(name, byte):
    """All codes and scales at an end of their range, activations at +-127: the integers stay exact."""
    rows = np.full((1, 256 // blocks.BLOCK_COLS[name], blocks.BLOCK_BYTES[name]), byte, np.uint8)
    if name == "MXFP4":
        rows[..., 0] = 128
    for at in D_OFFSETS[name]:
        rows[..., at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    rows = rows.reshape(1, -1)
    act = quantize_activation(KIND_OF_TYPE[name], np.full(256, -127, np.float32))
    assert (act.a == -127).all() and (act.d == 1).all()
    assert dot(name, rows, 256, act)[0] == np.float32(-127 * blocks.dequantize(name, rows, 256).sum())


def test_dot_floats_order():
    """1 + eps + eps: summed by column mod 4, the two small terms meet before the large one."""
    eps = np.float32(2.0**-24)
    weights = np.array([[1, 0, eps, eps]], np.float32)
    act = quantize_activation("F32", np.ones(4, np.float32))
    assert dot("F32", weights.view(np.uint8), 4, act)[0] == 1 + 2 * eps
