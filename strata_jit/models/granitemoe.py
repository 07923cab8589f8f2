"""Granite MoE: interleaved rotary pairs; scales of embedding, residual, attention, logits; shared expert."""

from __future__ import annotations

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.attention import ROPE_NORM, Attention
from strata_jit.models.ffn import RoutedFfn
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.stack import stack
from strata_jit.models.transformer import Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a granitemoe model."""
    t = Transformer(file, limits, {"embedding_scale", "residual_scale", "logit_scale"})
    if not file.get("granitemoe.rope.scaling.finetuned", bool, True):
        found, expected = "False: no rotary embedding", "True, all that strata-jit runs for granitemoe"
        raise ModelError.at(file.path, "granitemoe.rope.scaling.finetuned", found, expected)
    attention, ffn = Attention(t, rope_mode=ROPE_NORM), RoutedFfn(t)
    return stack(t, attention, ffn)
