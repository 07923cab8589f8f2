"""The feed-forward half of a layer, as a piece of a transformer: norm, router, experts; or a dense one.

Owns the names of the tensors and the order of the ops; `experts.py` has the routed experts themselves. A
shared expert costs no barrier of a one-row step: its gate and up are computed with the router's logits, its
down with the routed ones.
"""

from __future__ import annotations

from strata_jit.kernels.registry import ROUTE_SOFTMAX
from strata_jit.models.builder import NONE, Act, Target, padded
from strata_jit.models.experts import (
    Experts,
    Router,
    SharedDown,
    activation_of,
    down_width,
    expert_matrices,
    expert_width,
    widest_down,
)
from strata_jit.models.transformer import Transformer

FFN_FEATURES = frozenset(
    {"expert_gating_func", "expert_shared_count", "expert_group_count", "leading_dense_block_count"}
)
"""Keys of `hparams.FEATURES` that `RoutedFfn` reads."""


class RoutedFfn:
    """The feed-forward of a model's layers: routed experts, with a shared one where the file has it, and
    dense layers at the beginning where `leading_dense_block_count` says so."""

    def __init__(
        self,
        t: Transformer,
        *,
        gating: int = ROUTE_SOFTMAX,
        norm_w: bool = True,
        norm: str = "ffn_norm",
        target: Target | None = None,
    ) -> None:
        """
        gating  registry.ROUTE_..., where the file does not say
        norm_w  divide the chosen weights by their sum
        norm    name of the norm before the feed-forward
        target  where the result goes; None: it is added to the residual stream, times `h.residual_scale`
        """
        self.t, self.norm = t, norm
        h, b = t.h, t.b
        blk = f"blk.{h.n_layer_dense_lead}."
        self.n_ff_exp = expert_width(t.file, blk)
        self.experts = Experts(
            b, h.n_expert, h.n_expert_used, h.n_embd, self.n_ff_exp, t.limits.max_rows, t.tile_scratch
        )
        self.router = Router(
            mode=h.expert_gating_func or gating,
            norm_w=norm_w,
            w_scale=h.expert_weights_scale,
            n_group=h.n_expert_groups,
            n_group_used=h.n_group_used,
        )
        self.target = target or t.residual
        self.shared = GatedFfn(t, "_shexp", blk) if b.has(f"{blk}ffn_gate_shexp.weight") else None
        self.dense = GatedFfn(t, "", "blk.0.") if h.n_layer_dense_lead else None
        self.skipped = b.buffer("skipped", 8) if t.limits.route_tail_skip else None

    def add(self, layer: int) -> None:
        """Append a layer: norm of the residual stream, and the feed-forward."""
        self.t.normed(self, layer, self.norm)

    def inputs(self, layer: int) -> list[int]:
        """The matrices that read the layer's input; who writes it must write their kinds of activation."""
        blk, dense = f"blk.{layer}.", self._dense(layer)
        if dense:
            return dense.inputs(blk)
        m = expert_matrices(self.t.b, blk, self.t.h.n_embd, self.n_ff_exp, self.t.h.n_expert)
        return [self._router(blk), m.gate, m.up, *(self.shared.inputs(blk) if self.shared else ())]

    def run(self, layer: int, act: Act) -> None:
        """Append a layer's feed-forward alone, of activation rows [n_embd] in the kinds of `inputs`."""
        blk, dense = f"blk.{layer}.", self._dense(layer)
        if dense:
            self._run_dense(dense, blk, act)
        else:
            self._run_routed(blk, act)

    def _dense(self, layer: int) -> GatedFfn | None:
        return self.dense if layer < self.t.h.n_layer_dense_lead else None

    def _router(self, blk: str) -> int:
        return self.t.b.matrix(f"{blk}ffn_gate_inp.weight", self.t.h.n_embd, self.t.h.n_expert)

    def _run_routed(self, blk: str, act: Act) -> None:
        t, h, experts = self.t, self.t.h, self.experts
        bias = t.optional_bias(f"{blk}ffn_gate_inp.bias", h.n_expert)
        segments = [t.segment(self._router(blk), act, experts.logits, experts.logits_stride, bias=bias)]
        if self.shared:
            segments += self.shared.segments(blk, act)
        t.linear(f"{blk}ffn_gate_inp", act, segments)
        shared = self._run_shared(self.shared, blk) if self.shared else None
        experts.route(f"{blk}route", self.router, t.optional_bias(f"{blk}exp_probs_b.bias", h.n_expert))
        if self.skipped is not None:
            experts.skip_tail(f"{blk}route_tail", t.limits.route_tail_skip, self.skipped)
        m = expert_matrices(t.b, blk, h.n_embd, self.n_ff_exp, h.n_expert)
        experts.run(blk, act, m, self.target, shared)

    def _run_shared(self, shared: GatedFfn, blk: str) -> SharedDown:
        """The shared expert of many rows, and what is left of it to `moe_down` at one."""
        down, act = shared.activate(blk)
        segment = self.t.segment_to(self.target, down, act)
        self.t.linear(f"{blk}ffn_down_shexp", act, [segment], at_one_row=False)
        return SharedDown(down, act.scratch + act.offsets[self.t.b.act_kind(down)])

    def _run_dense(self, dense: GatedFfn, blk: str, act: Act) -> None:
        self.t.linear(f"{blk}ffn_gate_up", act, dense.segments(blk, act))
        down, ff_act = dense.activate(blk)
        self.t.linear(f"{blk}ffn_down", ff_act, [self.t.segment_to(self.target, down, ff_act)])


