"""Rotary position embedding: what a file says of it, frequencies and magnitude, the op `rope_angles`.

Owns the arithmetic of linear scaling, of YaRN (Peng et al., arXiv 2309.00071) and of frequency factors; its
results are the same bits on every machine. Keys and defaults as llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.hparams import context_length, in_range
from strata_jit.models.language_model import Constant
from strata_jit.models.transformer import Transformer

DIGITS = 40
PI = Decimal("3.14159265358979323846264338327950288419716939937511")
FACTORS = "rope_freqs.weight"
"""The tensor of frequency factors, which some files of Llama 3 have."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """Interpolation of slow dimensions only."""

    n_ctx: int
    """Positions that the model was trained for before it was extended."""
    beta_fast: float = 32.0
    """Turns within n_ctx from which on a dimension keeps its frequency."""
    beta_slow: float = 1.0
    """Turns up to which it is interpolated wholly."""
    ext_factor: float = 1.0
    """How much of the ramp between both applies; 0 is plain interpolation."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model."""

    n_rot: int
    base: float
    factor: float = 1.0
    """Positions are divided by it where they are interpolated; 1 = nowhere."""
    attn_factor: float = 1.0
    """Factor of cosines and sines on top of YaRN's own."""
    yarn: Yarn | None = None

    @property
    def is_corrected(self) -> bool:
        """Whether YaRN corrects the magnitude."""
        return self.yarn is not None and self.yarn.ext_factor != 0


def read_rope(file: GGUFFile, n_rot: int) -> Rope:
    """From the keys `rope.*` of the file; ModelError for an unknown scaling or a number out of range."""
    prefix = f"{file.get('general.architecture', str)}.rope"
    base = in_range(file, f"{prefix}.freq_base", 10000.0, 1.0, 1e15)
    kind = file.get(f"{prefix}.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError.at(file.path, f"{prefix}.scaling.type", kind, "none, linear or yarn")
    factor = 1.0
    if kind != "none":
        older = in_range(file, f"{prefix}.scale_linear", 1.0, 1e-3, 1e6)
        factor = in_range(file, f"{prefix}.scaling.factor", older, 1e-3, 1e6)
    attn_factor = in_range(file, f"{prefix}.scaling.attn_factor", 1.0, 1e-3, 1e3)
    yarn = _read_yarn(file, f"{prefix}.scaling", base) if kind == "yarn" else None
    return Rope(n_rot, base, factor, attn_factor, yarn)


def _read_yarn(file: GGUFFile, prefix: str, base: float) -> Yarn:
    if base == 1:
        raise ModelError.at(file.path, prefix.replace(".scaling", ".freq_base"), "1", "more than 1 with YaRN")
    key = f"{prefix}.original_context_length"
    n_ctx = file.get(key, int, context_length(file))
    if n_ctx <= 0:
        raise ModelError.at(file.path, key, str(n_ctx), "a positive number")
    return Yarn(
        n_ctx,
        in_range(file, f"{prefix}.yarn_beta_fast", 32.0, 1e-3, 1e6),
        in_range(file, f"{prefix}.yarn_beta_slow", 1.0, 1e-3, 1e6),
        in_range(file, f"{prefix}.yarn_ext_factor", 1.0, 0.0, 1.0),
    )


def inverse_frequencies(rope: Rope, factors: Sequence[float] | None = None) -> NDArray[np.float64]:
    """float64[n_rot / 2]: base ** (-2 i / n_rot), divided by factors[i] and scaled, correctly rounded.

    Scaled: times (1 - mix) / factor + mix, where mix is 0 without YaRN, and with it falls from 1 (fast
    dimensions, as they are) to 0 (slow ones). By decimal arithmetic: libm's pow and log may differ in the
    last bit from CPU to CPU.
    """
    n = rope.n_rot
    with localcontext() as context:
        context.prec = DIGITS
        scale, frequencies = 1 / Decimal(rope.factor), []
        for i, mix in enumerate(_yarn_mix(rope)):
            frequency = Decimal(rope.base) ** (Decimal(-2 * i) / Decimal(n)) * (scale * (1 - mix) + mix)
            frequencies.append(float(frequency / Decimal(factors[i] if factors is not None else 1)))
        return np.array(frequencies)


def _yarn_mix(rope: Rope) -> list[Decimal]:
    """Share of each frequency that is kept."""
    n, yarn = rope.n_rot, rope.yarn
    if yarn is None:
        return [Decimal(0)] * (n // 2)

    def dimension(turns: float) -> Decimal:
        """The (fractional) dimension that turns so often within n_ctx positions."""
        return n * (yarn.n_ctx / (Decimal(turns) * 2 * PI)).ln() / (2 * Decimal(rope.base).ln())

    low = max(dimension(yarn.beta_fast).to_integral_value(ROUND_FLOOR), Decimal(0))
    high = min(dimension(yarn.beta_slow).to_integral_value(ROUND_CEILING), Decimal(n - 1))
    width = max(high - low, Decimal("0.001"))
    ramp = (min(max((i - low) / width, Decimal(0)), Decimal(1)) for i in range(n // 2))
    return [(1 - y) * Decimal(yarn.ext_factor) for y in ramp]


def yarn_scale(factor: float, multiplier: float) -> float:
    """1 + multiplier * ln(factor), YaRN's correction of magnitudes; 1 where nothing is stretched."""
    with localcontext() as context:
        context.prec = DIGITS
        return float(1 + Decimal(multiplier) * Decimal(factor).ln()) if factor > 1 else 1.0


def magnitude(rope: Rope) -> float:
    """Factor of cosines and sines, which grows with YaRN's stretch, by its multiplier 0.1."""
    return rope.attn_factor * (yarn_scale(rope.factor, 0.1) if rope.is_corrected else 1.0)


@dataclass(frozen=True, slots=True)
class Angles:
    """What `rope_angles` leaves for all layers, and what it was made from."""

    buffer: int
    """Buffer id of float32[max_rows][n_rot / 2][2]."""
    freqs: int
    """Buffer id of float64[n_rot / 2]."""
    factor: float
    """Magnitude of cosines and sines."""


def add_rope_angles(t: Transformer, rope: Rope, factor: float) -> Angles:
    """Append the op `rope_angles`. factor: magnitude of cosines and sines."""
    n_half = rope.n_rot // 2
    angles = t.b.buffer("angles", t.limits.max_rows * n_half * 8)
    freqs = t.b.buffer("freqs", n_half * 8)
    factors = t.host_vector(FACTORS, n_half) if t.b.has(FACTORS) else None
    t.constants.append(Constant(freqs, inverse_frequencies(rope, factors)))
    t.b.op("rope_angles", "rope", {"freqs": freqs, "angles": angles, "n_half": n_half, "factor": factor})
    return Angles(angles, freqs, factor)
