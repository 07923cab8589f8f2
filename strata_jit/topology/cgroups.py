"""What control groups allow this process: CPU time, CPUs, memory; version 1, 2 or both.

Owns where the files of its group and of those above are. The path in /proc/self/cgroup may be that of another
namespace: then it does not exist below the mount, or is what the mount shows as its root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from strata_jit.topology.sysfs import Tree

DEFAULT_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
UNLIMITED = 2**62
"""Version 1 writes "no limit" as a number near 2^63."""
V2 = ""
_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclass(frozen=True, slots=True)
class Found:
    """A value, and the file that says it."""

    value: int
    source: str


@dataclass(frozen=True, slots=True)
class FoundSet:
    """Numbers of CPUs or nodes, and the file that says them."""

    numbers: frozenset[int]
    source: str


@dataclass(frozen=True, slots=True)
class Mount:
    """A hierarchy: where it is mounted, and which of its groups stands there."""

    path: str
    root: str
    """As the process names it: "/.." is the parent of its namespace's root."""
    controllers: frozenset[str]
    """Of version 1; empty for version 2."""


def cpu_quota(tree: Tree) -> Found | None:
    """The tightest quota in whole CPUs, rounded down, at least 1; None where nothing limits it."""
    shares = [*_v2_shares(tree), *_v1_shares(tree)]
    if not shares:
        return None
    share, source = min(shares)
    return Found(max(1, int(share)), source)


def memory_limit(tree: Tree) -> Found | None:
    """The tightest memory limit in bytes; None where nothing limits it."""
    limits = [(limit, source) for limit, _, source in _memory(tree)]
    return Found(*min(limits)) if limits else None


def memory_room(tree: Tree) -> Found | None:
    """Least (limit - current + inactive page cache) over the groups that have a limit, at least 0.

    A group that does not say what it uses counts as using nothing.
    """
    rooms = [(max(0, limit - used), source) for limit, used, source in _memory(tree)]
    return Found(*min(rooms)) if rooms else None


def cpuset_cpus(tree: Tree) -> FoundSet | None:
    """CPUs of its cpuset; None where there is none."""
    return _cpuset(tree, "cpus")


def cpuset_mems(tree: Tree) -> FoundSet | None:
    """Memory nodes of its cpuset; None where there is none."""
    return _cpuset(tree, "mems")


def levels(tree: Tree, controller: str) -> Iterator[str]:
    """Directories of its group and those above, the nearest first; they may not exist. V2 for version 2."""
    path = _paths(tree).get(controller, "/")
    seen: set[str] = set()
    for mount in _mounts(tree):
        if (controller in mount.controllers) if controller else not mount.controllers:
            for level in _levels_below(mount, path):
                if level not in seen:
                    seen.add(level)
                    yield level


def _levels_below(mount: Mount, path: str) -> Iterator[str]:
    parts = _below(path.strip("/").split("/"), mount.root.strip("/").split("/"))
    for n in range(len(parts), -1, -1):
        yield "/".join([mount.path, *parts[:n]])


def _below(path: list[str], root: list[str]) -> list[str]:
    """`path` as seen from the group that a mount shows as its root; [] if it cannot be seen from there."""
    path, root = [part for part in path if part], [part for part in root if part]
    if path[: len(root)] == root:
        path = path[len(root) :]
    elif ".." in root:
        return []
    return [] if ".." in path else path


