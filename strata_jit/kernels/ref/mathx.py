"""Twins of the transcendental functions: their meaning in float64, and some in their float32 order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_jit.kernels.ref.fma import fma32

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

LN2_HIGH = np.float32(0.69314718055994530942)
LN2_LOW = np.float32(0.69314718055994530942 - float(LN2_HIGH))
LOG2_E = np.float32(1.4426950408889634074)
POLYNOMIAL = np.array([1, 1, 0.49999994, 0.16666521, 0.041668262, 0.0083686709, 0.0013821042], np.float32)

ATANH = np.array([0.3333321, 0.20010719, 0.14001514, 0.14003377], np.float32)


def exp(x: F32) -> F64:
    """e**x."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(x.astype(np.float64))


def exp_f32(x: F32) -> F32:
    """e**x bit by bit as the kernel: k = rint(x * log2(e)), r = x - k*ln2 by two fma, a polynomial, 2**k."""
    x = np.where(np.isnan(x), x, np.clip(x, np.float32(-104), np.float32(89))).astype(np.float32)
    k = np.rint(x * LOG2_E)
    r = fma32(k, -LN2_LOW, fma32(k, -LN2_HIGH, x))
    y = np.full_like(r, POLYNOMIAL[-1])
    for c in POLYNOMIAL[-2::-1]:
        y = fma32(r, y, c)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.ldexp(y, np.where(np.isnan(k), 0, k).astype(np.int32))


def sigmoid_f32(x: F32) -> F32:
    """1 / (1 + e**-x) bit by bit as the kernel."""
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(1) / (np.float32(1) + exp_f32(-x)))


def silu_f32(x: F32) -> F32:
    """x / (1 + e**-x) bit by bit as the kernel."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x / (np.float32(1) + exp_f32(-x)))


def sigmoid(x: F32) -> F64:
    """1 / (1 + e**-x)."""
    return 1 / (1 + exp(-x))


def silu(x: F32) -> F64:
    """x / (1 + e**-x)."""
    return x * sigmoid(x)


def log1p(u: F32) -> F64:
    """log(1 + u)."""
    return np.log1p(u.astype(np.float64))


def log1p_f32(u: F32) -> F32:
    """log(1 + u), 0 <= u <= 1, bit by bit as the kernel: 2 atanh(s) with s = u / (2 + u)."""
    s = u / (np.float32(2) + u)
    z = s * s
    p = np.full_like(z, ATANH[-1])
    for c in ATANH[-2::-1]:
        p = fma32(z, p, c)
    return fma32((s + s) * z, p, s + s)


def softplus(x: F32) -> F64:
    """log(1 + e**x)."""
    return np.logaddexp(0, x.astype(np.float64))


def softplus_f32(x: F32) -> F32:
    """log(1 + e**x) bit by bit as the kernel: max(x, 0) + log1p(e**-|x|)."""
    return np.asarray(np.where(x > 0, x, np.float32(0)) + log1p_f32(exp_f32(-np.abs(x))))


def sincos(x: F64) -> tuple[F64, F64]:
    """(sin x, cos x)."""
    return np.sin(x), np.cos(x)
