"""What a program reads and runs, derived from its ops: bytes of weights a token, kernels by operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strata_jit.engine.results import KernelUse
from strata_jit.kernels.layout import matrix_bytes
from strata_jit.pool.program import Op, Program, TensorSpec


def weight_bytes_per_token(program: Program, n_expert_used: int) -> int:
    """Stored bytes that a step of one row reads: every matrix once, of the experts those that are used."""
    return sum(
        n * matrix_bytes(tensor.store_type, tensor.n_rows, tensor.n_cols)
        for tensor, n in matrices_read(program, n_expert_used)
    )


def matrices_read(program: Program, n_expert_used: int) -> tuple[tuple[TensorSpec, int], ...]:
    """The tensors that the ops read, each once, and how many of their matrices a step of one row reads.

    Of experts those that are used; where a tensor has a matrix for each head, all.
    """
    read: dict[int, tuple[TensorSpec, int]] = {}
    for op in program.ops:
        for tensor in _matrices(program, op):
            n = min(tensor.n_expert, n_expert_used) if op.kind == "experts" else tensor.n_expert
            read[tensor.id] = (tensor, n)
    return tuple(read.values())


def kernel_uses(program: Program, variants: Mapping[str, str]) -> tuple[KernelUse, ...]:
    """Every operation, with the type of the matrices that it reads, and its variant; in the program's order.

    `variants`: op kernel ("module:attribute") or store type -> variant, as the node processes report it.
    """
    uses: dict[str, str] = {}
    for op in program.ops:
        matrices = list(_matrices(program, op))
        for matrix in matrices:
            uses.setdefault(f"{op.name} {matrix.store_type}", variants[matrix.store_type])
        if not matrices:
            uses.setdefault(op.name, variants[op.one or op.many or ""])
    return tuple(KernelUse(name, variant) for name, variant in uses.items())


def _matrices(program: Program, op: Op) -> Iterator[TensorSpec]:
    tensors = (program.tensors[int(value)] for kind, value in op.args if kind == "t")
    return (tensor for tensor in tensors if tensor.role == "matrix")
