"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as a piece of a transformer, in absorbed form.

A position is cached once for all heads: its normed latent, and one rotated part of a key. A head's k_b takes
its query to the latents, its v_b takes its weighted sum of latents to its output; keys and values of the
heads are never formed.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata_jit.errors import ModelError
from strata_jit.models.builder import Act, padded
from strata_jit.models.hparams import positive_multiple
from strata_jit.models.kv_cache import KvCache
from strata_jit.models.rotary import Rope, add_rope_angles
from strata_jit.models.transformer import NONE, Transformer


class MlaAttention:
    """The attention of all layers of a model."""

    def __init__(self, t: Transformer, rope: Rope, *, rope_factor: float, scale: float) -> None:
        """
        rope_factor  magnitude of cosines and sines
        scale        factor of the scores
        """
        self.t, self.scale = t, scale
        h, arch = t.h, t.h.arch
        self.n_latent = t.file.get(f"{arch}.attention.kv_lora_rank", int)
        self.n_q_latent = t.file.get(f"{arch}.attention.q_lora_rank", int, 0)
        self.n_query, self.n_value = mla_lengths(t)
        self.n_nope = self.n_query - h.n_rot
        self._check()
        self.cache = KvCache(t, range(h.n_layer))
        self.kv_blocks, self.kv_bytes = self.cache.n_blocks, self.cache.nbytes
        self.q_latent, self.q_latent_stride = self._rows("q_latent", self.n_q_latent)
        self.q, self.q_stride = self._rows("q", h.n_head * self.n_query)
        self.kv, self.kv_stride = self._rows("kv", h.head_dim)
        self.queries, self.queries_stride = self._rows("queries", h.n_head * h.head_dim)
        self.outputs, self.outputs_stride = self._rows("head_outputs", h.n_head * self.n_value)
        widest = max(self.n_q_latent, self.n_latent, h.n_head * self.n_value)
        self.row_scratch = t.b.scratch(4 * widest)
        self.k_b = self._head_matrices("attn_k_b", self.n_nope, self.n_latent)
        self.v_b = self._head_matrices("attn_v_b", self.n_latent, self.n_value)
        self.nope_act = self._head_act("nope_act", self.n_nope, self.k_b)
        self.latent_act = self._head_act("latent_act", self.n_latent, self.v_b)
        self.angles = add_rope_angles(t, rope, rope_factor).buffer

    def _check(self) -> None:
        """The cached head must be what the absorbed form caches, and all parts whole octets."""
        h = self.t.h
        expected = {
            "attention.head_count_kv": (h.n_head_kv, 1),
            "attention.key_length": (h.head_dim, self.n_latent + h.n_rot),
            "attention.value_length": (h.value_dim, self.n_latent),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise self._fault(name, found, f"{wanted}, as kv_lora_rank and rope.dimension_count say")
        multiples = {
            "rope.dimension_count": h.n_rot,
            "attention.kv_lora_rank": self.n_latent,
            "attention.key_length_mla": self.n_nope,
            "attention.value_length_mla": self.n_value,
        }
        for name, n in multiples.items():
            if n <= 0 or n % 8:
                raise self._fault(name, n, "a length whose parts are positive multiples of 8")

    def _fault(self, name: str, found: int, expected: str) -> ModelError:
        return ModelError.at(self.t.file.path, f"{self.t.h.arch}.{name}", str(found), expected)

    def _rows(self, name: str, n: int) -> tuple[int, int]:
        """(buffer, stride) of float32[n] for every row of a step."""
        return self.t.b.buffer(name, self.t.limits.max_rows * padded(n)), padded(n)

    def _head_matrices(self, name: str, n_cols: int, n_rows: int) -> list[int]:
        """A tensor for each layer, which has a matrix for each head."""
        layers, n_head = range(self.t.h.n_layer), self.t.h.n_head
        return [self.t.b.experts(f"blk.{i}.{name}.weight", n_cols, n_rows, n_head) for i in layers]

    def _head_act(self, name: str, n_cols: int, tensors: Sequence[int]) -> Act:
        """Activation rows for every (row, head), in the shared buffer only."""
        kinds = {self.t.b.act_kind(tensor) for tensor in tensors}
        return self.t.b.act(name, n_cols, kinds, self.t.limits.max_rows * self.t.h.n_head, rows_one=0)

    # --- a layer's ops ------------------------------------------------------------------------------------

    def add(self, layer: int) -> None:
        """Append a layer's attention, onto the residual stream."""
        self._project(f"blk.{layer}.")
        self._prepare(layer)
        self._queries_and_cache(layer)
        self._output(layer)

    def _project(self, blk: str) -> None:
        """Norm, the row's latent and rotated key part, and q, from the row or from a latent of its own."""
        t, h = self.t, self.t.h
        n_q = h.n_head * self.n_query
        first, n_first = ("attn_q_a", self.n_q_latent) if self.n_q_latent else ("attn_q", n_q)
        q = t.b.matrix(f"{blk}{first}.weight", h.n_embd, n_first)
        kv = t.b.matrix(f"{blk}attn_kv_a_mqa.weight", h.n_embd, h.head_dim)
        act = t.act("act", h.n_embd, [q, kv])
        t.norm(f"{blk}attn_norm", f"{blk}attn_norm.weight", act, [q, kv])
        out = (self.q_latent, self.q_latent_stride) if self.n_q_latent else (self.q, self.q_stride)
        segments = [t.segment(q, act, *out), t.segment(kv, act, self.kv, self.kv_stride)]
        t.linear(f"{blk}attn_q_kv", act, segments)
        if self.n_q_latent:
            q_b = t.b.matrix(f"{blk}attn_q_b.weight", self.n_q_latent, n_q)
            latent = t.act("q_act", self.n_q_latent, [q_b])
            norm = t.b.vector(f"{blk}attn_q_a_norm.weight", self.n_q_latent)
            self._quantise(f"{blk}attn_q_a_norm", out, self.n_q_latent, norm, latent, [q_b])
            t.linear(f"{blk}attn_q_b", latent, [t.segment(q_b, latent, self.q, self.q_stride)])

    def _quantise(
        self, label: str, x: tuple[int, int], n: int, norm: int, act: Act, tensors: Sequence[int]
    ) -> None:
        """Rows of a buffer, normed unless `norm` is NONE, to activation rows."""
        source = {"x": x[0], "x_stride": x[1], "weight": norm, "n": n, "eps": self.t.h.eps, "gather": 0}
        write = self.t.wanted(act, tensors)
        self.t.b.op("norm_quant", label, {**source, "tmp_scratch": self.row_scratch, **write})

    def _prepare(self, layer: int) -> None:
        t, h, blk = self.t, self.t.h, f"blk.{layer}."
        fields = {
            "q": self.q,
            "q_stride": self.q_stride,
            "n_head": h.n_head,
            "n_nope": self.n_nope,
            "n_rot": h.n_rot,
            "queries": self.queries,
            "queries_stride": self.queries_stride,
            "kv": self.kv,
            "kv_stride": self.kv_stride,
            "n_latent": self.n_latent,
            "kv_norm": t.b.vector(f"{blk}attn_kv_a_norm.weight", self.n_latent),
            "eps": h.eps,
            "angles": self.angles,
            **self.cache.place(layer),
        }
        t.b.op("mla_prepare", f"{blk}mla_prepare", fields | t.wanted(self.nope_act, [self.k_b[layer]]))

    def _queries_and_cache(self, layer: int) -> None:
        """Queries to the latents, attention, and the heads' sums of latents as activation rows."""
        h, blk = self.t.h, f"blk.{layer}."
        to_queries = (self.queries, self.queries_stride, 4 * h.head_dim)
        self._head_linear(f"{blk}attn_k_b", self.k_b[layer], self.nope_act, *to_queries)
        queries = {
            "qkv": self.queries,
            "qkv_stride": self.queries_stride,
            **dict.fromkeys(("q_off", "k_off", "v_off"), 0),
            "q_stride": 4 * h.head_dim,
            "q_norm": NONE,
            "k_norm": NONE,
            "eps": h.eps,
            "angles": self.angles,
            "n_rot": h.n_rot,
            "rope_mode": 0,
            "n_head": h.n_head,
            "n_head_kv": 1,
            "head_dim": h.head_dim,
            "value_dim": h.value_dim,
            **self.cache.place(layer),
        }
        self.cache.attend(layer, queries, self.scale, 0, prepared=True)
        write = self.t.wanted(self.latent_act, [self.v_b[layer]])
        self.cache.merge("attn_merge_heads", layer, write, self.row_scratch, 0)

    def _output(self, layer: int) -> None:
        t, h, blk = self.t, self.t.h, f"blk.{layer}."
        outputs, n = (self.outputs, self.outputs_stride), h.n_head * self.n_value
        self._head_linear(f"{blk}attn_v_b", self.v_b[layer], self.latent_act, *outputs, 4 * self.n_value)
        output = t.b.matrix(f"{blk}attn_output.weight", n, h.n_embd)
        act = t.act("attn_act", n, [output])
        self._quantise(f"{blk}attn_quant", outputs, n, NONE, act, [output])
        t.linear(f"{blk}attn_output", act, [t.segment(output, act, t.x, t.x_stride, add=True)])

    def _head_linear(
        self, label: str, tensor: int, act: Act, out: int, stride: int, head_stride: int
    ) -> None:
        """A matrix for each head, from activation rows of `_head_act` to float32 rows."""
        b = self.t.b
        fields = {
            "act_shared": act.shared,
            "act_stride": act.stride,
            "act_off": act.offsets[b.act_kind(tensor)],
            "tensor": tensor,
            "n_head": self.t.h.n_head,
            "out": out,
            "out_stride": stride,
            "head_stride": head_stride,
            "tmp_scratch": self.t.tile_scratch,
        }
        b.op("head_linear", label, fields)


def mla_lengths(t: Transformer) -> tuple[int, int]:
    """(key length, value length) of a head before absorption; ModelError for a file without them."""
    arch = t.h.arch
    if t.b.has("blk.0.attn_kv_b.weight") and not t.b.has("blk.0.attn_k_b.weight"):
        raise ModelError.at(
            t.file.path,
            "tensor blk.0.attn_kv_b.weight",
            "an older form of the file, with keys and values in one tensor",
            "attn_k_b and attn_v_b; convert the model again",
        )
    return (
        positive_multiple(t.file, f"{arch}.attention.key_length_mla"),
        positive_multiple(t.file, f"{arch}.attention.value_length_mla"),
    )
