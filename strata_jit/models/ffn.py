"""The feed-forward half of a layer, as a piece of a transformer: norm, router, routed experts.

Owns the names of the tensors and the order of the ops; `experts.py` has the experts themselves.
"""

from __future__ import annotations

from strata_jit.kernels.registry import ROUTE_SOFTMAX
from strata_jit.models.experts import Experts, Router
from strata_jit.models.transformer import Transformer


class RoutedFfn:
    """The routed experts of a model's layers."""

    def __init__(self, t: Transformer, *, gating: int = ROUTE_SOFTMAX, norm_w: bool = True) -> None:
        """
        gating  registry.ROUTE_..., where the file does not say
        norm_w  divide the chosen weights by their sum
        """
        self.t = t
        h, b = t.h, t.b
        self.n_ff_exp = t.file.tensor("blk.0.ffn_gate_exps.weight").n_rows
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
        self.skipped = b.buffer("skipped", 8) if t.limits.route_tail_skip else None

    def add(self, layer: int) -> None:
        """Append a layer: router, experts onto the residual stream."""
        t, h, b, blk = self.t, self.t.h, self.t.b, f"blk.{layer}."
        router = b.matrix(f"{blk}ffn_gate_inp.weight", h.n_embd, h.n_expert)
        gate, up, down = self._expert_matrices(blk)
        act = t.act("act", h.n_embd, [router, gate, up])
        t.norm(f"{blk}ffn_norm", f"{blk}ffn_norm.weight", act, [router, gate, up])
        experts = self.experts
        bias = t.optional_bias(f"{blk}ffn_gate_inp.bias", h.n_expert)
        segment = t.segment(router, act, experts.logits, experts.logits_stride, bias=bias)
        t.linear(f"{blk}ffn_gate_inp", act, [segment])
        experts.route(f"{blk}route", self.router, t.optional_bias(f"{blk}exp_probs_b.bias", h.n_expert))
        if self.skipped is not None:
            experts.skip_tail(f"{blk}route_tail", t.limits.route_tail_skip, self.skipped)
        experts.run(blk, act, gate, up, down, t.x, t.x_stride)

    def _expert_matrices(self, blk: str) -> tuple[int, int, int]:
        h, b, n_ff = self.t.h, self.t.b, self.n_ff_exp
        gate = b.experts(f"{blk}ffn_gate_exps.weight", h.n_embd, n_ff, h.n_expert)
        up = b.experts(f"{blk}ffn_up_exps.weight", h.n_embd, n_ff, h.n_expert, pair=gate)
        return gate, up, b.experts(f"{blk}ffn_down_exps.weight", n_ff, h.n_embd, h.n_expert)
