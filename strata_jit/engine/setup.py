"""From a program and a plan to what a pool needs: node specs with their rows.

Owns the cut of every matrix over the nodes; knows neither files' contents nor processes.
"""

from __future__ import annotations

from collections.abc import Callable

from strata_jit.errors import UsageError
from strata_jit.placement.plan import Plan, cut_rows
from strata_jit.pool.program import NodeSpec, Program

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total): stage "compile" counts kernels, "load" bytes."""
DEFAULT_SPIN_US = 200
"""Microseconds that an idle thread spins: longer than what lies between two steps, yet it stays cool."""

MAX_SPIN_US = 10**9
ARENAS = ("memfd", "anon")


def node_specs(plan: Plan, program: Program) -> tuple[NodeSpec, ...]:
    """Every node of the plan with its row range of every matrix."""
    cuts = {t.id: cut_rows(t.n_rows, plan.shares) for t in program.tensors if t.role == "matrix"}
    return tuple(
        NodeSpec(node.node, node.cpus, node.threads, {tensor: ranges[i] for tensor, ranges in cuts.items()})
        for i, node in enumerate(plan.nodes)
    )


def spin_us(plan: Plan, asked: int | None) -> int:
    """Microseconds to spin: none where threads share CPUs."""
    if not plan.spin:
        return 0
    return DEFAULT_SPIN_US if asked is None else asked


def check_pool_options(spin_us: int | None, arena: str) -> None:
    """UsageError for values that no pool can take."""
    if spin_us is not None and not 0 <= spin_us <= MAX_SPIN_US:
        raise UsageError(f"spin_us: found {spin_us}, expected 0 to {MAX_SPIN_US} microseconds")
    if arena not in ARENAS:
        raise UsageError(f"arena: found {arena!r}, expected {' or '.join(ARENAS)}")
