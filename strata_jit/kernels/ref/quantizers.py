"""Twin of the quantisers: float32 weights -> the blocks of a GGUF file, from the definition.

What is minimised is the plain sum of squared errors of each group of columns that shares a scale. A group's
scale is searched: its peak (the value of largest magnitude; the positive one of two) is mapped to each of
`PEAK_CODES` in turn, the others to the codes nearest to them, and the least-squares scale of the codes that
explain most, (sum of q * x)**2 / sum of q * q, is taken. Then scales are rounded to what the block can store,
and codes are chosen anew for the rounded scale. Sums over columns have eight lanes (column mod 8).

Blocks are those of ggml-common.h; `ref/blocks.py` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata_jit.kernels.ref.blocks import BLOCK_BYTES, BLOCK_COLS, IQ4_VALUES, Array
from strata_jit.kernels.ref.fma import fma32

VALUES = IQ4_VALUES.astype(np.float32)
MIDPOINTS = (VALUES[1:] + VALUES[:-1]) / 2
PEAK_CODES: dict[str, list[float]] = {
    "IQ4": [end + 3 * step for end in (-127, 113) for step in range(-8, 9)],
    "Q6": [-32 - step / 4 for step in range(-8, 9)],
}
"""Codes that a group's peak is mapped to, in this order; of equals the first is taken."""
LEAST = np.float32(2.0**-25)
"""No block stores a value but 0 below 2**-24, f16's least: a group below half of that is 0."""
HALF_MAX = np.float32(65504)


def quantize(type_name: str, x: Array) -> Array:
    """uint8[n_rows, row bytes]: `x` (float32[n_rows, n_cols], finite) as rows of a GGUF file."""
    x = np.asarray(x, np.float32)
    if type_name in _FLOATS:
        return np.ascontiguousarray(_FLOATS[type_name](x)).view(np.uint8)
    blocks = x.reshape(-1, BLOCK_COLS[type_name])
    packed = _PACK[type_name](*_QUANTIZE[type_name](blocks))
    assert packed.shape == (len(blocks), BLOCK_BYTES[type_name])
    return packed.reshape(len(x), -1)


@dataclass(frozen=True, slots=True)
class _Codes:
    """The codes that a kind of block has."""

    kind: str

    def nearest(self, x: Array) -> Array:
        """float32: the code value nearest to each x, the upper one (IQ4) or even one (Q6) of two."""
        if self.kind == "Q6":
            return np.clip(np.rint(x), np.float32(-32), np.float32(31))
        return VALUES[self.index(x)]

    def index(self, x: Array) -> Array:
        """What is stored for the code nearest to each x."""
        if self.kind == "Q6":
            return (self.nearest(x) + 32).astype(np.uint8)
        return (x[..., None] >= MIDPOINTS).sum(axis=-1).astype(np.uint8)


IQ4, Q6 = _Codes("IQ4"), _Codes("Q6")


