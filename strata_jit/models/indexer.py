"""The indexer of block-sparse attention (QSA) as a part of attention: what a row attends to.

Its matrices read the same activation row as q, k and v. Its keys lie in the KV slots, behind those of
attention. Owns the tensors' names and the buffers of scores and choices; arithmetic: `kernels/indexer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from strata_jit.errors import ModelError
from strata_jit.kernels.abi import KV_BLOCK
from strata_jit.kernels.registry import index_block_bytes, index_scratch_bytes
from strata_jit.models.builder import Act, padded
from strata_jit.models.hparams import positive_multiple, whole_numbers
from strata_jit.models.rotary import Angles
from strata_jit.models.transformer import Transformer

RATIOS = (4, 8, 16, 32)
"""Positions of an index block: a word has a bit for each block of a KV block, an octet of keys is of one."""


class Indexer:
    """The indexer of a model's attention layers."""

    def __init__(self, t: Transformer, layers: Sequence[int]) -> None:
        self.t = t
        h, b, n_rows, n_kv_blocks = t.h, t.b, t.limits.max_rows, math.ceil(t.limits.n_ctx / KV_BLOCK)
        key = f"{h.arch}.attention.indexer"
        self.n_head = positive_multiple(t.file, f"{key}.head_count")
        self.head_dim = positive_multiple(t.file, f"{key}.key_length", 8)
        self.ratio = self._ratio(layers)
        self.n_best = positive_multiple(t.file, f"{key}.top_k", self.ratio) // self.ratio
        if h.n_rot > self.head_dim:
            raise ModelError.at(t.file.path, f"{key}.key_length", str(self.head_dim), f"{h.n_rot} or more")
        self.widths = {"q": self.n_head * self.head_dim, "k": self.head_dim}
        self.block_bytes = index_block_bytes(self.head_dim, self.ratio)
        """Bytes of a layer's index keys in a KV slot."""
        self.stride = sum(padded(n) for n in self.widths.values())
        self.qk = b.buffer("index_qk", n_rows * self.stride)
        self.work = b.scratch(index_scratch_bytes(self.n_head, self.head_dim, h.n_rot))
        self.scores_stride = 4 * n_kv_blocks * KV_BLOCK // self.ratio
        self.scores = {
            "scores": b.buffer("index_scores", n_rows * self.scores_stride),
            "scores_stride": self.scores_stride,
        }
        self.select = {
            "mask_scratch": b.scratch(8 * n_kv_blocks),
            "mask": b.buffer("index_mask", n_rows * 8 * n_kv_blocks),
            "mask_stride": 8 * n_kv_blocks,
            "ratio": self.ratio,
        }
        """Fields of an op that reads the choice."""

    def inputs(self, layer: int) -> list[int]:
        """The matrices that read a layer's input row."""
        b, n_embd = self.t.b, self.t.h.n_embd
        return [
            b.matrix(f"blk.{layer}.indexer.{part}_proj.weight", n_embd, n) for part, n in self.widths.items()
        ]

    def segments(self, layer: int, act: Act) -> list[dict[str, float]]:
        """The matrices of `inputs` as parts of a `linear`."""
        offsets = (0, padded(self.widths["q"]))
        return [
            self.t.segment(tensor, act, self.qk, self.stride, offset)
            for tensor, offset in zip(self.inputs(layer), offsets, strict=True)
        ]

    def prepare(self, layer: int, angles: Angles, place: Mapping[str, int]) -> None:
        """Append what needs no other row's keys; the op after it must end with a barrier.

        place  layer_off and slot_bytes of the index keys
        """
        self.t.b.op("index_prepare", f"blk.{layer}.index_prepare", self._common(layer, angles, place))

    def choose(self, layer: int, angles: Angles, place: Mapping[str, int]) -> None:
        """Append scores and choice, after that barrier."""
        op, blk = self.t.b.op, f"blk.{layer}."
        op("index_score", f"{blk}index_score", self._common(layer, angles, place) | self.scores)
        op("index_select", f"{blk}index_select", self.scores | self.select | {"n_best": self.n_best})

    def _common(self, layer: int, angles: Angles, place: Mapping[str, int]) -> dict[str, float]:
        h, b = self.t.h, self.t.b
        q_norm, k_norm = (b.vector(f"blk.{layer}.indexer.{p}_norm.weight", self.head_dim) for p in "qk")
        return {
            "index_qk": self.qk,
            "index_stride": self.stride,
            "index_q_off": 0,
            "index_k_off": padded(self.widths["q"]),
            "q_norm": q_norm,
            "k_norm": k_norm,
            "eps": h.eps,
            "angles": angles.buffer,
            "freqs": angles.freqs,
            "angle_factor": angles.factor,
            "n_rot": h.n_rot,
            "n_head": self.n_head,
            "head_dim": self.head_dim,
            "ratio": self.ratio,
            "n_best": self.n_best,
            "work_scratch": self.work,
            **place,
        }

    def _ratio(self, layers: Sequence[int]) -> int:
        """The one ratio of all layers with attention."""
        file, key = self.t.file, f"{self.t.h.arch}.attention.compress_ratios"
        ratios = whole_numbers(file, key)
        if len(ratios) < self.t.h.n_layer:
            raise ModelError.at(file.path, key, f"{len(ratios)} items", f"one for each of {self.t.h.n_layer}")
        found = {int(ratios[layer]) for layer in layers}
        if len(found) != 1 or not found <= set(RATIOS):
            expected = f"one of {', '.join(map(str, RATIOS))}, the same in all layers with attention"
            raise ModelError.at(file.path, key, ", ".join(map(str, sorted(found))), expected)
        return found.pop()
