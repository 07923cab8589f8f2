"""What this process may use: CPUs, CPU time, memory and where, with the file that says each.

Owns which limits count; cgroups finds those of control groups. For a recorded tree only its files are read;
for the running system the kernel is asked for the mask and the size of /dev/shm.
"""

from __future__ import annotations

import os
import re

from strata_jit.errors import TopologyError
from strata_jit.topology import cgroups
from strata_jit.topology.affinity import allowed_cpus
from strata_jit.topology.cpulist import parse_cpulist, parse_cpumask
from strata_jit.topology.description import Limit
from strata_jit.topology.sysfs import Tree

STATUS = "proc/self/status"
PROC_LIMITS = "proc/self/limits"
SHM_DIR = "/dev/shm"
GIVEN = "given by the caller"


def read_limits(tree: Tree, given: frozenset[int] | None) -> tuple[Limit, ...]:
    """All limits that something states; `given` stands for the affinity mask if it is not None."""
    found = (
        _affinity(tree, given),
        _set_limit("cpuset_cpus", cgroups.cpuset_cpus(tree)),
        _status_set(tree, "mems_allowed", "Mems_allowed")
        or _set_limit("mems_allowed", cgroups.cpuset_mems(tree)),
        _number("cpu_quota", cgroups.cpu_quota(tree)),
        _number("memory_limit", cgroups.memory_limit(tree)),
        _number("memory_room", cgroups.memory_room(tree)),
        _memlock(tree),
        _shm(tree),
    )
    return tuple(limit for limit in found if limit is not None)


def numbers_of(limits: tuple[Limit, ...], name: str) -> frozenset[int] | None:
    """CPUs or nodes of the limit of that name; None where there is none."""
    values = (limit.value for limit in limits if limit.name == name)
    return next((frozenset(value) for value in values if isinstance(value, tuple)), None)


def number_of(limits: tuple[Limit, ...], name: str) -> int | None:
    """Value of the limit of that name; None where there is none, or it is unlimited."""
    values = (limit.value for limit in limits if limit.name == name)
    return next((value for value in values if isinstance(value, int)), None)


def allowed_of(limits: tuple[Limit, ...], online: frozenset[int]) -> frozenset[int]:
    """CPUs that are online, in the mask and in the cpuset.

    A cpuset without any of the others is not this process's: its path was that of another namespace.
    """
    mask, cpuset = numbers_of(limits, "affinity"), numbers_of(limits, "cpuset_cpus")
    allowed = online if mask is None else mask & online
    return allowed & cpuset or allowed if cpuset is not None else allowed


def _affinity(tree: Tree, given: frozenset[int] | None) -> Limit | None:
    if given is not None:
        return _cpus("affinity", given, GIVEN)
    if tree.live:
        return _cpus("affinity", allowed_cpus(), "sched_getaffinity")
    return _status_set(tree, "affinity", "Cpus_allowed")


def _status_set(tree: Tree, name: str, field: str) -> Limit | None:
    """A set that /proc/self/status states, as a list or (before Linux 2.6.24) as a mask only."""
    table = tree.read_table(STATUS)
    for key, parse in ((f"{field}_list", parse_cpulist), (field, parse_cpumask)):
        try:
            numbers = parse(table.get(key, ""))
        except TopologyError:
            continue
        if numbers:
            return _cpus(name, numbers, f"/{STATUS}")
    return None


def _memlock(tree: Tree) -> Limit | None:
    """The soft limit; None as value where it is unlimited."""
    pattern = r"^Max locked memory\s+([0-9]{1,20}|unlimited)\s"
    match = re.search(pattern, tree.read(PROC_LIMITS) or "", re.MULTILINE)
    if match is None:
        return None
    return Limit("memlock", None if match[1] == "unlimited" else int(match[1]), f"/{PROC_LIMITS}")


def _shm(tree: Tree) -> Limit | None:
    if not tree.live:
        return None
    try:
        found = os.statvfs(SHM_DIR)
    except OSError:
        return None
    return Limit("shm_size", found.f_frsize * found.f_blocks, SHM_DIR)


def _cpus(name: str, numbers: frozenset[int], source: str) -> Limit:
    return Limit(name, tuple(sorted(numbers)), source)


def _set_limit(name: str, found: cgroups.FoundSet | None) -> Limit | None:
    return None if found is None else _cpus(name, found.numbers, f"/{found.source}")


def _number(name: str, found: cgroups.Found | None) -> Limit | None:
    return None if found is None else Limit(name, found.value, f"/{found.source}")
