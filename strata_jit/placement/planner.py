"""From a machine, a model's needs and options to a plan.

Owns the order of decisions: which CPUs are there, split or not, how many threads, on which CPUs, with which
rows; the rules themselves are in the modules beside this one. Pure and total: it has an answer for every
machine, however odd, and puts what is wrong into the plan's warnings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from strata_jit.placement.counts import one_node_threads
from strata_jit.placement.options import DEFAULT_TEST_SLICES, PlanOptions
from strata_jit.placement.records import NodePlan, Plan, Split, Worker
from strata_jit.placement.remarks import notes, warnings
from strata_jit.placement.rules import decide
from strata_jit.placement.sites import Site, Survey, merged, survey
from strata_jit.placement.sizes import ModelSizes, room_warnings, with_room, with_sizes
from strata_jit.topology.description import Machine

NOWHERE = Site(0, (), {}, 0)
"""Stands for the site of a machine without any CPU."""


def plan(machine: Machine, sizes: ModelSizes | None = None, options: PlanOptions | None = None) -> Plan:
    """Plan the node processes.

    sizes    what the model needs; None plans threads and CPUs alone. The rest of a plan does not depend on it
    options  what was asked for

    A default never spans two nodes without a split: a team that reads its matrices from wherever they happen
    to lie is slower than half of it on one node. So whether there can be a split is decided first, and after
    a refusal a default is the one of a single node.
    """
    options = options or PlanOptions()
    ground = survey(machine, options.pool_affinity)
    if options.testing:
        n_slices = options.test_slices or DEFAULT_TEST_SLICES
        split = Split(True, f"test mode: {n_slices} slices", True)
        nodes = _slices(machine, ground, options, n_slices)
    else:
        decision = decide(ground, machine.cpu_quota, options)
        split = decision.split
        nodes = _split_nodes(ground, decision.counts) if split.on else _one_node(machine, ground, options)
    return _finish(machine, ground, sizes, options, split, nodes)


def _split_nodes(ground: Survey, counts: Sequence[int]) -> list[NodePlan]:
    return [NodePlan(site.node, n, site.cpus[:n]) for site, n in zip(ground.sites, counts, strict=True) if n]


def _one_node(machine: Machine, ground: Survey, options: PlanOptions) -> list[NodePlan]:
    node, threads, cpus = _team(machine, ground, options, 1)
    return [NodePlan(node, threads, cpus)]


def _slices(machine: Machine, ground: Survey, options: PlanOptions, n_slices: int) -> list[NodePlan]:
    """The team of one node, dealt to the slices in turn. Each has a thread, and so as many workers are added
    as that takes: a slice without one would never be finished."""
    _, threads, cpus = _team(machine, ground, options, n_slices)
    dealt = [range(i, threads, n_slices) for i in range(n_slices)]
    return [
        NodePlan(i, len(own), None if cpus is None else tuple(cpus[thread] for thread in own))
        for i, own in enumerate(dealt)
    ]


def _team(
    machine: Machine, ground: Survey, options: PlanOptions, at_least: int
) -> tuple[int, int, tuple[int, ...] | None]:
    """(node, threads, their CPUs) of a pool without placement. CPUs None: not pinned.

    The node is the one with most cores that a default counts, the first of equals: of uneven nodes the first
    may be tiny. A larger number of workers goes on to its guests' and the other nodes' cores.
    """
    site = max(ground.sites, key=lambda s: (s.n_cores, len(s.cpus), -s.node), default=NOWHERE)
    wanted = options.threads or one_node_threads(site.n_cores, machine.cpu_quota)
    threads = max(wanted, at_least)
    cpus = merged(machine, ground, site).cpus
    pinned = options.pinned and threads <= len(cpus)
    return site.node, threads, cpus[:threads] if pinned else None


def _finish(
    machine: Machine,
    ground: Survey,
    sizes: ModelSizes | None,
    options: PlanOptions,
    split: Split,
    nodes: Sequence[NodePlan],
) -> Plan:
    """The plan of these nodes, with all that follows from them."""
    nodes = with_room(with_sizes(nodes, sizes), machine, slices=options.testing)
    threads = sum(node.threads for node in nodes)
    quota = machine.cpu_quota
    return Plan(
        split=split,
        nodes=tuple(nodes),
        workers=_workers(ground, nodes),
        spin=threads <= ground.n_cpus and (quota is None or threads <= quota),
        placed=not options.testing and _placed(ground, nodes),
        spare=_spare(ground, nodes),
        warnings=(*warnings(machine, ground, options, nodes), *room_warnings(nodes, machine)),
        notes=tuple(notes(machine, ground, options, split, nodes)),
    )


def _workers(ground: Survey, nodes: Sequence[NodePlan]) -> tuple[Worker, ...]:
    homes = ground.homes
    workers: list[Worker] = []
    for node in nodes:
        if node.cpus is None:
            workers += [Worker(None, node.node)] * node.threads
        else:
            workers += [Worker(cpu, homes[cpu]) for cpu in node.cpus]
    return tuple(workers[1:])  # the first is the host core's own


def _placed(ground: Survey, nodes: Sequence[NodePlan]) -> bool:
    """Whether every thread is pinned where the first touch of a page puts it on its node."""
    reach = {cpu: ground.guests.get(home, home) for cpu, home in ground.homes.items()}
    return all(node.cpus is not None and {reach[cpu] for cpu in node.cpus} == {node.node} for node in nodes)


def _spare(ground: Survey, nodes: Sequence[NodePlan]) -> tuple[int, ...]:
    """CPUs of cores without a thread, on the nodes where threads run; none if these are not pinned."""
    taken = set(chain.from_iterable(node.cpus or () for node in nodes))
    homes = {ground.homes[cpu] for cpu in taken}
    groups = [group for home in homes for group in ground.groups[home]]
    return tuple(sorted(cpu for group in groups if not taken & set(group.cpus) for cpu in group.cpus))
