"""A model file on a machine: its program and plan, and what a token reads, from the file's header alone.

Owns the order in which program and plan need each other. Reads no weight and starts no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata_jit import models
from strata_jit.engine.setup import matrix_size, model_sizes
from strata_jit.engine.traffic import matrices_read
from strata_jit.errors import UsageError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.hparams import context_length
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.placement import MatrixSize, Plan, PlanOptions, cut_rows, plan, state_by_node
from strata_jit.placement.rows import ROW_GROUP
from strata_jit.topology.description import Machine

DEFAULT_CHUNK = 512
DEFAULT_CTX = 4096


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's program and the plan that runs it."""

    model: LanguageModel
    limits: StepLimits
    plan: Plan

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """Weights that one decoded token reads, by node of the plan.

        Float matrices count as F32: those that BF16 holds exactly, which only their content tells, take half.
        """
        read = [
            replace(matrix_size(tensor, self.limits.reference), n_expert=n)
            for tensor, n in matrices_read(self.model.program, self.model.n_expert_used)
        ]
        return _bytes_by_node(read, self.plan.shares)

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Recurrent state that one decoded token reads and writes, all of it each time, by node."""
        return tuple(2 * n for n in state_by_node(self.model.program.state_bytes, self.plan.shares))

    def ceiling_tok_s(self, bytes_per_s: float) -> float:
        """Tokens a second that memory allows if each node moves `bytes_per_s`: the busiest one decides.

        Node processes that are not placed may share one node's memory, so they count as one.
        """
        if not 0 < bytes_per_s < float("inf"):
            raise UsageError(f"bandwidth: found {bytes_per_s / 1e9:g} GB/s, expected more than 0")
        moved = [weights + state for weights, state in zip(self.token_bytes, self.state_bytes, strict=True)]
        return bytes_per_s / (max(moved) if self.plan.placed else sum(moved))


def plan_model(
    file: GGUFFile,
    machine: Machine,
    options: PlanOptions,
    *,
    ctx: int | None = None,
    chunk: int | None = None,
    reference: bool = False,
    route_tail_skip: int = 0,
) -> PlannedModel:
    """Build the program for as many nodes as the plan has, then plan with what it needs.

    ctx    positions of KV memory; None: 4096, at most the model's own context
    chunk  tokens of a prompt that one step takes; None: 512
    route_tail_skip  rank from which on experts are left out; 0: none
    ModelError for a file that cannot be run, UsageError for options that make no sense.
    """
    n_nodes = len(plan(machine, None, options).nodes)
    chunk = DEFAULT_CHUNK if chunk is None else chunk
    if chunk < 1:
        raise UsageError(f"chunk: found {chunk}, expected 1 or more tokens")
    if route_tail_skip < 0:
        raise UsageError(f"route_tail_skip: found {route_tail_skip}, expected 0 or more")
    n_ctx = _context(file, ctx)
    limits = StepLimits(
        max_rows=min(chunk, n_ctx),
        n_ctx=n_ctx,
        n_nodes=n_nodes,
        reference=reference,
        route_tail_skip=route_tail_skip,
    )
    model = models.build(file, limits)
    sizes = model_sizes(model.program, n_nodes, reference=reference)
    return PlannedModel(model, limits, plan(machine, sizes, options))


def _context(file: GGUFFile, ctx: int | None) -> int:
    n_ctx_train = context_length(file)
    if ctx is None:
        return min(DEFAULT_CTX, n_ctx_train)
    if not 1 <= ctx <= n_ctx_train:
        raise UsageError(f"ctx: found {ctx}, expected 1 to {n_ctx_train}, the model's context")
    return ctx


def _bytes_by_node(matrices: Sequence[MatrixSize], shares: Sequence[int]) -> tuple[int, ...]:
    """Stored bytes of each node's rows, whole octets."""
    read = [0] * len(shares)
    for matrix in matrices:
        for i, (start, stop) in enumerate(cut_rows(matrix.n_rows, shares)):
            octets = -(-(stop - start) // ROW_GROUP)
            read[i] += matrix.n_expert * octets * ROW_GROUP * matrix.row_bytes
    return tuple(read)
