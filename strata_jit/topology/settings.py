"""Settings of the kernel that decide how fast memory and CPUs are.

Owns where they stand: huge pages, automatic NUMA balancing, frequency governors, the kernel's command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from strata_jit.topology.cpus import CPU_DIR
from strata_jit.topology.description import HugePagePool, HugePages
from strata_jit.topology.nodes import NODE_DIR
from strata_jit.topology.sysfs import Tree

THP_DIR = "sys/kernel/mm/transparent_hugepage"
POOL_DIR = "sys/kernel/mm/hugepages"
NUMA_BALANCING = "proc/sys/kernel/numa_balancing"
ZONE_RECLAIM_MODE = "proc/sys/vm/zone_reclaim_mode"
KERNEL_CMDLINE = "proc/cmdline"
_POOL = re.compile(r"hugepages-([0-9]{1,12})kB")


def read_huge_pages(tree: Tree) -> HugePages:
    """Transparent huge pages, and the reserved pools of the machine and of each node."""
    pools = [*_pools(tree, POOL_DIR, None)]
    for node_id in tree.numbered(NODE_DIR, "node"):
        pools += _pools(tree, f"{NODE_DIR}/node{node_id}/hugepages", node_id)
    return HugePages(
        tree.read_choice(f"{THP_DIR}/enabled"),
        tree.read_choice(f"{THP_DIR}/defrag"),
        tree.read_choice(f"{THP_DIR}/shmem_enabled"),
        tuple(pools),
    )


def read_numa_balancing(tree: Tree) -> int | None:
    return tree.read_int(NUMA_BALANCING)


def read_zone_reclaim_mode(tree: Tree) -> int | None:
    return tree.read_int(ZONE_RECLAIM_MODE)


def read_governors(tree: Tree, cpus: frozenset[int]) -> tuple[str, ...]:
    """Governors of these CPUs, each once, sorted."""
    found = {tree.read(f"{CPU_DIR}/cpu{cpu}/cpufreq/scaling_governor") for cpu in cpus}
    return tuple(sorted(governor for governor in found if governor))


def read_kernel_cmdline(tree: Tree) -> str | None:
    return tree.read(KERNEL_CMDLINE)


def _pools(tree: Tree, directory: str, node: int | None) -> Iterator[HugePagePool]:
    """Ascending by page size."""
    names = [match for name in tree.names(directory) if (match := _POOL.fullmatch(name))]
    for match in sorted(names, key=lambda match: int(match[1])):
        path = PurePosixPath(directory, match[0])
        total = tree.read_int(f"{path}/nr_hugepages")
        if total is not None:
            yield HugePagePool(int(match[1]) * 1024, total, tree.read_int(f"{path}/free_hugepages"), node)
