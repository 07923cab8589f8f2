"""What a person should know about a plan: warnings with what to do about them, and notes on choices.

Owns their words; decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from strata_jit.placement.counts import MAX_WORKERS, MAX_WORKERS_PER_NODE
from strata_jit.placement.options import ALL, P_CORES, PlanOptions
from strata_jit.placement.records import NodePlan, Split
from strata_jit.placement.sites import Site, Survey
from strata_jit.placement.words import counted
from strata_jit.topology.cpulist import format_cpulist
from strata_jit.topology.description import Machine


def warnings(
    machine: Machine, ground: Survey, options: PlanOptions, nodes: Sequence[NodePlan]
) -> Iterator[str]:
    """What to change for a faster run, other than memory."""
    threads = sum(node.threads for node in nodes)
    if threads > ground.n_cpus:
        yield (
            f"{threads} threads, but the process may use {counted(ground.n_cpus, 'CPU')}: threads are not "
            "pinned and sleep rather than spin; fewer workers will be faster"
        )
    yield from _quota_warning(machine, ground, options, nodes)
    for home, node in ground.guests.items():
        described = machine.node(home)
        if described is not None and described.has_memory:
            yield (
                f"this process may have no memory on node {home} (cpuset.mems): "
                f"{_guests(ground, home, node, nodes)}; allow it for a slice of its own"
            )


def notes(
    machine: Machine, ground: Survey, options: PlanOptions, split: Split, nodes: Sequence[NodePlan]
) -> Iterator[str]:
    """Choices that may surprise."""
    for home, node in ground.guests.items():
        described = machine.node(home)
        if described is not None and not described.has_memory:
            yield f"node {home} has no memory of its own: {_guests(ground, home, node, nodes)}"
    if options.pool_affinity == P_CORES and machine.hybrid and not ground.any_fast:
        yield "no P core may be used: E cores take their place"
    if options.threads is None:
        yield from _default_notes(ground, options, split, nodes)
    if split.on and not options.testing:
        yield from _split_notes(ground, nodes)


def _quota_warning(
    machine: Machine, ground: Survey, options: PlanOptions, nodes: Sequence[NodePlan]
) -> Iterator[str]:
    quota, threads = machine.cpu_quota, sum(node.threads for node in nodes)
    if quota is None:
        return
    limit = machine.limit("cpu_quota")
    source = f" ({limit.source})" if limit is not None else ""
    if threads > quota:
        yield (
            f"{threads} threads, but the CPU quota allows {counted(quota, 'CPU')}{source}: threads sleep "
            f"rather than spin; {counted(max(0, quota - 1), 'worker')} will be faster"
        )
    elif options.threads is None and threads == quota < sum(site.n_cores for site in _used(ground, nodes)):
        yield (
            f"the CPU quota allows {counted(quota, 'CPU')}{source}: {counted(threads - 1, 'worker')}; "
            "raise it for more"
        )


def _guests(ground: Survey, home: int, node: int, nodes: Sequence[NodePlan]) -> str:
    """What became of the CPUs of a node without usable memory."""
    cpus = {cpu for group in ground.groups[home] for cpu in group.cpus}
    taken = cpus & {cpu for plan in nodes for cpu in plan.cpus or ()}
    if not taken:
        return f"its {_cpus(cpus)} are left out; more workers than node {node} has cores would take them"
    some = "" if taken == cpus else f"of its {_cpus(cpus)}, "
    return f"{some}{'its ' * (not some)}{_cpus(taken)} joined node {node}"


def _cpus(cpus: Collection[int]) -> str:
    return f"CPU{'s' * (len(cpus) != 1)} {format_cpulist(cpus)}"


def _default_notes(
    ground: Survey, options: PlanOptions, split: Split, nodes: Sequence[NodePlan]
) -> Iterator[str]:
    used = _used(ground, nodes)
    efficient = sum(group.efficient for site in ground.sites for group in site.own)
    if efficient and options.pool_affinity != ALL:
        yield f"{counted(efficient, 'E core')} left free: a larger number of workers takes them last"
    cap = MAX_WORKERS_PER_NODE if split.on else MAX_WORKERS
    if any(site.n_cores - 1 > cap for site in used):
        n_cores = max(site.n_cores for site in used)
        yield f"at most {cap} workers a node by default, of {n_cores} cores: memory rarely feeds more"


def _split_notes(ground: Survey, nodes: Sequence[NodePlan]) -> Iterator[str]:
    used = [node.node for node in nodes]
    idle = [site.node for site in ground.sites if site.node not in used and site.n_cores]
    if idle:
        yield f"no slice on node{'s' * (len(idle) != 1)} {format_cpulist(idle)}: too few threads for it"
    counts = [node.threads for node in nodes]
    if max(counts) - min(counts) > 1:
        each = ", ".join(f"node {node.node} {node.threads}" for node in nodes)
        yield f"uneven nodes: threads are {each}, and rows in proportion"


def _used(ground: Survey, nodes: Sequence[NodePlan]) -> list[Site]:
    """Sites where threads run."""
    taken = {ground.homes[cpu] for node in nodes for cpu in node.cpus or ()}
    return [site for site in ground.sites if taken & {group.home for group in site.own}]
