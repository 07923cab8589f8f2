"""A machine looked at: what it is, what limits this process there, and what a pool would do with it.

Owns the order: machine, model if one is named, plan, warnings. Loads nothing and starts nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from strata_jit.engine.sizes import PlannedModel, plan_model
from strata_jit.errors import UsageError
from strata_jit.gguf.reader import open_gguf
from strata_jit.placement import Plan, PlanOptions, plan
from strata_jit.placement.advice import advice
from strata_jit.topology.description import Machine
from strata_jit.topology.machine import read_machine


@dataclass(frozen=True, slots=True)
class Inspection:
    """A machine and the plan for it."""

    machine: Machine
    plan: Plan
    default: Plan
    """The plan if no number of workers had been asked for."""
    model_path: str | None
    model: PlannedModel | None
    """Of the file at `model_path`."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The plan's first, then the machine's settings, each with its remedy."""
        return self.plan.warnings + advice(self.machine)

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices of the plan, and parts of the file that are not used."""
        return self.plan.notes + (self.model.model.notes if self.model is not None else ())


def inspect(
    options: PlanOptions,
    root: str | os.PathLike[str] = "/",
    model_path: str | os.PathLike[str] | None = None,
    ctx: int | None = None,
) -> Inspection:
    """Read the machine below `root`, which may be a recorded one, and plan for it.

    model_path  a GGUF file, of a split model any part: the plan then has rows and bytes
    ctx         positions of KV memory; None: 4096, at most the model's own context
    UsageError for a root that is no directory, TopologyError if it shows no CPU, ModelError for a file that
    cannot be run.
    """
    if not os.path.isdir(root):
        raise UsageError(f"root: found {os.fspath(root)!r}, expected a directory")
    machine = read_machine(Path(root))
    default = plan(machine, None, replace(options, workers=None))
    if model_path is None:
        return Inspection(machine, plan(machine, None, options), default, None, None)
    planned = plan_model(open_gguf(model_path), machine, options, ctx=ctx)
    return Inspection(machine, planned.plan, default, str(model_path), planned)
