"""Attention over a KV cache as a piece of a transformer: norm, q/k/v, rotation, softmax, output projection.

Owns the buffers of a step's attention, the layout of a KV slot, and the memory that KV blocks need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from strata_jit.kernels.abi import KV_BLOCK
from strata_jit.kernels.registry import ROPE_NEOX, ROPE_NORM, attention_scratch_bytes
from strata_jit.models.builder import padded
from strata_jit.models.language_model import Constant
from strata_jit.models.rotary import inverse_frequencies
from strata_jit.models.transformer import NONE, Transformer

__all__ = ["ROPE_NEOX", "ROPE_NORM", "Attention"]

QkNorm = Literal["head", "joint"]

KV_VALUE_BYTES = 2 * 2
"""Bytes of a key's and a value's element in the cache: f16 each."""


class Attention:
    """The attention of those layers of a model that have a KV cache."""

    def __init__(
        self,
        t: Transformer,
        *,
        rope_mode: int,
        qk_norm: QkNorm | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        """
        rope_mode  ROPE_NEOX (halves) or ROPE_NORM (neighbours)
        qk_norm    RMS norms of q and k before rotation: over each head, or over all heads together
        layers     layers with attention, ascending; None for all
        """
        self.t, self.rope_mode, self.qk_norm = t, rope_mode, qk_norm
        h, b, limits = t.h, t.b, t.limits
        self.layers = tuple(range(h.n_layer) if layers is None else layers)
        self.n_q, self.n_kv = h.n_head * h.head_dim, h.n_head_kv * h.head_dim
        self.kv_blocks = math.ceil(limits.n_ctx / KV_BLOCK)
        self.layer_bytes = self.n_kv * KV_BLOCK * KV_VALUE_BYTES
        self.slot_bytes = len(self.layers) * self.layer_bytes
        self.qkv_stride = 2 * padded(self.n_kv) + padded(self.n_q)
        self.qkv = b.buffer("qkv", limits.max_rows * self.qkv_stride)
        partial = limits.max_rows * h.n_head * self.kv_blocks * 4 * (8 + h.head_dim)
        self.partial = b.buffer("partial", partial)
        self.work = b.scratch(attention_scratch_bytes(h.n_head, h.n_head_kv, h.head_dim))
        self.merge_scratch = b.scratch(4 * self.n_q)
        self.angles = self._rope_angles()

    @property
    def kv_bytes(self) -> int:
        """KV memory of each node."""
        limits = self.t.limits
        return math.ceil(self.kv_blocks / limits.n_nodes) * limits.n_seq * self.slot_bytes

    def _rope_angles(self) -> int:
        h, b = self.t.h, self.t.b
        angles = b.buffer("angles", self.t.limits.max_rows * h.n_rot * 4)
        freqs = b.buffer("freqs", h.n_rot // 2 * 8)
        self.t.constants.append(Constant(freqs, inverse_frequencies(h.rope_base, h.n_rot, h.rope_factor)))
        fields = {"freqs": freqs, "angles": angles, "n_half": h.n_rot // 2, "factor": 1.0}
        b.op("rope_angles", "rope", fields)
        return angles

    def add(self, layer: int) -> None:
        """Append a layer's attention, onto the residual stream."""
        t, blk = self.t, f"blk.{layer}."
        offsets = self._project(blk)
        self._attend(layer, offsets)
        output = t.b.matrix(f"{blk}attn_output.weight", self.n_q, t.h.n_embd)
        merged = t.act("attn_act", self.n_q, [output])
        merge = {
            "partial": self.partial,
            "partial_blocks": self.kv_blocks,
            "n_head": t.h.n_head,
            "head_dim": t.h.head_dim,
            "out_scratch": self.merge_scratch,
        }
        t.b.op("attn_merge", f"{blk}attn_merge", merge | t.wanted(merged, [output]))
        bias = t.optional_bias(f"{blk}attn_output.bias", t.h.n_embd)
        segment = t.segment(output, merged, t.x, t.x_stride, add=True, bias=bias)
        t.linear(f"{blk}attn_output", merged, [segment])

    def _project(self, blk: str) -> dict[str, int]:
        """Norm and q/k/v; returns the byte offset of each in a row of the qkv buffer."""
        t, n_embd = self.t, self.t.h.n_embd
        widths = {"q": self.n_q, "k": self.n_kv, "v": self.n_kv}
        tensors = {part: t.b.matrix(f"{blk}attn_{part}.weight", n_embd, n) for part, n in widths.items()}
        act = t.act("act", n_embd, list(tensors.values()))
        t.norm(f"{blk}attn_norm", f"{blk}attn_norm.weight", act, list(tensors.values()))
        offsets, offset, segments = {}, 0, []
        for part, n in widths.items():
            bias = t.optional_bias(f"{blk}attn_{part}.bias", n)
            segments.append(t.segment(tensors[part], act, self.qkv, self.qkv_stride, offset, bias=bias))
            offsets[part] = offset
            offset += padded(n)
        t.linear(f"{blk}attn_qkv", act, segments)
        return offsets

    def _norms(self, blk: str) -> dict[str, int]:
        """Norm of q and of k."""
        if self.qk_norm is None:
            return {"q": NONE, "k": NONE}
        widths = {"q": self.n_q, "k": self.n_kv}
        if self.qk_norm == "head":
            widths = dict.fromkeys(widths, self.t.h.head_dim)
        return {part: self.t.b.vector(f"{blk}attn_{part}_norm.weight", n) for part, n in widths.items()}

    def _attend(self, layer: int, offsets: dict[str, int]) -> None:
        t, h, blk = self.t, self.t.h, f"blk.{layer}."
        norms = self._norms(blk)
        common = {
            "qkv": self.qkv,
            "qkv_stride": self.qkv_stride,
            "q_off": offsets["q"],
            "k_off": offsets["k"],
            "v_off": offsets["v"],
            "q_norm": norms["q"],
            "k_norm": norms["k"],
            "eps": h.eps,
            "angles": self.angles,
            "n_rot": h.n_rot,
            "rope_mode": self.rope_mode,
            "n_head": h.n_head,
            "n_head_kv": h.n_head_kv,
            "head_dim": h.head_dim,
            "layer_off": self.layers.index(layer) * self.layer_bytes,
            "slot_bytes": self.slot_bytes,
            "work_scratch": self.work,
        }
        t.b.op("attn_prepare", f"{blk}attn_prepare", common)
        partial = {"partial": self.partial, "partial_blocks": self.kv_blocks, "scale": h.attention_scale}
        t.b.op("attention", f"{blk}attention", common | partial)
