"""Qwen4 (experimental): hyper-connections, an n-gram embedding, delta nets, and block-sparse gated attention.

The mixers are those of Qwen3.5, but for the delta net's output gate, which is a sigmoid, and the indexer that
chooses what full attention sees. Positions of text are the same in all sections of its rotary embedding.
"""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.attention import ROPE_NEOX, Attention
from strata_jit.models.delta_net import GATE_SIGMOID, DeltaNet, recurrent_layers
from strata_jit.models.ffn import FFN_FEATURES, RoutedFfn
from strata_jit.models.hyper import HyperTransformer
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.ngram import NgramEmbedding


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a qwen4exp model."""
    t = HyperTransformer(file, limits, FFN_FEATURES)
    recurrent = recurrent_layers(file, t.h)
    others = [layer for layer in range(t.h.n_layer) if layer not in recurrent]
    attention = Attention(t, rope_mode=ROPE_NEOX, qk_norm="head", layers=others, gated=True, sparse=True)
    delta_net = DeltaNet(t, recurrent, tiled=True, z_mode=GATE_SIGMOID)
    ngram, ffn = NgramEmbedding(t), RoutedFfn(t)
    for layer in range(t.h.n_layer):
        ngram.add(layer)
        mixer = delta_net if layer in recurrent else attention
        mixer.run(layer, t.mix(f"blk.{layer}.hc_attn", mixer.inputs(layer)))
        ffn.run(layer, t.mix(f"blk.{layer}.hc_ffn", ffn.inputs(layer)))
    return t.finish(
        kv_blocks=attention.kv_blocks,
        kv_bytes=attention.kv_bytes,
        state_bytes=delta_net.state_bytes,
        skipped=ffn.skipped,
        ngram=ngram.table,
    )
