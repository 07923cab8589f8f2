"""What a report says about the machine, and who used its CPUs during a sample (Linux /proc)."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any


def process_table() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, user + system time in ticks) of every process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(path.parent.name), int(fields[1]), int(fields[11]) + int(fields[12])


def tree_cpu_s(root: int) -> float:
    """CPU seconds used so far by a process and its living descendants."""
    table = {pid: (parent, ticks) for pid, parent, ticks in process_table()}
    tree, grown = {root}, True
    while grown:
        more = {pid for pid, (parent, _) in table.items() if parent in tree} - tree
        tree, grown = tree | more, bool(more)
    return sum(table[pid][1] for pid in tree if pid in table) / os.sysconf("SC_CLK_TCK")


def busy_cpu_s() -> float:
    """CPU seconds that the whole machine has been busy since it started."""
    user, nice, system, _idle, _io, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Watch:
    """CPU use from its making on: by the watched process tree, and by strangers.

    Strangers are all processes but the tree and the children that this process has waited for: they disturb.
    """

    def __init__(self, root: int | None) -> None:
        self.root = root
        self.start = self.now()

    def now(self) -> tuple[float, float, float]:
        """Wall seconds; CPU seconds of the tree; CPU seconds of strangers and this very process."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        tree = tree_cpu_s(self.root) if self.root else 0.0
        return time.monotonic(), tree, busy_cpu_s() - tree - children.ru_utime - children.ru_stime

    def shares(self) -> tuple[float, float]:
        """CPUs in use on average by the tree and by strangers since the watch began."""
        wall, tree, strangers = (b - a for a, b in zip(self.start, self.now(), strict=True))
        return tree / wall, max(strangers, 0.0) / wall


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("strata-jit", "numba", "llvmlite", "numpy")},
    }
