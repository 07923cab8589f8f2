"""Between a program and a plan: what the program needs of a machine, and node specs with their rows.

Owns the cut of every matrix over the nodes; knows neither files' contents nor processes.
"""

from __future__ import annotations

from collections.abc import Callable

from strata_jit.errors import UsageError
from strata_jit.kernels.abi import MAX_TASKS
from strata_jit.kernels.layout import OCTET_ROWS, octet_bytes
from strata_jit.placement import MatrixSize, ModelSizes, Plan, cut_rows
from strata_jit.pool.program import AUTO_F32, NodeSpec, Program, TensorSpec

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total): stage "compile" counts kernels, "load" bytes."""
DEFAULT_SPIN_US = 200
"""Microseconds that an idle thread spins: longer than what lies between two steps, yet it stays cool."""

MAX_SPIN_US = 10**9
ARENAS = ("memfd", "anon")


def node_specs(plan: Plan, program: Program) -> tuple[NodeSpec, ...]:
    """Every node of the plan with its row range of every matrix; the pool numbers them from 0."""
    cuts = {t.id: cut_rows(t.n_rows, plan.shares) for t in program.tensors if t.role == "matrix"}
    return tuple(
        NodeSpec(i, node.cpus, node.threads, {tensor: ranges[i] for tensor, ranges in cuts.items()})
        for i, node in enumerate(plan.nodes)
    )


def model_sizes(program: Program, n_nodes: int, *, reference: bool = False) -> ModelSizes:
    """What a program that was built for `n_nodes` nodes needs in memory, matrices as they are stored."""
    vectors = [t for t in program.tensors if t.role == "vector"]
    return ModelSizes(
        matrices=tuple(matrix_size(t, reference) for t in program.tensors if t.role == "matrix"),
        vector_bytes=sum(4 * t.n_cols * t.n_rows * t.n_expert for t in vectors),
        kv_bytes=program.kv_bytes * n_nodes,
        state_bytes=program.state_bytes,
        buffer_bytes=sum(buffer.nbytes for buffer in program.buffers),
        thread_bytes=program.scratch_bytes,
    )


def matrix_size(tensor: TensorSpec, reference: bool = False) -> MatrixSize:
    """A matrix as it is stored."""
    # whether a float matrix can be kept as BF16 is known only once it has been read: count it as F32
    store = "F32" if reference or tensor.store_type == AUTO_F32 else tensor.store_type
    return MatrixSize(tensor.n_rows, octet_bytes(store, tensor.n_cols) // OCTET_ROWS, tensor.n_expert)


def spin_us(plan: Plan, asked: int | None) -> int:
    """Microseconds to spin: none where threads share CPUs."""
    if not plan.spin:
        return 0
    return DEFAULT_SPIN_US if asked is None else asked


def check_pool_options(spin_us: int | None, arena: str, tasks: int = 0) -> None:
    """UsageError for values that no pool can take."""
    if spin_us is not None and not 0 <= spin_us <= MAX_SPIN_US:
        raise UsageError(f"spin_us: found {spin_us}, expected 0 to {MAX_SPIN_US} microseconds")
    if not 0 <= tasks <= MAX_TASKS:
        raise UsageError(f"pool_tasks: found {tasks}, expected 0 to {MAX_TASKS}")
    if arena not in ARENAS:
        raise UsageError(f"arena: found {arena!r}, expected {' or '.join(ARENAS)}")
