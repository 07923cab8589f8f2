"""Which CPUs helper threads may use: those of input and output, of libraries, of the interpreter itself.

Owns the choice. A thread that a pinned thread starts inherits its one CPU, so every other thread's mask has
to be set from here.
"""

from __future__ import annotations

from strata_jit.errors import TopologyError, UsageError
from strata_jit.placement.records import Plan
from strata_jit.topology.cpulist import format_cpulist, parse_cpulist
from strata_jit.topology.description import Machine

OFF, AUTO = "off", "auto"


def helper_cpus(machine: Machine, plan: Plan, choice: str = OFF) -> frozenset[int]:
    """CPUs for helper threads, never none on a machine that has any.

    choice  "off": all that the process may use. "auto": those of cores without a team thread, and the other
            ones of the host's core, but no worker's sibling; all where that leaves none. Else a list such as
            "0-3,8". UsageError if it is none, or names a CPU that the process may not use
    """
    if choice == OFF:
        return machine.allowed
    if choice == AUTO:
        return _auto(machine, plan) or machine.allowed
    try:
        cpus = parse_cpulist(choice)
    except TopologyError as fault:
        raise UsageError(f"helper CPUs: {fault}, off or auto") from None
    if not cpus or not cpus <= machine.allowed:
        allowed = format_cpulist(machine.allowed)
        raise UsageError(f"helper CPUs: found {choice!r}, expected off, auto or some of {allowed}")
    return cpus


def _auto(machine: Machine, plan: Plan) -> frozenset[int]:
    workers = {worker.cpu for worker in plan.workers}
    free: set[int] = set()
    for core in machine.cores:
        if plan.pinned and not workers & set(core.cpus):
            free.update(core.cpus)
    return frozenset(free - {plan.host_cpu}) & machine.allowed
