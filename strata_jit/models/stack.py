"""A transformer whose layers are all alike: attention, then the feed-forward."""

from __future__ import annotations

from typing import Protocol

from strata_jit.models.ffn import RoutedFfn
from strata_jit.models.language_model import LanguageModel
from strata_jit.models.transformer import Transformer


class LayerAttention(Protocol):
    """Attention of any kind, with the KV memory that it needs."""

    kv_blocks: int
    kv_bytes: int

    def add(self, layer: int) -> None:
        """Append a layer's attention."""


def stack(t: Transformer, attention: LayerAttention, ffn: RoutedFfn) -> LanguageModel:
    """Every layer of `t`, and the end of the model."""
    for layer in range(t.h.n_layer):
        attention.add(layer)
        ffn.add(layer)
    return t.finish(kv_blocks=attention.kv_blocks, kv_bytes=attention.kv_bytes, skipped=ffn.skipped)
