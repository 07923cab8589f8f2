"""Qwen3 MoE: rotary halves, RMS norms over each q and k head, softmax router with renormalised weights."""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.attention import ROPE_NEOX, Attention
from strata_jit.models.ffn import RoutedFfn
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.stack import stack
from strata_jit.models.transformer import Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a qwen3moe model."""
    t = Transformer(file, limits)
    attention, ffn = Attention(t, rope_mode=ROPE_NEOX, qk_norm="head"), RoutedFfn(t)
    return stack(t, attention, ffn)
