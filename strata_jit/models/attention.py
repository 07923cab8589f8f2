"""Attention over a KV cache as a piece of a transformer: norm, q/k/v, rotation, softmax, output matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from strata_jit.kernels.registry import ROPE_NEOX, ROPE_NORM
from strata_jit.models.builder import padded
from strata_jit.models.kv_cache import KvCache
from strata_jit.models.rotary import add_rope_angles, magnitude, read_rope
from strata_jit.models.transformer import NONE, Transformer

__all__ = ["ROPE_NEOX", "ROPE_NORM", "Attention"]

QkNorm = Literal["head", "joint"]


class Attention:
    """The attention of those layers of a model that have a KV cache."""

    def __init__(
        self,
        t: Transformer,
        *,
        rope_mode: int,
        qk_norm: QkNorm | None = None,
        layers: Sequence[int] | None = None,
        windows: Mapping[int, int] | None = None,
        sinks: bool = False,
    ) -> None:
        """
        rope_mode  ROPE_NEOX (halves) or ROPE_NORM (neighbours)
        qk_norm    RMS norms of q and k before rotation: over each head, or over all heads together
        layers     layers with attention, ascending; None for all
        windows    layer -> positions that a row of it sees; every other layer sees all
        sinks      every head has a sink, a logit that takes its share of the softmax and has no value
        """
        self.t, self.rope_mode, self.qk_norm, self.sinks = t, rope_mode, qk_norm, sinks
        h, b, limits = t.h, t.b, t.limits
        self.windows = {} if windows is None else windows
        self.cache = KvCache(t, range(h.n_layer) if layers is None else layers)
        self.kv_blocks, self.kv_bytes = self.cache.n_blocks, self.cache.nbytes
        self.widths = {
            "q": h.n_head * h.head_dim,
            "k": h.n_head_kv * h.head_dim,
            "v": h.n_head_kv * h.value_dim,
        }
        self.n_out = h.n_head * h.value_dim
        self.qkv_stride = sum(padded(n) for n in self.widths.values())
        self.qkv = b.buffer("qkv", limits.max_rows * self.qkv_stride)
        self.merge_scratch = b.scratch(4 * self.n_out)
        rope = read_rope(t.file, h.n_rot)
        self.angles = add_rope_angles(t, rope, magnitude(rope))

    def add(self, layer: int) -> None:
        """Append a layer's attention, onto the residual stream."""
        t, blk = self.t, f"blk.{layer}."
        offsets = self._project(blk)
        self._attend(layer, offsets)
        output = t.b.matrix(f"{blk}attn_output.weight", self.n_out, t.h.n_embd)
        merged = t.act("attn_act", self.n_out, [output])
        sinks = t.b.vector(f"{blk}attn_sinks.weight", t.h.n_head) if self.sinks else NONE
        write, window = t.wanted(merged, [output]), self.windows.get(layer, 0)
        self.cache.merge("attn_merge", layer, write, self.merge_scratch, window, sinks)
        bias = t.optional_bias(f"{blk}attn_output.bias", t.h.n_embd)
        scale = t.h.residual_scale
        segment = t.segment(output, merged, t.x, t.x_stride, add=True, bias=bias, scale=scale)
        t.linear(f"{blk}attn_output", merged, [segment])

    def _project(self, blk: str) -> dict[str, int]:
        """Norm and q/k/v; returns the byte offset of each in a row of the qkv buffer."""
        t, n_embd = self.t, self.t.h.n_embd
        tensors = {part: t.b.matrix(f"{blk}attn_{part}.weight", n_embd, n) for part, n in self.widths.items()}
        act = t.act("act", n_embd, list(tensors.values()))
        t.norm(f"{blk}attn_norm", f"{blk}attn_norm.weight", act, list(tensors.values()))
        offsets, offset, segments = {}, 0, []
        for part, n in self.widths.items():
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
        widths = {part: self.widths[part] if self.qk_norm == "joint" else self.t.h.head_dim for part in "qk"}
        return {part: self.t.b.vector(f"{blk}attn_{part}_norm.weight", n) for part, n in widths.items()}

    def _attend(self, layer: int, offsets: dict[str, int]) -> None:
        h, blk = self.t.h, f"blk.{layer}."
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
            "value_dim": h.value_dim,
            **self.cache.place(layer),
        }
        self.t.b.op("attn_prepare", f"{blk}attn_prepare", common)
        self.cache.attend(layer, common, h.attention_scale, self.windows.get(layer, 0), prepared=False)
