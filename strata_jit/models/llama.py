"""llama with experts (Mixtral and merges of that form): interleaved rotary pairs, no q/k norms."""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.attention import ROPE_NORM, Attention
from strata_jit.models.ffn import RoutedFfn
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.stack import stack
from strata_jit.models.transformer import Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a llama model with experts."""
    t = Transformer(file, limits)
    attention, ffn = Attention(t, rope_mode=ROPE_NORM), RoutedFfn(t)
    return stack(t, attention, ffn)
