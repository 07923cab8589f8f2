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


TYPES = ("IQ4_XS", "IQ4_NL", "Q6_K", "Q8_0")
REFERENCE = {
    "gaussian": (0.0774082, 0.0767638, 0.0178248, 0.0053539),
    "laplace": (0.0891622, 0.0884309, 0.0216993, 0.0067099),
    "student_t": (0.1054216, 0.1041861, 0.0259253, 0.0085413),
    "uniform": (0.0644785, 0.0639593, 0.0132257, 0.0037532),
    "one_sided": (0.0753529, 0.0747148, 0.0177963, 0.0053628),
    "outliers": (0.1101063, 0.1082882, 0.0334052, 0.0115936),
    "uneven": (0.0770115, 0.0757654, 0.0180753, 0.0053629),
    "empty": (0.0764708, 0.0757961, 0.0176808, 0.0053270),
    "constant": (0.0002231, 0.0002220, 0.0002073, 0.0002130),
    "tiny": (1.0000000, 0.1211403, 1.0000000, 0.0960409),
    "huge": (0.0769977, 0.0764360, 0.0177586, 0.0053686),
    "bf16": (0.0769927, 0.0764573, 0.0177627, 0.0053576),
}
"""Relative RMSE of ggml 0.25.3 (libggml-base, ggml_quantize_chunk without importance matrix) for TYPES,
measured on x86-64 and rounded up in the seventh digit."""
