"""Who works where on what: pure decisions from a description of the machine.

`plan(machine, sizes, options)` is the front door. Nothing here reads a file, a clock or the environment.
"""

from strata_jit.placement.helpers import helper_cpus
from strata_jit.placement.options import PlanOptions
from strata_jit.placement.planner import plan
from strata_jit.placement.records import NodePlan, Plan, Split, Worker
from strata_jit.placement.rows import cut_rows
from strata_jit.placement.sizes import HEADROOM_BYTES, MatrixSize, ModelSizes, state_by_node

__all__ = [
    "HEADROOM_BYTES",
    "MatrixSize",
    "ModelSizes",
    "NodePlan",
    "Plan",
    "PlanOptions",
    "Split",
    "Worker",
    "cut_rows",
    "helper_cpus",
    "plan",
    "state_by_node",
]
