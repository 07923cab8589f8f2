"""DeepSeek V2, V3 and models of their form (Kimi K2 ...): latent attention, dense layers, shared experts."""

from __future__ import annotations

import math

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.ffn import FFN_FEATURES, RoutedFfn
from strata_jit.models.hparams import in_range
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.mla import MlaAttention, mla_lengths
from strata_jit.models.rotary import Rope, magnitude, read_rope, yarn_scale
from strata_jit.models.stack import stack
from strata_jit.models.transformer import Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a deepseek2 model."""
    t = Transformer(file, limits, FFN_FEATURES)
    attention = latent_attention(t)
    ffn = RoutedFfn(t, norm_w=t.h.expert_weights_norm)
    return stack(t, attention, ffn)


def latent_attention(t: Transformer) -> MlaAttention:
    """The attention, with YaRN's magnitudes as llama.cpp's deepseek2 has them.

    A log multiplier l in the file moves the correction from cosines and sines to the scores, whose factor is
    (m * (1 + l * ln(factor)))^2 / sqrt(key length), m being the magnitude that cosines and sines keep.
    """
    file, rope = t.file, read_rope(t.file, t.h.n_rot)
    if rope.factor != 1 and not rope.is_corrected:
        key = f"{t.h.arch}.rope.scaling.type"
        raise ModelError.at(file.path, key, "an interpolation other than YaRN", "none or yarn")
    multiplier = in_range(file, f"{t.h.arch}.rope.scaling.yarn_log_multiplier", 0.0, 0.0, 1e3)
    kept = rope.attn_factor if multiplier else magnitude(rope)
    scale = score_scale(rope, kept, multiplier, mla_lengths(t)[0])
    return MlaAttention(t, rope, rope_factor=kept, scale=scale)


def score_scale(rope: Rope, kept: float, multiplier: float, n_query: int) -> float:
    """Factor of the scores, see `latent_attention`."""
    corrected = kept * yarn_scale(rope.factor, multiplier)
    return corrected * corrected / math.sqrt(n_query)
