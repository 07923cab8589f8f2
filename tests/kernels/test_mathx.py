"""Polynomials against float64 truth, over their whole range."""

import numpy as np
import pytest
from numba import njit

from strata_jit.kernels import mathx
from strata_jit.kernels.ref import mathx as ref
from strata_jit.kernels.vec import load8, store8

ULP_EXP = 1.0
ULP_SIGMOID = 3.0
ULP_SILU = 3.0
ULP_LOG1P = 2.0
ULP_SOFTPLUS = 2.5
SINCOS_ATOL = 1e-15
EDGES = np.array([0.0, -0.0, 1e-30, -1e-30, 1e-45, 88.7228, -87.33, 0.34657359], np.float32)


def vectorised(function):
    """float32[8n] -> float32[8n] through an eight-lane function."""

    @njit
    def run(src, dst, n):
        for i in range(0, 4 * n, 32):
            store8(dst + i, function(load8(src + i)))

    def call(x):
        padded = np.concatenate([x, np.zeros(-len(x) % 8, np.float32)])
        out = np.full_like(padded, np.nan)
        run(padded.ctypes.data, out.ctypes.data, len(padded))
        return out[: len(x)]

    return call


@njit
def _sincos(x, s, c):
    for i in range(len(x)):
        s[i], c[i] = mathx.sincos(x[i])


@pytest.fixture(scope="module")
def exp():
    return vectorised(mathx.exp8)


def ulps(found, truth):
    """|found - truth| in units of the spacing of float32 at the truth."""
    spacing = np.spacing(np.abs(truth).astype(np.float32)).astype(np.float64)
    return np.abs(found.astype(np.float64) - truth) / spacing


def sweep(low, high, n=1_000_000):
    return np.concatenate([np.linspace(low, high, n).astype(np.float32), EDGES])


def test_exp8_matches_ref(exp):
    x = sweep(-103.9, 88.7228)
    assert ulps(exp(x), ref.exp(x)).max() <= ULP_EXP


def test_exp8_matches_ref_bit_for_bit(exp):
    x = sweep(-110, 95, 300_000)
    np.testing.assert_array_equal(exp(x), ref.exp_f32(x))


def test_exp8_special_values(exp):
    x = np.array([-np.inf, -1e30, -104.0, np.inf, 3e38, 88.73, 0.0, -0.0], np.float32)
    np.testing.assert_array_equal(exp(x), [0, 0, 0, np.inf, np.inf, np.inf, 1, 1])
    assert np.isnan(exp(np.array([np.nan], np.float32))).all()


def test_exp8_never_falls_over_steps_of_an_ulp(exp):
    for centre in (-100.0, -30.0, -0.34657359, 0.34657359, 1.0, 88.0):
        first = np.float32(centre).view(np.int32)
        x = np.sort((first + np.arange(-20_000, 20_000, dtype=np.int32)).view(np.float32))
        y = exp(x)
        assert (y[1:] >= y[:-1] * (1 - 2.0**-22)).all()


def test_sigmoid8_matches_ref():
    x = sweep(-85, 85)
    assert ulps(vectorised(mathx.sigmoid8)(x), ref.sigmoid(x)).max() <= ULP_SIGMOID


def test_silu8_matches_ref():
    silu = vectorised(mathx.silu8)
    x = sweep(-80, 200)
    x = x[(np.abs(x) > 1e-30) & (x > -80)]
    assert ulps(silu(x), ref.silu(x)).max() <= ULP_SILU
    np.testing.assert_array_equal(silu(np.array([0, -1e30, 1e30], np.float32)), np.float32([0, 0, 1e30]))


@pytest.mark.parametrize("name", ["sigmoid", "silu"])
def test_sigmoid8_and_silu8_match_ref_bit_for_bit(name):
    x = np.concatenate([sweep(-110, 110, 300_000), np.float32([np.inf, -np.inf, np.nan, 3e38, -3e38])])
    found = vectorised(getattr(mathx, f"{name}8"))(x)
    np.testing.assert_array_equal(found, getattr(ref, f"{name}_f32")(x))


def test_log1p8_matches_ref():
    log1p = vectorised(mathx.log1p8)
    u = np.concatenate([np.linspace(0, 1, 500_000), np.geomspace(1e-38, 1, 500_000)]).astype(np.float32)
    assert ulps(log1p(u), ref.log1p(u)).max() <= ULP_LOG1P
    tiny = np.concatenate([u, np.float32([0, 1e-45, 3e-45, 1e-41, 1])])
    np.testing.assert_array_equal(log1p(tiny), ref.log1p_f32(tiny))
    assert ulps(log1p(tiny[-5:]), ref.log1p(tiny[-5:])).max() <= ULP_LOG1P


def test_softplus8_matches_ref():
    softplus = vectorised(mathx.softplus8)
    x = sweep(-87, 200)
    assert ulps(softplus(x), ref.softplus(x)).max() <= ULP_SOFTPLUS
    x = np.concatenate([sweep(-110, 110, 100_000), np.float32([1e30, -1e30])])
    np.testing.assert_array_equal(softplus(x), ref.softplus_f32(x))


def test_softplus8_special_values():
    x = np.array([-np.inf, -200, np.inf, 3e38, np.nan], np.float32)
    np.testing.assert_array_equal(vectorised(mathx.softplus8)(x), np.float32([0, 0, np.inf, 3e38, np.nan]))


@pytest.mark.parametrize("largest", [1.0, 100.0, 1.6e6])
def test_sincos_matches_ref(rng_seed, largest):
    x = np.random.default_rng(rng_seed).uniform(-largest, largest, 200_000)
    x = np.concatenate([x, np.arange(0, min(largest, 1e5)), np.arange(64) * (np.pi / 4)])
    s, c = np.empty_like(x), np.empty_like(x)
    _sincos(x, s, c)
    true_s, true_c = ref.sincos(x)
    assert np.abs(s - true_s).max() <= SINCOS_ATOL
    assert np.abs(c - true_c).max() <= SINCOS_ATOL


@pytest.fixture
def rng_seed():
    return 7
