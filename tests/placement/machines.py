"""Machines that are only described: by hand for a test's table, at random for the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from strata_jit.topology.description import Core, Limit, Machine, Node

GIB = 1 << 30


def numa(*cores: int, siblings: int = 1, mask: set[int] | None = None, quota: int | None = None) -> Machine:
    """Nodes 0, 1, ... with so many cores, 32 GiB each. First CPUs come in order, then all second siblings.

    `mask`: the CPUs that may be used, None for all.
    """
    total = sum(cores)
    allowed = frozenset(range(total * siblings)) if mask is None else frozenset(mask)
    starts = [sum(cores[:i]) for i in range(len(cores) + 1)]
    nodes, found = [], []
    for node_id, (start, stop) in enumerate(pairwise(starts)):
        own = [tuple(range(core, total * siblings, total)) for core in range(start, stop)]
        distances = tuple(
            10 if other == node_id else 20 + abs(other - node_id) for other in range(len(cores))
        )
        cpus = frozenset(cpu for core in own for cpu in core)
        nodes.append(Node(node_id, cpus, 32 * GIB, 30 * GIB, 1 * GIB, distances))
        for core_id, every in enumerate(own):
            if usable := tuple(cpu for cpu in every if cpu in allowed):
                found.append(Core(node_id, core_id, usable, every, node_id))
    limits = () if quota is None else (Limit("cpu_quota", quota, "sys/fs/cgroup/cpu.max"),)
    return Machine(allowed, tuple(found), tuple(nodes), quota, limits=limits)


def with_nodes(machine: Machine, **changes: dict[int, object]) -> Machine:
    """The machine with fields of some nodes changed: `memory_bytes={1: 0}`."""
    nodes = {node.node_id: node for node in machine.nodes}
    for field, values in changes.items():
        for node_id, value in values.items():
            nodes[node_id] = replace(nodes[node_id], **{field: value})
    return replace(machine, nodes=tuple(nodes.values()))


def hybrid(n_fast: int, n_efficient: int, mask: set[int] | None = None) -> Machine:
    """One node of P cores with two CPUs each, neighbours, then E cores with one."""
    fast = [Core(0, i, (2 * i, 2 * i + 1)) for i in range(n_fast)]
    efficient = [Core(0, n_fast + i, (2 * n_fast + i,), kind="E") for i in range(n_efficient)]
    allowed = frozenset(cpu for core in (*fast, *efficient) for cpu in core.cpus)
    if mask is not None:
        allowed &= mask
    cores = [replace(c, cpus=tuple(cpu for cpu in c.cpus if cpu in allowed)) for c in (*fast, *efficient)]
    return Machine(allowed, tuple(core for core in cores if core.cpus), (Node(0, allowed, 64 * GIB),))


@st.composite
def regular_machines(draw: st.DrawFn) -> Machine:
    """Machines as they are sold, some with a mask, a quota, or nodes whose memory cannot be had."""
    cores = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    siblings = draw(st.integers(1, 2))
    cpus = st.sets(st.integers(0, sum(cores) * siblings - 1), min_size=1)
    quota = draw(st.none() | st.integers(1, 30))
    machine = numa(*cores, siblings=siblings, mask=draw(st.none() | cpus), quota=quota)
    ids = st.integers(0, len(cores) - 1)
    machine = with_nodes(
        machine, memory_bytes=draw(st.just({}) | st.dictionaries(ids, st.just(0), max_size=2))
    )
    return with_nodes(
        machine, mem_allowed=draw(st.just({}) | st.dictionaries(ids, st.just(False), max_size=2))
    )


@st.composite
def odd_machines(draw: st.DrawFn) -> Machine:
    """Any machine at all: holes in all numbers, nodes without CPUs, memory or distances, masks, quotas."""
    node_ids = draw(st.lists(st.integers(0, 70), max_size=6, unique=True))
    numbers = iter(draw(st.lists(st.integers(0, 2000), min_size=40, max_size=40, unique=True)))
    homes = st.sampled_from(node_ids) if node_ids else st.integers(0, 3)
    cpus: dict[int, set[int]] = {node: set() for node in node_ids}
    allowed: set[int] = set()
    cores = []
    for core_id in range(draw(st.integers(0, 12))):
        own = sorted(next(numbers) for _ in range(draw(st.integers(1, 3))))
        home = draw(homes)
        if draw(st.integers(0, 20)):  # now and then a CPU is on no node
            cpus.setdefault(home, set()).update(own)
        usable = tuple(cpu for cpu in own if draw(st.integers(0, 5)))
        allowed.update(usable)
        kind = draw(st.sampled_from(["P", "P", "E"]))
        if usable:
            cores.append(Core(draw(st.integers(0, 2)), core_id, usable, tuple(own), home, kind))
    nodes = tuple(_node(draw, node, cpus[node], len(node_ids)) for node in sorted(node_ids))
    return Machine(
        frozenset(allowed),
        tuple(sorted(cores, key=lambda core: core.cpus)),
        nodes,
        draw(st.none() | st.integers(1, 30)),
        available_bytes=draw(st.none() | st.integers(0, 64 * GIB)),
        memory_room_bytes=draw(st.none() | st.integers(-GIB, 64 * GIB)),
        zone_reclaim_mode=draw(st.none() | st.integers(0, 1)),
    )


def _node(draw: st.DrawFn, node_id: int, cpus: set[int], n_nodes: int) -> Node:
    memory = draw(st.sampled_from([None, 0, 32 * GIB, 32 * GIB]))
    row = st.lists(st.integers(0, 255), min_size=n_nodes, max_size=n_nodes)
    return Node(
        node_id,
        frozenset(cpus),
        memory,
        draw(st.none() | st.integers(0, memory or 0)),
        draw(st.none() | st.integers(0, GIB)),
        tuple(draw(st.just([]) | row)),
        draw(st.integers(0, 5)) > 0,
    )


machines = regular_machines() | odd_machines()
