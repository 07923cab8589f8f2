"""CPUs, cores, packages and caches as /sys/devices/system/cpu describes them.

Owns which CPUs make a core and which cores a package. A core is what the kernel lists as thread siblings
with equal core ids; where it lists none, the CPUs with equal package and core id; without any topology, each
CPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from strata_jit.topology.description import Cache, Core, CoreKind, Package
from strata_jit.topology.sysfs import Tree

CPU_DIR = "sys/devices/system/cpu"
CORE_PMU = "sys/devices/cpu_core/cpus"
SMALL_PMUS = ("sys/devices/cpu_atom/cpus", "sys/devices/cpu_lowpower/cpus")
EFFICIENCY_PERCENT = 90
"""A core below this share of the greatest capacity is an efficiency core. Favoured cores of one kind differ
by a few percent."""
_SIZE = re.compile(r"([0-9]{1,15})([KMG]?)B?")


@dataclass(frozen=True, slots=True)
class CpuSets:
    """Which CPUs there are."""

    online: frozenset[int]
    offline: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Place:
    """What the topology files of one CPU say."""

    package: int | None
    core_id: int | None
    siblings: frozenset[int]
    package_cpus: frozenset[int]


def read_cpu_sets(tree: Tree) -> CpuSets:
    """CPUs online and offline; none where sysfs has no CPU directory.

    A CPU without topology files is offline where others have them.
    """
    listed = frozenset(tree.numbered(CPU_DIR, "cpu"))
    online = tree.read_list(f"{CPU_DIR}/online")
    if not online:
        online = frozenset(cpu for cpu in listed if tree.read_int(f"{CPU_DIR}/cpu{cpu}/online") != 0)
    described = frozenset(cpu for cpu in online if tree.exists(f"{CPU_DIR}/cpu{cpu}/topology"))
    online = described or online
    present = tree.read_list(f"{CPU_DIR}/present") or listed
    return CpuSets(online, present - online)


def cpus_of_cpuinfo(tree: Tree) -> frozenset[int]:
    """CPUs that /proc/cpuinfo lists."""
    found = re.findall(r"^processor\s*:?\s*([0-9]{1,6})\b", tree.read("proc/cpuinfo") or "", re.MULTILINE)
    return frozenset(int(cpu) for cpu in found)


def read_cpu_model(tree: Tree) -> str | None:
    """Name of the processor, where /proc/cpuinfo has one."""
    names = r"^(?:model name|Model|cpu model|cpu|Processor|Hardware)[ \t]*:[ \t]*(\S.*)$"
    match = re.search(names, tree.read("proc/cpuinfo") or "", re.MULTILINE)
    return " ".join(match[1].split()) if match else None


def read_cores(tree: Tree, online: frozenset[int], allowed: frozenset[int]) -> tuple[Core, ...]:
    """All cores, ascending by first CPU; `node` is left for those who know the nodes."""
    places = {cpu: _read_place(tree, cpu, online) for cpu in sorted(online)}
    packages = _package_numbers(places)
    capacities = {cpu: tree.read_int(f"{CPU_DIR}/cpu{cpu}/cpu_capacity") for cpu in sorted(online)}
    efficient = _efficiency_cpus(tree, online, capacities)
    cores = []
    for siblings in _sibling_groups(places):
        first = siblings[0]
        core_id = places[first].core_id
        kind: CoreKind = "E" if first in efficient else "P"
        usable = tuple(cpu for cpu in siblings if cpu in allowed)
        number = first if core_id is None else core_id
        cores.append(Core(packages[first], number, usable, siblings, 0, kind, capacities[first]))
    return tuple(cores)


def packages_of(cores: tuple[Core, ...]) -> tuple[Package, ...]:
    """The packages of all cores, ascending by id."""
    by_id: dict[int, list[Core]] = {}
    for core in cores:
        by_id.setdefault(core.package, []).append(core)
    return tuple(
        Package(number, frozenset(cpu for core in own for cpu in core.siblings), len(own))
        for number, own in sorted(by_id.items())
    )


def read_caches(tree: Tree, online: frozenset[int]) -> tuple[Cache, ...]:
    """Every cache once, ascending by level, then by first CPU."""
    found: dict[tuple[int, str, frozenset[int]], Cache] = {}
    for cpu in sorted(online):
        directory = f"{CPU_DIR}/cpu{cpu}/cache"
        for index in tree.numbered(directory, "index"):
            path = f"{directory}/index{index}"
            level, kind = tree.read_int(f"{path}/level"), tree.read(f"{path}/type")
            shared = tree.read_set(f"{path}/shared_cpu_list", f"{path}/shared_cpu_map") or frozenset()
            if level is None or not kind:
                continue
            cpus = shared & online | {cpu}
            if (level, kind, cpus) not in found:
                size, line = _size(tree.read(f"{path}/size")), tree.read_int(f"{path}/coherency_line_size")
                found[level, kind, cpus] = Cache(level, kind, size, line, cpus)
    return tuple(sorted(found.values(), key=lambda cache: (cache.level, min(cache.cpus), cache.kind)))


def _read_place(tree: Tree, cpu: int, online: frozenset[int]) -> _Place:
    base = f"{CPU_DIR}/cpu{cpu}/topology"
    package, core_id = tree.read_int(f"{base}/physical_package_id"), tree.read_int(f"{base}/core_id")
    names = ("core_cpus_list", "thread_siblings_list", "core_cpus", "thread_siblings")
    siblings = tree.read_set(*(f"{base}/{name}" for name in names)) or frozenset()
    names = ("package_cpus_list", "core_siblings_list", "package_cpus", "core_siblings")
    package_cpus = tree.read_set(*(f"{base}/{name}" for name in names)) or frozenset()
    return _Place(
        package if package is not None and package >= 0 else None,
        core_id if core_id is not None and core_id >= 0 else None,
        siblings & online if cpu in siblings else frozenset(),
        package_cpus & online if cpu in package_cpus else frozenset(),
    )


def _sibling_groups(places: dict[int, _Place]) -> list[tuple[int, ...]]:
    """CPUs of each core; every CPU is in exactly one, even where the lists contradict each other."""
    groups: dict[object, list[int]] = {}
    taken: set[int] = set()
    for cpu, place in places.items():
        if cpu in taken:
            continue
        if place.siblings:
            group = [other for other in sorted(place.siblings - taken) if _one_core(places, cpu, other)]
            groups[cpu] = group
            taken.update(group)
        elif place.package is None or place.core_id is None:
            groups[cpu] = [cpu]
        else:
            groups.setdefault((place.package, place.core_id), []).append(cpu)
    return sorted(tuple(group) for group in groups.values())


def _one_core(places: dict[int, _Place], cpu: int, other: int) -> bool:
    """Whether both are of one core. The two cores of a Bulldozer module are listed as siblings as well."""
    return cpu in places[other].siblings and places[cpu].core_id == places[other].core_id


def _package_numbers(places: dict[int, _Place]) -> dict[int, int]:
    """Package id of each CPU: the kernel's, unless it gives one id to packages that it lists apart.

    This happens where packages are numbered within books or drawers; then they are counted by first CPU.
    """
    groups: dict[tuple[int | None, frozenset[int]], list[int]] = {}
    for cpu, place in places.items():
        groups.setdefault((place.package, place.package_cpus), []).append(cpu)
    ids = [package or 0 for package, _ in groups]
    alike = len(set(ids)) == len(ids)
    return {
        cpu: (package or 0) if alike else number
        for number, ((package, _), cpus) in enumerate(groups.items())
        for cpu in cpus
    }


def _efficiency_cpus(tree: Tree, online: frozenset[int], capacities: dict[int, int | None]) -> frozenset[int]:
    """CPUs of efficiency cores; none where the data is incomplete."""
    big = tree.read_list(CORE_PMU)
    small = [found for path in SMALL_PMUS if (found := tree.read_list(path))]
    if big is not None and small:
        return frozenset().union(*small) & online - big
    known = [capacity for capacity in capacities.values() if capacity is not None and capacity > 0]
    if len(known) < len(online):
        return frozenset()
    least = max(known) * EFFICIENCY_PERCENT
    return frozenset(cpu for cpu, capacity in capacities.items() if (capacity or 0) * 100 < least)


def _size(text: str | None) -> int | None:
    match = _SIZE.fullmatch(text or "")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else None
