"""Qwen2 MoE: rotary halves, biases of q, k and v, no renormalised weights, a shared expert with a weight."""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.attention import ROPE_NEOX, Attention
from strata_jit.models.ffn import RoutedFfn
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.stack import stack
from strata_jit.models.transformer import Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a qwen2moe model."""
    t = Transformer(file, limits, {"expert_shared_count"})
    attention = Attention(t, rope_mode=ROPE_NEOX)
    ffn = RoutedFfn(t, norm_w=False)
    return stack(t, attention, ffn)
