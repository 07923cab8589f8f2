"""llama with experts (Mixtral and merges of that form): interleaved rotary pairs, no q/k norms."""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.transformer import ROPE_NORM, Options, Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a llama model with experts."""
    model = Transformer(file, limits, Options(rope_mode=ROPE_NORM))
    for layer in range(model.h.n_layer):
        model.attention(layer)
        model.moe(layer)
    return model.finish()
