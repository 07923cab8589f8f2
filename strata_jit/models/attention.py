"""Attention over a KV cache as a piece of a transformer: norm, q/k/v, rotation, softmax, output matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from strata_jit.kernels.registry import ROPE_NEOX, ROPE_NORM
from strata_jit.models.builder import Act, Target, padded
from strata_jit.models.indexer import Indexer
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
        gated: bool = False,
        sparse: bool = False,
        target: Target | None = None,
    ) -> None:
        """
        rope_mode  ROPE_NEOX (halves) or ROPE_NORM (neighbours)
        qk_norm    RMS norms of q and k before rotation: over each head, or over all heads together
        layers     layers with attention, ascending; None for all
        windows    layer -> positions that a row of it sees; every other layer sees all
        sinks      every head has a sink, a logit that takes its share of the softmax and has no value
        gated      attn_q has, behind each head's query, a gate: its sigmoid is a factor of the head's output
        sparse     an indexer chooses the positions that a row sees
        target     where the result goes; None: it is added to the residual stream, times `h.residual_scale`
        """
        self.t, self.rope_mode, self.qk_norm, self.sinks, self.gated = t, rope_mode, qk_norm, sinks, gated
        h, b, limits = t.h, t.b, t.limits
        self.target = target or t.residual
        self.windows = {} if windows is None else windows
        layers = range(h.n_layer) if layers is None else layers
        self.indexer = Indexer(t, layers) if sparse else None
        self.select = self.indexer.select if self.indexer else None
        self.cache = KvCache(t, layers, self.indexer.block_bytes if self.indexer else 0)
        self.kv_blocks, self.kv_bytes = self.cache.n_blocks, self.cache.nbytes
        self.query_rows = 2 * h.head_dim if gated else h.head_dim
        self.widths = {
            "q": h.n_head * self.query_rows,
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
        """Append a layer: norm of the residual stream, and the attention."""
        self.t.normed(self, layer, "attn_norm")

    def inputs(self, layer: int) -> list[int]:
        """The matrices that read the layer's input: whoever writes it writes their kinds of activation."""
        return [*self._qkv_matrices(layer), *(self.indexer.inputs(layer) if self.indexer else ())]

    def _qkv_matrices(self, layer: int) -> list[int]:
        b, n_embd = self.t.b, self.t.h.n_embd
        return [b.matrix(f"blk.{layer}.attn_{part}.weight", n_embd, n) for part, n in self.widths.items()]

    def run(self, layer: int, act: Act) -> None:
        """Append a layer's attention alone, of activation rows [n_embd] in the kinds of `inputs`."""
        t, blk = self.t, f"blk.{layer}."
        offsets = self._project(layer, act)
        self._attend(layer, offsets)
        output = t.b.matrix(f"{blk}attn_output.weight", self.n_out, t.h.n_embd)
        merged = t.act("attn_act", self.n_out, [output])
        sinks = t.b.vector(f"{blk}attn_sinks.weight", t.h.n_head) if self.sinks else NONE
        write, window = t.wanted(merged, [output]), self.windows.get(layer, 0)
        gate = self._gate(offsets["q"]) if self.gated else None
        self.cache.merge("attn_merge", layer, write, self.merge_scratch, window, sinks, gate, self.select)
        bias = t.optional_bias(f"{blk}attn_output.bias", t.h.n_embd)
        t.linear(f"{blk}attn_output", merged, [t.segment_to(self.target, output, merged, bias=bias)])

    def _gate(self, q_off: int) -> dict[str, int]:
        """Where the gates are: behind the queries."""
        head = 4 * self.t.h.head_dim
        place = {"gate_off": q_off + head, "gate_head": 4 * self.query_rows}
        return {"gate": self.qkv, "gate_row": self.qkv_stride} | place

    def _project(self, layer: int, act: Act) -> dict[str, int]:
        """q, k and v; returns the byte offset of each in a row of the qkv buffer."""
        t, blk = self.t, f"blk.{layer}."
        offsets, offset, segments = {}, 0, []
        for tensor, (part, n) in zip(self._qkv_matrices(layer), self.widths.items(), strict=True):
            bias = t.optional_bias(f"{blk}attn_{part}.bias", n)
            segments.append(t.segment(tensor, act, self.qkv, self.qkv_stride, offset, bias=bias))
            offsets[part] = offset
            offset += padded(n)
        if self.indexer:
            segments += self.indexer.segments(layer, act)
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
            "q_stride": 4 * self.query_rows,
            "k_off": offsets["k"],
            "v_off": offsets["v"],
            "q_norm": norms["q"],
            "k_norm": norms["k"],
            "eps": h.eps,
            "angles": self.angles.buffer,
            "n_rot": h.n_rot,
            "rope_mode": self.rope_mode,
            "n_head": h.n_head,
            "n_head_kv": h.n_head_kv,
            "head_dim": h.head_dim,
            "value_dim": h.value_dim,
            **self.cache.place(layer),
        }
        if self.indexer:
            self.indexer.prepare(layer, self.angles, self.cache.extra_place(layer))
        self.t.b.op("attn_prepare", f"{blk}attn_prepare", common)
        if self.indexer:
            self.indexer.choose(layer, self.angles, self.cache.extra_place(layer))
        window = self.windows.get(layer, 0)
        self.cache.attend(layer, common, h.attention_scale, window, prepared=False, select=self.select)
