"""What the machine is, and what this process may use of it: read from sysfs, procfs and cgroup files.

Owns the reading; binds nothing. Everything comes from files below `root`, so a recorded tree can be read too;
only the affinity mask of the running process is asked from the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from strata_jit.errors import TopologyError
from strata_jit.topology.affinity import allowed_cpus
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

CPU_DIR = "sys/devices/system/cpu"
NODE_DIR = "sys/devices/system/node"
CGROUP_DIR = "sys/fs/cgroup"


def read_machine(root: Path | str = "/", allowed: frozenset[int] | None = None) -> Machine:
    """Read the machine below `root`.

    `allowed` overrides the affinity mask; by default it is the process's own where `root` is "/", elsewhere
    all online CPUs. TopologyError if no CPU is left.
    """
    root = Path(root)
    if allowed is None:
        allowed = allowed_cpus() if root == Path("/") else _online(root)
    if not allowed:
        raise TopologyError(f"no CPU that this process may use was found below {root}")
    return Machine(allowed, _cores(root, allowed), _nodes(root), cpu_quota(root))


def parse_cpulist(text: str) -> frozenset[int]:
    """CPUs of a list such as "0-3,8,10-14:2" (first-last:step); TopologyError if it is not one."""
    cpus: set[int] = set()
    for item in text.strip().split(","):
        if not item:
            continue
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", item.strip())
        if match is None:
            raise TopologyError(f"CPU list {text.strip()!r}: found {item!r}, expected N, N-M or N-M:STEP")
        first = int(match[1])
        cpus.update(range(first, int(match[2] or first) + 1, int(match[3] or 1) or 1))
    return frozenset(cpus)


def cpu_quota(root: Path) -> int | None:
    """Floor of the tightest CPU quota of this process's cgroup and its ancestors (v1 and v2), at least 1."""
    shares = list(_quota_shares(root))
    return max(1, int(min(shares))) if shares else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None


def _online(root: Path) -> frozenset[int]:
    text = _read(root / CPU_DIR / "online")
    if text:
        return parse_cpulist(text)
    return frozenset(int(p.name[3:]) for p in (root / CPU_DIR).glob("cpu[0-9]*"))


def _cores(root: Path, allowed: frozenset[int]) -> tuple[Core, ...]:
    """Allowed CPUs by (package, core id); a CPU without topology files is a core of its own."""
    siblings: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(allowed):
        directory = root / CPU_DIR / f"cpu{cpu}" / "topology"
        package = _read_int(directory / "physical_package_id")
        core_id = _read_int(directory / "core_id")
        if package is None or core_id is None or core_id < 0:
            siblings[(package or 0, cpu, cpu)] = [cpu]
        else:
            siblings.setdefault((package, core_id, -1), []).append(cpu)
    cores = [Core(package, core_id, tuple(cpus)) for (package, core_id, _), cpus in siblings.items()]
    return tuple(sorted(cores, key=lambda core: core.cpus))


def _nodes(root: Path) -> tuple[Node, ...]:
    nodes = []
    for directory in (root / NODE_DIR).glob("node[0-9]*"):
        text = _read(directory / "cpulist")
        if text and directory.name[4:].isdigit():
            nodes.append(Node(int(directory.name[4:]), parse_cpulist(text)))
    return tuple(sorted(nodes, key=lambda node: node.node_id))


def _quota_shares(root: Path) -> Iterator[float]:
    """Quota / period of every cgroup level that sets one."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if not controllers:
            for mount in (root / CGROUP_DIR, root / CGROUP_DIR / "unified"):
                for level in _levels(mount, path):
                    yield from _v2_share(level)
        elif "cpu" in names:
            for mount in (root / CGROUP_DIR / controllers, root / CGROUP_DIR / "cpu"):
                for level in _levels(mount, path):
                    yield from _v1_share(level)


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup and its ancestors up to the mount; in a container often only the mount exists."""
    level = mount / path.lstrip("/")
    yield level
    if level != mount:
        yield from (parent for parent in level.parents if parent == mount or mount in parent.parents)


def _v2_share(level: Path) -> Iterator[float]:
    match = re.fullmatch(r"(\d+) (\d+)", _read(level / "cpu.max") or "")
    if match is not None and int(match[2]):
        yield int(match[1]) / int(match[2])


def _v1_share(level: Path) -> Iterator[float]:
    quota, period = _read_int(level / "cpu.cfs_quota_us"), _read_int(level / "cpu.cfs_period_us")
    if quota is not None and period is not None and quota > 0 and period > 0:
        yield quota / period