def _lane_sum(a: Array, b: Array) -> Array:
    """float32 sum of a * b over the last axis: fma into eight lanes, then lanes 4, 2 and 1 apart."""
    lanes = np.zeros((*a.shape[:-1], 8), np.float32)
    for k in range(0, a.shape[-1], 8):
        lanes = fma32(a[..., k : k + 8], b[..., k : k + 8], lanes)
    for half in (4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _peak(x: Array) -> Array:
    high, low = x.max(axis=-1), x.min(axis=-1)
    return np.where(high >= -low, high, low)


def _search(x: Array, codes: _Codes) -> Array:
    """float32[...]: scales of the groups x[..., n]."""
    peak = _peak(x)
    empty = np.abs(peak) < LEAST
    safe = np.where(empty, np.float32(1), peak)
    best_qx, best_qq = np.zeros(peak.shape, np.float32), np.ones(peak.shape, np.float32)
    for code in PEAK_CODES[codes.kind]:
        q = codes.nearest(x * (np.float32(code) / safe)[..., None])
        qx, qq = _lane_sum(q, x), _lane_sum(q, q)
        wide_qx, wide_best = qx.astype(np.float64), best_qx.astype(np.float64)
        better = wide_qx * wide_qx * best_qq > wide_best * wide_best * qq
        best_qx, best_qq = np.where(better, qx, best_qx), np.where(better, qq, best_qq)
    return np.where(empty, np.float32(0), best_qx / best_qq)


def _half(d: Array) -> Array:
    """float16: d rounded to nearest even, but kept finite, and not 0 unless it is."""
    half = np.clip(d, -HALF_MAX, HALF_MAX).astype(np.float16)
    least = np.copysign(np.float32(2.0**-24), d).astype(np.float16)
    return np.where((half == 0) & (d != 0), least, half)


def _inverse(scale: Array) -> Array:
    """1 / scale, 0 for 0, with an axis for columns."""
    safe = np.where(scale == 0, np.float32(1), scale)
    return np.where(scale == 0, np.float32(0), np.float32(1) / safe)[..., None]


def _error(x: Array, scale: Array, codes: _Codes) -> Array:
    """float32: sum of squared errors of x[..., n] with that scale."""
    wrong = x - scale[..., None] * codes.nearest(x * _inverse(scale))
    return _lane_sum(wrong, wrong)


def _super_block(x: Array, codes: _Codes, least: int) -> tuple[Array, ...]:
    """Blocks x[n, n_sub, n_cols] whose integer scales reach from `least` to -least - 1.

    The scale of largest magnitude becomes `least`; around each other, three are tried.
    """
    scales = _search(x, codes)
    d = _half(_peak(scales) / np.float32(least))
    wide = d.astype(np.float32)[:, None]
    middle = np.rint(np.where(wide == 0, np.float32(0), scales / np.where(wide == 0, np.float32(1), wide)))
    tried = [np.clip(middle + step, least, -least - 1) for step in (0, -1, 1)]
    errors = np.stack([_error(x, wide * k, codes) for k in tried])
    chosen = np.take_along_axis(np.stack(tried), errors.argmin(axis=0)[None], axis=0)[0]
    return d, chosen.astype(np.int64), codes.index(x * _inverse(wide * chosen))


def _quantize_iq4_nl(x: Array) -> tuple[Array, ...]:
    d = _half(_search(x, IQ4))
    # IQ4 has no code for 0: where the least d is too much, nothing is better
    d = np.where(_lane_sum(x, x) < _error(x, d.astype(np.float32), IQ4), np.float16(0), d)
    return d, IQ4.index(x * _inverse(d.astype(np.float32)))


def _quantize_iq4_xs(x: Array) -> tuple[Array, ...]:
    return _super_block(x.reshape(-1, 8, 32), IQ4, -32)


def _quantize_q6_k(x: Array) -> tuple[Array, ...]:
    return _super_block(x.reshape(-1, 16, 16), Q6, -128)


def _quantize_q8_0(x: Array) -> tuple[Array, ...]:
    d = _half(np.abs(x).max(axis=1) / np.float32(127))
    q = np.rint(x * _inverse(d.astype(np.float32)))
    return d, np.clip(q, -127, 127).astype(np.int8)


_QUANTIZE: dict[str, Callable[[Array], tuple[Array, ...]]] = {
    "IQ4_NL": _quantize_iq4_nl,
    "IQ4_XS": _quantize_iq4_xs,
    "Q6_K": _quantize_q6_k,
    "Q8_0": _quantize_q8_0,
}


# --- bytes of the blocks -----------------------------------------------------------------------------------


def _bytes(*parts: Array) -> Array:
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8).reshape(len(p), -1) for p in parts], axis=1)


def _iq4_bytes(codes: Array) -> Array:
    """uint8[n, 16 per 32 columns]: byte j of a group holds columns j (low nibble) and 16 + j."""
    groups = codes.reshape(len(codes), -1, 2, 16)
    return groups[:, :, 0] | groups[:, :, 1] << 4


def _pack_iq4_nl(d: Array, codes: Array) -> Array:
    return _bytes(d, _iq4_bytes(codes))


def _pack_iq4_xs(d: Array, scales: Array, codes: Array) -> Array:
    stored = (scales + 32).astype(np.uint16)
    high = np.zeros(len(d), np.uint16)
    for i in range(8):
        high |= (stored[:, i] >> 4) << np.uint16(2 * i)
    low = (stored[:, ::2] & 15 | (stored[:, 1::2] & 15) << 4).astype(np.uint8)
    return _bytes(d, high, low, _iq4_bytes(codes))


def _pack_q6_k(d: Array, scales: Array, codes: Array) -> Array:
    quarters = codes.reshape(-1, 2, 4, 32)  # of each half of 128 columns
    low = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    high = np.zeros((len(codes), 2, 32), np.uint8)
    for i in range(4):
        high |= (quarters[:, :, i] >> 4) << 2 * i
    return _bytes(low, high, scales.astype(np.int8), d)


def _pack_q8_0(d: Array, codes: Array) -> Array:
    return _bytes(d, codes)


_PACK: dict[str, Callable[..., Array]] = {
    "IQ4_NL": _pack_iq4_nl,
    "IQ4_XS": _pack_iq4_xs,
    "Q6_K": _pack_q6_k,
    "Q8_0": _pack_q8_0,
}


def _bf16(x: Array) -> Array:
    """bfloat16 bits, rounded to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


_FLOATS: dict[str, Callable[[Array], Array]] = {
    "F32": lambda x: x,
    "F16": lambda x: x.astype(np.float16),
    "BF16": _bf16,
}
