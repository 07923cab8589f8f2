"""Qwen3 MoE: rotary halves, RMS norms over each q and k head, softmax router with renormalised weights."""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.transformer import ROPE_NEOX, Options, Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a qwen3moe model."""
    model = Transformer(file, limits, Options(rope_mode=ROPE_NEOX, qk_norm=True))
    for layer in range(model.h.n_layer):
        model.attention(layer)
        model.moe(layer)
    return model.finish()
