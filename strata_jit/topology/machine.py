"""What the machine is, and what this process may use of it: read from sysfs, procfs and cgroup files.

Owns the order of reading; binds nothing. Everything comes from files below `root`, so a recorded tree can be
read too; of the running system the kernel is asked for the affinity mask and the size of /dev/shm as well. A
file that is missing or malformed makes its field unknown, never an error.
"""

from __future__ import annotations

from pathlib import Path

from strata_jit.errors import TopologyError
from strata_jit.topology import cpus, nodes, settings
from strata_jit.topology.description import (
    Cache,
    Core,
    HugePagePool,
    HugePages,
    Limit,
    Machine,
    Node,
    Package,
)
from strata_jit.topology.limits import allowed_of, number_of, numbers_of, read_limits
from strata_jit.topology.sysfs import Tree

__all__ = [
    "Cache",
    "Core",
    "HugePagePool",
    "HugePages",
    "Limit",
    "Machine",
    "Node",
    "Package",
    "read_machine",
]


def read_machine(root: Path | str = "/", allowed: frozenset[int] | None = None) -> Machine:
    """Read the machine below `root`.

    `allowed` overrides the affinity mask. By default it is the process's own where `root` is "/"; elsewhere
    what proc/self/status says, else all online CPUs. TopologyError if no CPU is left.
    """
    tree = Tree(Path(root))
    limits = read_limits(tree, allowed)
    online, offline = _cpu_sets(tree, limits)
    usable = allowed_of(limits, online)
    if not usable:
        raise TopologyError(f"no CPU that this process may use was found below {root}")
    machine_nodes = nodes.read_nodes(tree, online, numbers_of(limits, "mems_allowed"))
    all_cores = nodes.place_cores(cpus.read_cores(tree, online, usable), machine_nodes)
    memory_bytes, available_bytes = nodes.read_memory(tree)
    return Machine(
        allowed=usable,
        cores=tuple(sorted((core for core in all_cores if core.cpus), key=lambda core: core.cpus)),
        nodes=machine_nodes,
        cpu_quota=number_of(limits, "cpu_quota"),
        other_cores=tuple(core for core in all_cores if not core.cpus),
        packages=cpus.packages_of(all_cores),
        caches=cpus.read_caches(tree, online),
        cpus_online=online,
        cpus_offline=offline,
        nodes_offline=nodes.read_nodes_offline(tree),
        cpu_model=cpus.read_cpu_model(tree),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        memory_limit_bytes=number_of(limits, "memory_limit"),
        memory_room_bytes=number_of(limits, "memory_room"),
        memlock_bytes=number_of(limits, "memlock"),
        shm_bytes=number_of(limits, "shm_size"),
        huge_pages=settings.read_huge_pages(tree),
        numa_balancing=settings.read_numa_balancing(tree),
        zone_reclaim_mode=settings.read_zone_reclaim_mode(tree),
        governors=settings.read_governors(tree, usable),
        kernel_cmdline=settings.read_kernel_cmdline(tree),
        limits=limits,
    )


def _cpu_sets(tree: Tree, limits: tuple[Limit, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """CPUs online and offline; without sysfs, those that anything else names count as online."""
    found = cpus.read_cpu_sets(tree)
    if found.online:
        return found.online, found.offline
    others = (
        cpus.cpus_of_cpuinfo(tree),
        numbers_of(limits, "affinity"),
        numbers_of(limits, "cpuset_cpus"),
    )
    return next((other for other in others if other), frozenset()), frozenset()
