"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, a weighted shared expert."""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.attention import ROPE_NEOX, Attention
from strata_jit.models.delta_net import DeltaNet, recurrent_layers
from strata_jit.models.ffn import FFN_FEATURES, RoutedFfn
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.transformer import Transformer


def build(file: GGUFFile, limits: StepLimits, *, tiled: bool = False) -> LanguageModel:
    """The step program of a qwen3next model.

    tiled  v heads are stored in the order that `DeltaNet` calls tiled
    """
    t = Transformer(file, limits, FFN_FEATURES)
    recurrent = recurrent_layers(file, t.h)
    others = [layer for layer in range(t.h.n_layer) if layer not in recurrent]
    attention = Attention(t, rope_mode=ROPE_NEOX, qk_norm="head", layers=others, gated=True)
    delta_net, ffn = DeltaNet(t, recurrent, tiled=tiled), RoutedFfn(t, norm="post_attention_norm")
    for layer in range(t.h.n_layer):
        (delta_net if layer in recurrent else attention).add(layer)
        ffn.add(layer)
    return t.finish(
        kv_blocks=attention.kv_blocks,
        kv_bytes=attention.kv_bytes,
        state_bytes=delta_net.state_bytes,
        skipped=ffn.skipped,
    )
