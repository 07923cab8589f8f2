"""The routed experts of a layer, as ops: router's choice, gate/up, quantise, down.

Shared by all families and by `ExpertPool`, whose program is nothing else. Owns the buffers of a routed step;
all layers use the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_jit.kernels.registry import ROUTE_GIVEN
from strata_jit.kernels.scratch import list_scratch_bytes, route_scratch_bytes
from strata_jit.models.builder import NONE, Act, ProgramBuilder, padded


@dataclass(frozen=True, slots=True)
class Router:
    """How logits become a choice; see `kernels/router.py`."""

    mode: int
    """registry.ROUTE_..."""
    norm_w: bool
    """Whether the weights are divided by their sum."""
    w_scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1


GIVEN = Router(ROUTE_GIVEN, norm_w=False)
"""The host's choice."""


class Experts:
    """Buffers and ops of routed experts of one width."""

    def __init__(
        self,
        b: ProgramBuilder,
        n_expert: int,
        n_expert_used: int,
        n_embd: int,
        n_ff: int,
        max_rows: int,
        tile_scratch: int,
    ) -> None:
        """`tile_scratch`: offset of kernels.scratch.tmp_scratch_bytes() in the thread scratch."""
        self.b, self.n_expert, self.n_used, self.n_embd, self.n_ff = b, n_expert, n_expert_used, n_embd, n_ff
        entries = max_rows * n_expert_used
        self.logits_stride = padded(n_expert)
        self.logits = b.buffer("router_logits", max_rows * self.logits_stride)
        self.ids = b.buffer("expert_ids", 8 * entries)
        self.weights = b.buffer("expert_weights", 4 * entries)
        self.ff_stride = padded(n_ff)
        self.ff = b.buffer("ff", entries * self.ff_stride)
        self.d_stride = padded(n_embd)
        self.d = b.buffer("down", entries * self.d_stride)
        self.route_scratch = b.scratch(route_scratch_bytes(n_expert, n_expert_used))
        self.lists = b.scratch(list_scratch_bytes(max_rows, n_expert_used, n_expert))
        self.tmp = tile_scratch
        kinds = [k for k, multiple in (("F32", 4), ("Q256", 256), ("Q32", 32)) if n_ff % multiple == 0]
        self.ff_act: Act = b.act("ff_act", n_ff, kinds, entries, rows_one=n_expert_used)

    def route(self, label: str, router: Router, bias: int = NONE) -> None:
        """From router logits (or given ids and weights) to the experts of each row.

        bias  id of the vector that is added for the selection
        """
        self.b.op(
            "route",
            label,
            {
                "logits": self.logits,
                "logits_stride": self.logits_stride,
                "n_expert": self.n_expert,
                "n_used": self.n_used,
                "mode": router.mode,
                "bias": bias,
                "n_group": router.n_group,
                "n_group_used": router.n_group_used,
                "norm_w": int(router.norm_w),
                "w_scale": router.w_scale,
                "route_scratch": self.route_scratch,
                "ids": self.ids,
                "weights": self.weights,
            },
        )

    def skip_tail(self, label: str, tail_skip: int, skipped: int) -> None:
        """After `route`: leave out experts that every row of the step has at rank `tail_skip` or later.

        skipped  buffer id of the int64 that counts them
        """
        fields = {"n_expert": self.n_expert, "n_used": self.n_used, "route_scratch": self.route_scratch}
        lists = {"ids": self.ids, "list_scratch": self.lists, "skipped": skipped}
        self.b.op("route_tail", label, fields | lists | {"tail_skip": tail_skip})

    def run(self, label: str, act: Act, gate: int, up: int, down: int, x: int, x_stride: int) -> None:
        """x += sum of weight * down(silu(gate(act)) * up(act)) over each row's experts."""
        b = self.b
        routed = {"route_scratch": self.route_scratch, "ids": self.ids, "n_used": self.n_used}
        scratch = {"list_scratch": self.lists, "tmp_scratch": self.tmp}
        ff = {"ff": self.ff, "ff_stride": self.ff_stride}
        d = {"d": self.d, "d_stride": self.d_stride, "weights": self.weights}
        target = {"x": x, "x_stride": x_stride}
        b.op(
            "moe_gate_up",
            f"{label}ffn_gate_up_exps",
            act.read
            | routed
            | scratch
            | ff
            | {
                "gate": gate,
                "gate_off": act.offsets[b.act_kind(gate)],
                "up": up,
                "up_off": act.offsets[b.act_kind(up)],
                "n_expert": self.n_expert,
            },
        )
        kind = b.act_kind(down)
        write = self.ff_act.write | {f"off_{k.lower()}": -1 for k in self.ff_act.offsets if k != kind}
        b.op("ff_quant", f"{label}ffn_quant", routed | ff | write | {"n_ff": self.n_ff})
        b.op(
            "moe_down",
            f"{label}ffn_down_exps",
            self.ff_act.read
            | routed
            | scratch
            | d
            | target
            | {"down": down, "down_off": self.ff_act.offsets[kind], "n_expert": self.n_expert},
        )
        combine = {"ids": self.ids, "n_used": self.n_used, "n_embd": self.n_embd}
        b.op("moe_combine", f"{label}ffn_combine", d | target | combine)
