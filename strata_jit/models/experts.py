"""The routed experts of a layer, as ops: router's choice, gate/up, quantise, down.

Shared by all families and by `ExpertPool`, whose program is nothing else. Owns the buffers of a routed step;
all layers use the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.layout import round_up
from strata_jit.kernels.registry import GLU_SWIGLU, GLU_SWIGLU_OAI, ROUTE_GIVEN
from strata_jit.kernels.scratch import list_scratch_bytes, route_scratch_bytes
from strata_jit.models.builder import KINDS, NONE, WHOLE, Act, Part, ProgramBuilder, Target, padded


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


@dataclass(frozen=True, slots=True)
class SharedDown:
    """The down matrix of a shared expert, and where its activation planes lie in the thread scratch."""

    tensor: int
    act_scratch: int


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Tensor ids of a layer's experts; NONE where there is no bias."""

    gate: int
    up: int
    down: int
    gate_bias: int = NONE
    up_bias: int = NONE
    down_bias: int = NONE


def expert_width(file: GGUFFile, blk: str) -> int:
    """Rows of one expert's gate matrix, n_ff_exp, in the layer whose tensor names begin with `blk`."""
    merged = file.tensors.get(f"{blk}ffn_gate_up_exps.weight")
    if merged is not None:
        return merged.n_rows // 2
    if f"{blk}ffn_gate.0.weight" in file.tensors:
        found = "experts as tensors of their own, as old converters wrote them"
        expected = f"{blk}ffn_gate_exps.weight with all of them; convert the model again"
        raise ModelError.at(file.path, f"tensor {blk}ffn_gate.0.weight", found, expected)
    return file.tensor(f"{blk}ffn_gate_exps.weight").n_rows


def widest_down(n_ff: int) -> int:
    """The most columns that a down matrix of n_ff inputs may have, see `down_width`."""
    return round_up(n_ff, 256)


def down_width(file: GGUFFile, name: str, n_ff: int) -> int:
    """Columns of a down matrix: n_ff, or more where it was padded with zeros to whole blocks of 256.

    Files do so for types that have no smaller blocks. What stands in the padding is multiplied by 0.
    """
    return widest_down(n_ff) if file.tensor(name).n_cols == widest_down(n_ff) else n_ff


def expert_matrices(
    b: ProgramBuilder, blk: str, n_embd: int, n_ff: int, n_expert: int, chosen: tuple[int, ...] | None = None
) -> ExpertMatrices:
    """A layer's experts, or the `chosen` ones; gate and up in one tensor (gate first) or in two."""
    merged = b.has(f"{blk}ffn_gate_up_exps.weight")

    def matrix(role: str, part: Part, pair: int | None = None) -> int:
        name = f"{blk}ffn_{role}_exps.weight"
        return b.experts(name, n_embd, n_ff, n_expert, pair, chosen, part)

    def bias(role: str, n: int, part: Part = WHOLE) -> int:
        name = f"{blk}ffn_{role}_exps.bias"
        return b.expert_vectors(name, n, n_expert, chosen, part) if b.has(name) else NONE

    gate_role, up_role = ("gate_up", "gate_up") if merged else ("gate", "up")
    gate_part, up_part = ((0, 2), (1, 2)) if merged else (WHOLE, WHOLE)
    gate = matrix(gate_role, gate_part)
    down = f"{blk}ffn_down_exps.weight"
    return ExpertMatrices(
        gate=gate,
        up=matrix(up_role, up_part, pair=gate),
        down=b.experts(down, down_width(b.file, down, n_ff), n_embd, n_expert, chosen=chosen),
        gate_bias=bias(gate_role, n_ff, gate_part),
        up_bias=bias(up_role, n_ff, up_part),
        down_bias=bias("down", n_embd),
    )


def activation_of(file: GGUFFile) -> int:
    """registry.GLU_... of the file's architecture."""
    return GLU_SWIGLU_OAI if file.get("general.architecture", str) == "gpt-oss" else GLU_SWIGLU


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
        self.activation = activation_of(b.file)
        entries = max_rows * n_expert_used
        self.logits_stride = padded(n_expert)
        self.logits = b.buffer("router_logits", max_rows * self.logits_stride)
        self.ids = b.buffer("expert_ids", 8 * entries)
        self.weights = b.buffer("expert_weights", 4 * entries)
        self.ff_stride = padded(widest_down(n_ff))
        self.ff = b.buffer("ff", entries * self.ff_stride)
        self.d_stride = padded(n_embd)
        self.d = b.buffer("down", entries * self.d_stride)
        self.route_scratch = b.scratch(route_scratch_bytes(n_expert, n_expert_used))
        self.lists = b.scratch(list_scratch_bytes(max_rows, n_expert_used, n_expert))
        self.tmp = tile_scratch
        self.ff_act: Act = b.act("ff_act", widest_down(n_ff), KINDS, entries, rows_one=n_expert_used)

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

    def run(
        self, label: str, act: Act, m: ExpertMatrices, target: Target, shared: SharedDown | None = None
    ) -> None:
        """Each row's sum of weight * down(glu(gate(act), up(act))) over its experts, to the target.

        shared  what `moe_down` adds of a shared expert in a one-row step
        """
        b = self.b
        routed = {"route_scratch": self.route_scratch, "ids": self.ids, "n_used": self.n_used}
        scratch = {"list_scratch": self.lists, "tmp_scratch": self.tmp}
        ff = {"ff": self.ff, "ff_stride": self.ff_stride}
        d = {"d": self.d, "d_stride": self.d_stride, "weights": self.weights}
        out = {"x": target.buffer, "x_stride": target.stride, "scale": target.scale}
        b.op(
            "moe_gate_up",
            f"{label}ffn_gate_up_exps",
            act.read
            | routed
            | scratch
            | ff
            | {
                "gate": m.gate,
                "gate_off": act.offsets[b.act_kind(m.gate)],
                "gate_bias": m.gate_bias,
                "up": m.up,
                "up_off": act.offsets[b.act_kind(m.up)],
                "up_bias": m.up_bias,
                "activation": self.activation,
                "n_expert": self.n_expert,
            },
        )
        kind = b.act_kind(m.down)
        write = self.ff_act.write | {f"off_{k.lower()}": -1 for k in self.ff_act.offsets if k != kind}
        b.op("ff_quant", f"{label}ffn_quant", routed | ff | write | {"n_ff": b.n_cols(m.down)})
        b.op(
            "moe_down",
            f"{label}ffn_down_exps",
            self.ff_act.read
            | routed
            | scratch
            | d
            | out
            | {
                "down": m.down,
                "down_off": self.ff_act.offsets[kind],
                "down_bias": m.down_bias,
                "shared": shared.tensor if shared else NONE,
                "shared_act": shared.act_scratch if shared else 0,
                "add": int(target.add),
                "n_expert": self.n_expert,
            },
        )
        combine = {"ids": self.ids, "n_used": self.n_used, "n_embd": self.n_embd}
        add = {"add": int(target.add or shared is not None)}
        b.op("moe_combine", f"{label}ffn_combine", d | out | combine | add)
