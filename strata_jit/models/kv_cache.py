"""Keys and values of a model's attention layers, and the ops that read them: scores, softmax, merge.

Owns the layout of a KV slot, the memory that KV blocks need, and the buffers of partial results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from strata_jit.kernels.abi import KV_BLOCK
from strata_jit.kernels.registry import attention_scratch_bytes
from strata_jit.models.transformer import NONE, Transformer

KV_ELEMENT_BYTES = 2
"""An element of a key or value in the cache: f16."""


class KvCache:
    """The cache of those layers that have one; all have the same heads."""

    def __init__(self, t: Transformer, layers: Sequence[int], extra_bytes: int = 0) -> None:
        """`extra_bytes`: of each layer in a slot, behind its keys and values."""
        h, b, limits = t.h, t.b, t.limits
        self.t, self.layers = t, tuple(layers)
        self.n_blocks = math.ceil(limits.n_ctx / KV_BLOCK)
        self.own_bytes = h.n_head_kv * (h.head_dim + h.value_dim) * KV_BLOCK * KV_ELEMENT_BYTES
        self.layer_bytes = self.own_bytes + extra_bytes
        self.slot_bytes = len(self.layers) * self.layer_bytes
        partial = limits.max_rows * h.n_head * self.n_blocks * 4 * (8 + h.value_dim)
        self.partial = b.buffer("partial", partial)
        self.work = b.scratch(attention_scratch_bytes(h.n_head, h.n_head_kv, h.head_dim))

    @property
    def _all(self) -> dict[str, int]:
        """Fields that select everything."""
        return {"mask_scratch": 0, "mask": self.partial, "mask_stride": 0, "ratio": 0}

    @property
    def nbytes(self) -> int:
        """KV memory of each node."""
        limits = self.t.limits
        return math.ceil(self.n_blocks / limits.n_nodes) * limits.n_seq * self.slot_bytes

    def place(self, layer: int) -> dict[str, int]:
        """Fields of an op that writes or reads a layer's keys and values."""
        return {
            "layer_off": self.layers.index(layer) * self.layer_bytes,
            "slot_bytes": self.slot_bytes,
            "work_scratch": self.work,
        }

    def extra_place(self, layer: int) -> dict[str, int]:
        """Fields of an op that writes or reads what lies behind a layer's keys and values."""
        off = self.layers.index(layer) * self.layer_bytes + self.own_bytes
        return {"layer_off": off, "slot_bytes": self.slot_bytes}

    def attend(
        self,
        layer: int,
        queries: Mapping[str, float],
        scale: float,
        window: int,
        *,
        prepared: bool,
        select: Mapping[str, int] | None = None,
    ) -> None:
        """Append the scores and partial results of a layer.

        queries   fields of `attn_prepare`
        scale     factor of the scores
        window    positions that a row sees, 0 for all
        prepared  an op before has prepared q, k and v at one row too
        select    fields that say what an indexer has selected; None: all is seen
        """
        score = {"scale": scale, "window": window, "prepared": int(prepared), **(select or self._all)}
        partial = {"partial": self.partial, "partial_blocks": self.n_blocks}
        self.t.b.op("attention", f"blk.{layer}.attention", {**queries, **partial, **score})

    def merge(
        self,
        op: str,
        layer: int,
        write: Mapping[str, int],
        scratch: int,
        window: int,
        sinks: int = NONE,
        gate: Mapping[str, int] | None = None,
        select: Mapping[str, int] | None = None,
    ) -> None:
        """Append `attn_merge` or `attn_merge_heads`, into the activation rows of `write`.

        scratch  offset of float32[n_head * value_dim], or of one head's
        gate     fields that say where the gates of the output are
        select   as for `attend`
        """
        no_gate = {"gate": self.partial, "gate_row": 0, "gate_off": NONE, "gate_head": 0}
        fields = {
            "partial": self.partial,
            "partial_blocks": self.n_blocks,
            "n_head": self.t.h.n_head,
            "value_dim": self.t.h.value_dim,
            "window": window,
            "sinks": sinks,
            "out_scratch": scratch,
        }
        options = {**(gate or no_gate), **(select or self._all)}
        self.t.b.op(op, f"blk.{layer}.attn_merge", fields | dict(write) | options)
