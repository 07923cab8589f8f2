"""Write what the topology reader reads of a machine as a small text, to become a test.

    python record.py [ROOT] > NAME.tree

ROOT is "/" or a recorded tree. Of /proc/cpuinfo only the numbers and names of processors are kept, of
/proc/self/status only the allowed sets; host names, processes, devices and the kernel's command line are not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

WANTED = (
    r"sys/devices/system/cpu/(online|present|possible)",
    r"sys/devices/system/cpu/cpu\d+/(online|cpu_capacity|node\d+/.*|cpufreq/scaling_governor)",
    r"sys/devices/system/cpu/cpu\d+/topology/(physical_package_id|core_id)",
    r"sys/devices/system/cpu/cpu\d+/topology/(core_siblings|thread_siblings|core_cpus|package_cpus)(_list)?",
    r"sys/devices/system/cpu/cpu\d+/cache/index\d+/(level|type|size|coherency_line_size|shared_cpu_(list|map))",
    r"sys/devices/cpu_(core|atom|lowpower)/cpus",
    r"sys/devices/system/node/(online|possible|has_\w+)",
    r"sys/devices/system/node/node\d+/(cpulist|cpumap|distance|meminfo|hugepages/.*)",
    r"sys/kernel/mm/(transparent_hugepage/(enabled|defrag|shmem_enabled)|hugepages/.*)",
    r"(sys/fs/cgroup|dev/cpuset|cgroup)/(.*/)?(cpu\.(max|cfs_(quota|period)_us)|memory\.(max|current|stat)"
    r"|memory\.(limit|usage)_in_bytes|(cpuset\.)?(effective_)?(cpus|mems)(\.effective)?)",
    r"proc/(meminfo|mounts|sys/kernel/numa_balancing|sys/vm/zone_reclaim_mode)",
    r"proc/(cpuinfo|self/(cgroup|cpuset|limits|mountinfo|status))",
)
WALKED = ("sys/devices/system/cpu", "sys/devices/system/node", "sys/kernel/mm", "sys/fs/cgroup", "dev/cpuset")
FOLLOWED = ("cpufreq", "cpu", "cpuset", "memory")
GROUP_DIRS = ("sys/fs/cgroup", "dev/cpuset", "cgroup")
KEPT_LINES = {
    "proc/cpuinfo": r"processor\b|model name|cpu\s*:|Processor|Hardware",
    "proc/self/status": r"(Cpus|Mems)_allowed",
    "proc/mounts": r".*\b(cgroup2?|cpuset)\b",
    "proc/self/mountinfo": r".*\b(cgroup2?|cpuset)\b",
    "proc/meminfo": r"Mem|Buffers|Cached|Active\(file|Inactive\(file|Dirty|Writeback:",
    "memory.stat": r"(total_)?inactive_file",
}


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "/")
    groups = own_groups(root)
    last = None
    for path in sorted(walk(root, Path(), groups), key=lambda path: path.parts):
        directory = str(path.parent)
        if directory != last:
            sys.stdout.write(f"{directory}/\n")
            last = directory
        sys.stdout.write(f"  {path.name}: {content(root, path)}\n")


def own_groups(root: Path) -> set[str]:
    """Names of directories on the way to this process's control groups, so that others are left out."""
    names = {"cpu,cpuacct", "unified"}
    for file in ("proc/self/cgroup", "proc/self/cpuset"):
        if (root / file).exists():
            names.update(re.split(r"[:/,\n]", (root / file).read_text()))
            names.update(re.split(r"[:/\n]", (root / file).read_text()))
    return names


def walk(root: Path, below: Path, groups: set[str]) -> Iterator[Path]:
    """Wanted files. Links to directories are followed where the kernel has its files behind one."""
    for entry in sorted((root / below).iterdir()):
        path = below / entry.name
        if entry.is_dir():
            other = str(below).startswith(GROUP_DIRS) and entry.name not in groups
            if near(str(path)) and not other and (entry.name in FOLLOWED or not entry.is_symlink()):
                yield from walk(root, path, groups)
        elif wanted(root, path):
            yield path


def wanted(root: Path, path: Path) -> bool:
    """Whether to keep a file: not a mask whose list is there as well."""
    named = any(re.fullmatch(pattern, str(path)) for pattern in WANTED)
    return named and readable(root / path) and not (root / f"{path}_list").exists()


def near(path: str) -> bool:
    """Whether wanted files may be below."""
    places = (*WALKED, "sys/devices/cpu_core", "sys/devices/cpu_atom", "cgroup", "proc/self", "proc/sys")
    return any(f"{place}/".startswith(f"{path}/") or f"{path}/".startswith(f"{place}/") for place in places)


def readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def content(root: Path, path: Path) -> str:
    text = (root / path).read_text("utf-8", "replace").strip()
    kept = KEPT_LINES.get(str(path)) or KEPT_LINES.get(path.name)
    lines = [line for line in text.splitlines() if kept is None or re.match(kept, line)]
    return "\n".join(lines).replace("\\", "\\\\").replace("\n", "\\n")


if __name__ == "__main__":
    main()
