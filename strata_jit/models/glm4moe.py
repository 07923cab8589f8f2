"""GLM-4.5: dense layers first, sigmoid router with a selection bias, half of each head rotated."""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.registry import ROUTE_SIGMOID
from strata_jit.models.attention import ROPE_NEOX, Attention
from strata_jit.models.ffn import FFN_FEATURES, RoutedFfn
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.stack import stack
from strata_jit.models.transformer import Transformer


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a glm4moe model."""
    t = Transformer(file, limits, FFN_FEATURES)
    has_norms = t.b.has("blk.0.attn_q_norm.weight")
    attention = Attention(t, rope_mode=ROPE_NEOX, qk_norm="head" if has_norms else None)
    ffn = RoutedFfn(t, gating=ROUTE_SIGMOID, norm_w=t.h.expert_weights_norm, norm="post_attention_norm")
    return stack(t, attention, ffn)