def _paths(tree: Tree) -> dict[str, str]:
    """Controller -> path of its group; V2 for version 2."""
    paths: dict[str, str] = {}
    for line in (tree.read("proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths.setdefault(controller, fields[2])
    cpuset = tree.read("proc/self/cpuset")
    if cpuset is not None and cpuset.startswith("/"):
        paths.setdefault("cpuset", cpuset)
        paths.setdefault(V2, cpuset)
    return paths


def _mounts(tree: Tree) -> list[Mount]:
    """Mounts that the process sees, then the usual places, for trees without a list of mounts."""
    names = {"cpu", "cpu,cpuacct", "cpuset", "memory", *_joint_names(tree)}
    usual = [Mount(path, "/", frozenset()) for path in DEFAULT_MOUNTS]
    usual += [Mount(f"sys/fs/cgroup/{name}", "/", frozenset(name.split(","))) for name in sorted(names)]
    # The first to name a place knows most: only mountinfo has the group that stands there.
    by_path: dict[str, Mount] = {}
    for mount in (*_mountinfo(tree), *_mount_table(tree), *usual):
        by_path.setdefault(mount.path, mount)
    return list(by_path.values())


def _joint_names(tree: Tree) -> list[str]:
    """Names such as "cpu,cpuacct" of hierarchies with several controllers."""
    lines = (tree.read("proc/self/cgroup") or "").splitlines()
    return [fields[1] for line in lines if len(fields := line.split(":", 2)) == 3 and "/" not in fields[1]]


def _mountinfo(tree: Tree) -> Iterator[Mount]:
    for line in (tree.read("proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) >= 5 and len(rest) >= 3:
            yield from _mount(rest[0], fields[4], fields[3], rest[2])


def _mount_table(tree: Tree) -> Iterator[Mount]:
    text = tree.read("proc/self/mounts") or tree.read("proc/mounts") or ""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4:
            yield from _mount(fields[2], fields[1], "/", fields[3])


def _mount(kind: str, path: str, root: str, options: str) -> Iterator[Mount]:
    if kind == "cgroup2":
        yield Mount(path.strip("/"), root, frozenset())
    elif kind in ("cgroup", "cpuset"):
        yield Mount(path.strip("/"), root, frozenset({kind, *options.split(",")}))


def _v2_shares(tree: Tree) -> Iterator[tuple[float, str]]:
    for level in levels(tree, V2):
        source = f"{level}/cpu.max"
        match = re.fullmatch(r"([0-9]{1,18})(?:\s+([0-9]{1,18}))?", tree.read(source) or "")
        if match is not None:
            period = int(match[2] or 100_000)
            if period:
                yield int(match[1]) / period, source


def _v1_shares(tree: Tree) -> Iterator[tuple[float, str]]:
    for level in levels(tree, "cpu"):
        source = f"{level}/cpu.cfs_quota_us"
        quota, period = tree.read_int(source), tree.read_int(f"{level}/cpu.cfs_period_us")
        if quota is not None and quota > 0 and period is not None and period > 0:
            yield quota / period, source


def _memory(tree: Tree) -> Iterator[tuple[int, int, str]]:
    """(limit, bytes in use that cannot be dropped at once, source) of each group with a limit."""
    files = ((V2, "memory.max", "memory.current"), ("memory", *_V1_MEMORY))
    for controller, limit_name, usage_name in files:
        for level in levels(tree, controller):
            limit = tree.read_int(f"{level}/{limit_name}")
            if limit is not None and 0 <= limit < UNLIMITED:
                used = (tree.read_int(f"{level}/{usage_name}") or 0) - _inactive(tree, level)
                yield limit, max(0, used), f"{level}/{limit_name}"


def _inactive(tree: Tree, level: str) -> int:
    """Bytes of inactive page cache of a group and those below it."""
    table = tree.read_table(f"{level}/memory.stat")
    text = table.get("total_inactive_file", table.get("inactive_file", ""))
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0


def _cpuset(tree: Tree, what: str) -> FoundSet | None:
    """The nearest level that says; the kernel keeps it within those above.

    In version 2 what is configured may be empty or more than the groups above have; in version 1 it never is.
    """
    v1 = (f"cpuset.{what}", f"cpuset.effective_{what}", what)
    for controller, names in ((V2, (f"cpuset.{what}.effective", f"cpuset.{what}")), ("cpuset", v1)):
        for level in levels(tree, controller):
            for name in names:
                found = tree.read_list(f"{level}/{name}")
                if found:
                    return FoundSet(found, f"{level}/{name}")
    return None