class GatedFfn:
    """Gate, up and down matrices of every row: a shared expert's (suffix "_shexp") or a dense layer's."""

    def __init__(self, t: Transformer, suffix: str, blk: str) -> None:
        """`blk`: beginning of the tensor names of the first layer that has them; the others are alike."""
        self.t, self.suffix = t, suffix
        self.n_ff = t.file.tensor(f"{blk}ffn_gate{suffix}.weight").n_rows
        self.has_weight = t.b.has(f"{blk}ffn_gate_inp{suffix}.weight") and suffix != ""
        self.up_off = padded(widest_down(self.n_ff))
        self.stride = 2 * self.up_off + padded(1)
        self.h = t.b.buffer(f"ffn{suffix}", t.limits.max_rows * self.stride)
        self.row_scratch = t.b.scratch(4 * widest_down(self.n_ff))

    def inputs(self, blk: str) -> list[int]:
        """Gate, up, and the row whose sigmoid is the expert's weight if there is one."""
        b, n_embd, end = self.t.b, self.t.h.n_embd, f"{self.suffix}.weight"
        found = [b.matrix(f"{blk}ffn_{role}{end}", n_embd, self.n_ff) for role in ("gate", "up")]
        if self.has_weight:
            found.append(b.matrix(f"{blk}ffn_gate_inp{end}", n_embd, 1))
        return found

    def segments(self, blk: str, act: Act) -> list[dict[str, float]]:
        """The matrices of `inputs` as parts of a `linear`."""
        offsets = (0, self.up_off, 2 * self.up_off)
        return [
            self.t.segment(tensor, act, self.h, self.stride, offset)
            for tensor, offset in zip(self.inputs(blk), offsets, strict=False)
        ]

    def activate(self, blk: str) -> tuple[int, Act]:
        """Activation rows for the down matrix, and that matrix."""
        t, name = self.t, f"{blk}ffn_down{self.suffix}.weight"
        width = down_width(t.file, name, self.n_ff)
        down = t.b.matrix(name, width, t.h.n_embd)
        act = t.act(f"ffn{self.suffix}_act", widest_down(self.n_ff), [down])
        fields = {
            "h": self.h,
            "h_stride": self.stride,
            "gate_off": 0,
            "up_off": self.up_off,
            "weight_off": 2 * self.up_off if self.has_weight else NONE,
            "n_ff": width,
            "activation": activation_of(t.file),
            "tmp_scratch": self.row_scratch,
        }
        t.b.op("glu_quant", f"{blk}ffn{self.suffix}_quant", fields | t.wanted(act, [down]))
        return down, act
