"""How many threads, in which node processes, on which CPUs, with which rows.

Owns the decisions; pure: no file, no clock, no environment. Takes a `Machine` and options, gives a `Plan`
whose warnings say what a person should know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from strata_jit.errors import UsageError
from strata_jit.topology.machine import Machine

ROW_GROUP = 8
"""Rows are cut in this unit, the octet in which matrices are stored."""
TEST_MODE = "test"
DEFAULT_TEST_SLICES = 2


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node process. `cpus`: one per thread, in order; None where its threads are not pinned."""

    node: int
    threads: int
    cpus: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """`threads` = `workers` + 1. `spin` is False where threads share CPUs and so must never spin."""

    nodes: tuple[NodePlan, ...]
    workers: int
    threads: int
    split_on: bool
    split_reason: str
    spin: bool
    warnings: tuple[str, ...]

    @property
    def shares(self) -> tuple[int, ...]:
        """Threads of each node, as `cut_rows` takes them."""
        return tuple(node.threads for node in self.nodes)


def plan_nodes(
    machine: Machine,
    workers: int | None = None,
    numa_pool: str | None = None,
    test_slices: int | None = None,
) -> Plan:
    """Plan the node processes.

    `workers` None: the physical cores that may be used, within the CPU quota, less one for the host's core,
    whose thread is the one that `threads` counts beyond the workers. `numa_pool` "test": `test_slices` (2)
    node processes on any machine, threads dealt to them in turn, at least one each. UsageError for an option
    that makes no sense.
    """
    _check(workers, numa_pool, test_slices)
    testing = numa_pool == TEST_MODE
    n_nodes = (test_slices or DEFAULT_TEST_SLICES) if testing else 1
    asked = _default_workers(machine) if workers is None else workers
    threads = max(asked + 1, n_nodes)
    cpus, warnings = _choose_cpus(machine, threads)
    dealt = [range(node, threads, n_nodes) for node in range(n_nodes)]
    nodes = tuple(
        NodePlan(node, len(own), None if cpus is None else tuple(cpus[i] for i in own))
        for node, own in enumerate(dealt)
    )
    reason = f"test mode: {n_nodes} slices" if testing else "one node process"
    return Plan(nodes, threads - 1, threads, testing, reason, cpus is not None, warnings)


def cut_rows(n_rows: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [start, stop) of `n_rows` rows in proportion to `shares`, one each, in order.

    Cuts fall on multiples of 8; every row lies in exactly one range; ranges may be empty. UsageError unless
    some share is positive and none negative.
    """
    total = sum(shares)
    if total <= 0 or min(shares) < 0 or n_rows < 0:
        raise UsageError(
            f"cannot cut {n_rows} rows in shares {list(shares)}: expected one positive, none negative"
        )
    groups = (n_rows + ROW_GROUP - 1) // ROW_GROUP
    cuts, before = [0], 0
    for share in shares:
        before += share
        # the nearest group to the exact cut, so that no range is off by more than a group
        cuts.append(min(n_rows, ROW_GROUP * ((2 * groups * before + total) // (2 * total))))
    return list(pairwise(cuts))


def _check(workers: int | None, numa_pool: str | None, test_slices: int | None) -> None:
    if workers is not None and workers < 0:
        raise UsageError(f"pool workers: found {workers}, expected 0 or more")
    if numa_pool not in (None, "0", "1", TEST_MODE):
        raise UsageError(f"NUMA pool mode: found {numa_pool!r}, expected 0, 1 or test")
    if test_slices is not None and test_slices < 1:
        raise UsageError(f"test slices: found {test_slices}, expected 1 or more")
    if test_slices is not None and numa_pool != TEST_MODE:
        raise UsageError("test slices were given without test mode: set the NUMA pool mode to test as well")


def _usable(machine: Machine, n_cpus: int) -> int:
    return n_cpus if machine.cpu_quota is None else min(n_cpus, machine.cpu_quota)


def _default_workers(machine: Machine) -> int:
    return max(0, _usable(machine, len(machine.cores)) - 1)


def _choose_cpus(machine: Machine, threads: int) -> tuple[list[int] | None, tuple[str, ...]]:
    """CPUs in the order of threads, one a physical core first; None with a warning if there are too few."""
    usable = _usable(machine, len(machine.allowed))
    if threads > usable:
        limit = "CPU quota allows" if usable < len(machine.allowed) else "process may use"
        return None, (
            f"{threads} threads, but the {limit} {usable} CPU{'s' * (usable != 1)}: "
            "threads are not pinned and sleep rather than spin; fewer workers will be faster",
        )
    depth = max(len(core.cpus) for core in machine.cores)
    in_order = [core.cpus[i] for i in range(depth) for core in machine.cores if i < len(core.cpus)]
    return in_order[:threads], ()
