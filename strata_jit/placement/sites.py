"""Where node processes can be: the nodes with usable memory, and the CPUs that can work for each.

Owns the order in which CPUs are taken. A node without memory of its own, or whose memory this process may not
have, gets no slice. Its CPUs are guests of the nearest node that can have one: they reach its memory over the
same link as anyone else, so a default leaves them out, and a larger number of workers takes them before SMT
siblings. Where no other CPUs work for a node, the guests are its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from strata_jit.placement.options import ALL, P_CORES
from strata_jit.topology.description import Machine

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Group:
    """The CPUs of one core that may be used and lie on one node: what one thread should have to itself."""

    home: int
    cpus: tuple[int, ...]
    efficient: bool
    """An E core, on a machine where P cores may be used too."""


@dataclass(frozen=True, slots=True)
class Site:
    """A node that can have a slice."""

    node: int
    own: tuple[Group, ...]
    tiers: Mapping[Key, tuple[int, ...]]
    """All CPUs that can work for it, best first, in steps. One is used up at every site before the next
    begins at any."""
    n_cores: int
    """Cores that a default counts."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(cpu for tier in self.tiers.values() for cpu in tier)


@dataclass(frozen=True, slots=True)
class Survey:
    """The sites of a machine."""

    sites: tuple[Site, ...]
    """Ascending by node."""
    groups: Mapping[int, tuple[Group, ...]]
    """Node -> its cores that may be used, ascending by first CPU."""
    guests: Mapping[int, int]
    """Node whose CPUs lack memory -> the node that they can work for."""
    affinity: str | None
    any_fast: bool
    """Whether some of the cores that may be used is no E core."""

    @property
    def homes(self) -> dict[int, int]:
        """CPU -> its NUMA node."""
        return {cpu: home for home, groups in self.groups.items() for group in groups for cpu in group.cpus}

    @property
    def n_cpus(self) -> int:
        return len(self.homes)


def survey(machine: Machine, affinity: str | None) -> Survey:
    """Sites of the CPUs that this process may use and `affinity` allows."""
    found = _groups(machine)
    kept = [group for group in found if not (group.efficient and affinity == P_CORES)]
    groups = {home: tuple(g for g in kept if g.home == home) for home in sorted({g.home for g in kept})}
    targets = _targets(machine, groups)
    members = {node: [h for h in groups if targets[h] == node] for node in sorted(set(targets.values()))}
    sites = tuple(
        _site(machine, node, {h: groups[h] for h in homes}, affinity) for node, homes in members.items()
    )
    guests = {home: node for home, node in targets.items() if home != node}
    return Survey(sites, groups, guests, affinity, _any_fast(machine))


def merged(machine: Machine, ground: Survey, site: Site) -> Site:
    """The site with all other CPUs as its guests, nearest first: for a pool in one process."""
    own = {group.home for group in site.own}
    return _collect(machine, site.node, own, ground.groups, ground.affinity)


def _groups(machine: Machine) -> list[Group]:
    """Cores in the order of their first CPU; one whose CPUs lie on several nodes is cut."""
    homes = {cpu: node.node_id for node in machine.nodes for cpu in node.cpus}
    any_fast = _any_fast(machine)
    groups = []
    for core in machine.cores:
        by_home: dict[int, list[int]] = {}
        for cpu in core.cpus:
            if cpu in machine.allowed:
                by_home.setdefault(homes.get(cpu, core.node), []).append(cpu)
        groups += [Group(home, tuple(cpus), any_fast and core.kind == "E") for home, cpus in by_home.items()]
    return sorted(groups, key=lambda group: group.cpus)


def _any_fast(machine: Machine) -> bool:
    return any(core.kind == "P" for core in machine.cores if machine.allowed.intersection(core.cpus))


def _targets(machine: Machine, groups: Mapping[int, Sequence[Group]]) -> dict[int, int]:
    """Node with CPUs -> node that they work for: itself, or the nearest that can have a slice.

    Of several that are as near, the one with the fewest guests. If no node has both CPUs and memory, the
    nearest with memory. If none has memory at all, the description is wrong and each stays by itself, as
    does a node that is not described.
    """
    usable = {node.node_id for node in machine.nodes if node.has_memory and node.mem_allowed}
    known = {node.node_id for node in machine.nodes}
    hosts = sorted(usable & set(groups)) or sorted(usable)
    n_guests = dict.fromkeys(hosts, 0)
    targets = {}
    for home, own in groups.items():
        if home in usable or not hosts or home not in known:
            targets[home] = home
            continue
        nearest = min(hosts, key=lambda node: (machine.distance(home, node), n_guests[node], node))
        n_guests[nearest] += len(own)
        targets[home] = nearest
    return targets


def _site(machine: Machine, node: int, groups: Mapping[int, tuple[Group, ...]], affinity: str | None) -> Site:
    own = {node} if node in groups else set(groups)
    return _collect(machine, node, own, groups, affinity)


def _collect(
    machine: Machine,
    node: int,
    own: Collection[int],
    groups: Mapping[int, tuple[Group, ...]],
    affinity: str | None,
) -> Site:
    """A site from the cores of the nodes `own` and of the others in `groups`."""
    nearest = sorted(groups, key=lambda home: (home not in own, machine.distance(node, home), home))
    tiers: dict[Key, list[int]] = {}
    for rank, home in enumerate(nearest):
        for group in groups[home]:
            for depth, cpu in enumerate(group.cpus):
                key = _key(depth, 0 if home in own else rank, group.efficient, affinity)
                tiers.setdefault(key, []).append(cpu)
    mine = tuple(group for home in nearest if home in own for group in groups[home])
    counted = [group for group in mine if affinity == ALL or not group.efficient]
    return Site(node, mine, {key: tuple(tiers[key]) for key in sorted(tiers)}, len(counted))


def _key(depth: int, guest: int, efficient: bool, affinity: str | None) -> Key:
    """What a CPU is taken by: lower first. `depth`: how many of its core's CPUs come before it."""
    return (depth, guest, int(efficient)) if affinity == ALL else (int(efficient), depth, guest)
