"""Pieces that families of MoE transformers share: attention, experts, head, rotary frequencies.

Each piece appends ops to a builder. The residual stream `x` is the only state between pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.abi import KV_BLOCK, STEP_N_OUT, STEP_N_ROWS
from strata_jit.kernels.registry import (
    ROPE_NEOX,
    ROPE_NORM,
    attention_scratch_bytes,
)
from strata_jit.kernels.scratch import tmp_scratch_bytes
from strata_jit.models.builder import Act, Count, ProgramBuilder, padded
from strata_jit.models.experts import Experts
from strata_jit.models.hparams import Hparams, read_hparams
from strata_jit.models.language_model import Constant, LanguageModel, StepLimits

__all__ = ["ROPE_NEOX", "ROPE_NORM", "Transformer", "inverse_frequencies"]

NONE = -1
"""No tensor, for an optional field."""


def inverse_frequencies(base: float, n_rot: int, factor: float) -> NDArray[np.float64]:
    """float64[n_rot / 2]: base ** (-2 i / n_rot) / factor, correctly rounded on every machine.

    By decimal arithmetic: libm's pow may differ in the last bit from CPU to CPU.
    """
    with localcontext() as context:
        context.prec = 40
        exponents = (Decimal(-2 * i) / Decimal(n_rot) for i in range(n_rot // 2))
        return np.array([float(Decimal(base) ** e / Decimal(factor)) for e in exponents])


@dataclass(frozen=True, slots=True)
class Options:
    """Where families differ."""

    rope_mode: int
    qk_norm: bool = False


class Transformer:
    """Builds the program of one model: `layers`, then `finish`."""

    def __init__(self, file: GGUFFile, limits: StepLimits, options: Options) -> None:
        self.h: Hparams = read_hparams(file)
        self.file, self.limits, self.options = file, limits, options
        self.b = ProgramBuilder(file, reference=limits.reference)
        h, rows = self.h, limits.max_rows
        self.n_q, self.n_kv = h.n_head * h.head_dim, h.n_head_kv * h.head_dim
        self.kv_blocks = math.ceil(limits.n_ctx / KV_BLOCK)
        self.slot_bytes = h.n_layer * h.n_head_kv * KV_BLOCK * 2 * 2 * h.head_dim
        self.x_stride = padded(h.n_embd)
        self.x = self.b.buffer("x", rows * self.x_stride)
        self.qkv_stride = 2 * padded(self.n_kv) + padded(self.n_q)
        self.qkv = self.b.buffer("qkv", rows * self.qkv_stride)
        self.partial = self.b.buffer("partial", rows * h.n_head * self.kv_blocks * 4 * (8 + h.head_dim))
        self.angles = self.b.buffer("angles", rows * h.n_rot * 4)
        self.freqs = self.b.buffer("freqs", h.n_rot // 2 * 8)
        self.work = self.b.scratch(attention_scratch_bytes(h.n_head, h.n_head_kv, h.head_dim))
        self.row_scratch = self.b.scratch(4 * max(self.n_q, h.n_embd))
        self.tile_scratch = self.b.scratch(tmp_scratch_bytes())
        self.n_ff_exp = file.tensor("blk.0.ffn_gate_exps.weight").n_rows
        self.experts = Experts(
            self.b, h.n_expert, h.n_expert_used, h.n_embd, self.n_ff_exp, rows, self.tile_scratch
        )
        self.skipped = self.b.buffer("skipped", 8) if limits.route_tail_skip else None
        self._acts: dict[str, Act] = {}
        self.b.op(
            "rope_angles",
            "rope",
            {"freqs": self.freqs, "angles": self.angles, "n_half": h.n_rot // 2, "factor": 1.0},
        )

    # --- pieces -------------------------------------------------------------------------------------------

    def act(self, name: str, n_cols: int, tensors: Sequence[int]) -> Act:
        """The activation row `name`, wide enough for every kind that any layer may want."""
        if name not in self._acts:
            kinds = {self.b.act_kind(t) for t in tensors} if self.limits.reference else ("F32", "Q256", "Q32")
            usable = [k for k in kinds if n_cols % {"F32": 4, "Q256": 256, "Q32": 32}[k] == 0]
            self._acts[name] = self.b.act(name, n_cols, usable, self.limits.max_rows)
        return self._acts[name]

    def wanted(self, act: Act, tensors: Sequence[int]) -> dict[str, int]:
        """Fields to write `act`, with only the kinds that `tensors` read."""
        kinds = {self.b.act_kind(t) for t in tensors}
        return act.write | {f"off_{k.lower()}": NONE for k in act.offsets if k not in kinds}

    def norm(
        self, label: str, weight: str, act: Act, tensors: Sequence[int], *, gather: bool = False
    ) -> None:
        """RMS norm of the residual stream into the activation row."""
        h = self.h
        fields = {
            "x": self.x,
            "x_stride": self.x_stride,
            "weight": self.b.vector(weight, h.n_embd),
            "n": h.n_embd,
            "eps": h.eps,
            "gather": int(gather),
            "tmp_scratch": self.row_scratch,
            **self.wanted(act, tensors),
        }
        self.b.op("norm_quant", label, fields, count="out" if gather else "rows")

    def linear(
        self, label: str, act: Act, segments: Sequence[dict[str, float]], count: Count = "rows"
    ) -> None:
        """Matrices that read the same activation row; segments as `segment` gives them."""
        fields = {
            **act.read,
            "count": STEP_N_OUT if count == "out" else STEP_N_ROWS,
            "tmp_scratch": self.tile_scratch,
            "n_segments": len(segments),
        }
        self.b.op("linear", label, fields, segments, count)

    def segment(
        self,
        tensor: int,
        act: Act,
        out: int,
        stride: int,
        offset: int = 0,
        *,
        add: bool = False,
        bias: int = NONE,
    ) -> dict[str, float]:
        """One matrix of a `linear`."""
        return {
            "tensor": tensor,
            "act_off": act.offsets[self.b.act_kind(tensor)],
            "out": out,
            "out_stride": stride,
            "out_offset": offset,
            "add": int(add),
            "bias": bias,
            "scale": 1.0,
        }

    def optional_bias(self, name: str, n: int) -> int:
        """Id of a bias vector, NONE where the file has none."""
        return self.b.vector(name, n) if self.b.has(name) else NONE

    def attention(self, layer: int) -> None:
        """Norm, q/k/v, rotary attention over the KV blocks, output projection onto the residual stream."""
        h, b, blk = self.h, self.b, f"blk.{layer}."
        widths = {"q": self.n_q, "k": self.n_kv, "v": self.n_kv}
        tensors = {part: b.matrix(f"{blk}attn_{part}.weight", h.n_embd, n) for part, n in widths.items()}
        act = self.act("act", h.n_embd, list(tensors.values()))
        self.norm(f"{blk}attn_norm", f"{blk}attn_norm.weight", act, list(tensors.values()))
        offsets, offset = {}, 0
        for part, n in widths.items():
            offsets[part] = offset
            offset += padded(n)
        segments = [
            self.segment(
                tensors[part],
                act,
                self.qkv,
                self.qkv_stride,
                offsets[part],
                bias=self.optional_bias(f"{blk}attn_{part}.bias", n),
            )
            for part, n in widths.items()
        ]
        self.linear(f"{blk}attn_qkv", act, segments)
        self._attend(layer, offsets)
        output = b.matrix(f"{blk}attn_output.weight", self.n_q, h.n_embd)
        merged = self.act("attn_act", self.n_q, [output])
        b.op(
            "attn_merge",
            f"{blk}attn_merge",
            {
                "partial": self.partial,
                "partial_blocks": self.kv_blocks,
                "n_head": h.n_head,
                "head_dim": h.head_dim,
                "out_scratch": self.row_scratch,
                **self.wanted(merged, [output]),
            },
        )
        bias = self.optional_bias(f"{blk}attn_output.bias", h.n_embd)
        self.linear(
            f"{blk}attn_output",
            merged,
            [self.segment(output, merged, self.x, self.x_stride, add=True, bias=bias)],
        )

    def _attend(self, layer: int, offsets: dict[str, int]) -> None:
        h, b, blk = self.h, self.b, f"blk.{layer}."
        norms = {
            part: b.vector(f"{blk}attn_{part}_norm.weight", h.head_dim) if self.options.qk_norm else NONE
            for part in "qk"
        }
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
            "rope_mode": self.options.rope_mode,
            "n_head": h.n_head,
            "n_head_kv": h.n_head_kv,
            "head_dim": h.head_dim,
            "layer_off": layer * h.n_head_kv * KV_BLOCK * 2 * 2 * h.head_dim,
            "slot_bytes": self.slot_bytes,
            "work_scratch": self.work,
        }
        b.op("attn_prepare", f"{blk}attn_prepare", common)
        partial = {"partial": self.partial, "partial_blocks": self.kv_blocks, "scale": h.attention_scale}
        b.op("attention", f"{blk}attention", common | partial)

    def moe(self, layer: int) -> None:
        """Norm, softmax router with renormalised weights, routed experts onto the residual stream."""
        h, b, blk = self.h, self.b, f"blk.{layer}."
        router = b.matrix(f"{blk}ffn_gate_inp.weight", h.n_embd, h.n_expert)
        gate, up, down = self._expert_matrices(blk)
        act = self.act("act", h.n_embd, [router, gate, up])
        self.norm(f"{blk}ffn_norm", f"{blk}ffn_norm.weight", act, [router, gate, up])
        experts = self.experts
        self.linear(
            f"{blk}ffn_gate_inp", act, [self.segment(router, act, experts.logits, experts.logits_stride)]
        )
        experts.route(f"{blk}route", w_scale=h.expert_weights_scale)
        if self.skipped is not None:
            experts.skip_tail(f"{blk}route_tail", self.limits.route_tail_skip, self.skipped)
        experts.run(blk, act, gate, up, down, self.x, self.x_stride)

    def _expert_matrices(self, blk: str) -> tuple[int, int, int]:
        h, b, n_ff = self.h, self.b, self.n_ff_exp
        gate = b.experts(f"{blk}ffn_gate_exps.weight", h.n_embd, n_ff, h.n_expert)
        up = b.experts(f"{blk}ffn_up_exps.weight", h.n_embd, n_ff, h.n_expert, pair=gate)
        return gate, up, b.experts(f"{blk}ffn_down_exps.weight", n_ff, h.n_embd, h.n_expert)

    # --- the end ------------------------------------------------------------------------------------------

    def finish(self) -> LanguageModel:
        """Output norm and head; then the whole model."""
        h, b = self.h, self.b
        embd = b.embedding("token_embd.weight", h.n_embd)
        n_vocab = embd.n_rows
        head = b.matrix("output.weight" if b.has("output.weight") else embd.name, h.n_embd, n_vocab)
        act = self.act("act", h.n_embd, [head])
        stride = padded(n_vocab)
        logits = b.buffer("logits", self.limits.max_rows * stride)
        self.norm("output_norm", "output_norm.weight", act, [head], gather=True)
        self.linear("output", act, [self.segment(head, act, logits, stride)], count="out")
        nextn = [n for n in self.file.tensors if self._is_nextn(n)]
        b.check_all_used([embd.name, *nextn])
        notes = (f"{h.n_nextn} multi-token prediction layer(s) of the file are not run",) if nextn else ()
        freqs = inverse_frequencies(h.rope_base, h.n_rot, h.rope_factor)
        slots = math.ceil(self.kv_blocks / self.limits.n_nodes) * self.limits.n_seq
        return LanguageModel(
            arch=h.arch,
            program=b.finish(slots * self.slot_bytes),
            n_embd=h.n_embd,
            n_vocab=n_vocab,
            n_ctx_train=h.n_ctx_train,
            kv_blocks=self.kv_blocks,
            x=self.x,
            x_stride=self.x_stride,
            logits=logits,
            logits_stride=stride,
            token_embd=embd,
            constants=(Constant(self.freqs, freqs),),
            n_expert_used=h.n_expert_used,
            skipped=self.skipped,
            notes=notes,
        )

    def _is_nextn(self, name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "blk" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) >= self.h.n_layer
