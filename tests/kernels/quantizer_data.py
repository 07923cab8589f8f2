"""Seeded weights of several kinds, and how well llama.cpp's library quantises them.

`python -m bench.compare_quantizers LIBRARY` measures REFERENCE anew.
"""

import numpy as np

SHAPE = (48, 1024)


def _gaussian(rng):
    return 0.02 * rng.standard_normal(SHAPE)


def _outliers(rng):
    """One weight in a hundred is thirty times as large."""
    return _gaussian(rng) * np.where(rng.random(SHAPE) < 0.01, 30, 1)


def _uneven(rng):
    """Neighbouring groups of 32 columns differ in size by up to a thousand."""
    return _gaussian(rng) * np.repeat(10.0 ** rng.uniform(-3, 0, (SHAPE[0], SHAPE[1] // 32)), 32, axis=1)


def _empty(rng):
    """Every other row is zero, and so are parts of the others."""
    x = _gaussian(rng)
    x[::2] = 0
    x[1::4, :256] = 0
    x[3::4, 16:48] = 0
    return x


KINDS = {
    "gaussian": _gaussian,
    "laplace": lambda rng: rng.laplace(0, 0.02, SHAPE),
    "student_t": lambda rng: 0.02 * rng.standard_t(3, SHAPE),
    "uniform": lambda rng: rng.uniform(-1, 1, SHAPE),
    "one_sided": lambda rng: np.abs(_gaussian(rng)),
    "outliers": _outliers,
    "uneven": _uneven,
    "empty": _empty,
    "constant": lambda rng: np.repeat(rng.standard_normal((SHAPE[0], 1)), SHAPE[1], axis=1),
    "tiny": lambda rng: 1e-5 * rng.standard_normal(SHAPE),
    "huge": lambda rng: 1e5 * rng.standard_normal(SHAPE),
    "bf16": lambda rng: _truncated(_gaussian(rng)),
}


def _truncated(x):
    bits = x.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return bits.view(np.float32)


def weights(kind):
    """float32[SHAPE] of one of KINDS."""
    return np.ascontiguousarray(KINDS[kind](np.random.default_rng(sum(kind.encode()))), np.float32)


def relative_rmse(x, values):
    """sqrt(sum of squared errors / sum of squares) in float64."""
    wide = x.astype(np.float64)
    return float(np.sqrt(((wide - values) ** 2).sum() / (wide**2).sum()))
