"""OLMoE: rotary halves, norms of q and k over all heads together, weights of the softmax as they are."""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.attention import ROPE_NEOX, Attention
from strata_jit.models.ffn import RoutedFfn
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.stack import stack
from strata_jit.models.transformer import Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of an olmoe model."""
    t = Transformer(file, limits)
    attention = Attention(t, rope_mode=ROPE_NEOX, qk_norm="joint")
    ffn = RoutedFfn(t, norm_w=False)
    return stack(t, attention, ffn)
