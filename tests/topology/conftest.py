"""Machines that are only described: files of the kernel below a temporary root.

`layout` makes the files of a regular machine as a dict of path -> text, for tests to change; `read` writes
such a dict and reads the machine. `unpack` writes a recorded tree (see tests/data/topologies/README.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata_jit.topology.cpulist import format_cpulist
from strata_jit.topology.machine import Machine, read_machine

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
GIB = 2**30
Files = dict[str, object]


def write_tree(root: Path, files: Files) -> Path:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
    return root


def cpu_files(cpu: int, package: int, core_id: int, siblings: str | None = None) -> Files:
    base = f"{CPU}/cpu{cpu}/topology"
    files: Files = {f"{base}/physical_package_id": package, f"{base}/core_id": core_id}
    return files if siblings is None else files | {f"{base}/thread_siblings_list": siblings}


def node_files(node: int, cpus: str, gib: float = 8, free: float | None = None) -> Files:
    lines = {"MemTotal": gib, "MemFree": gib / 2 if free is None else free}
    text = "\n".join(f"Node {node} {key}:  {int(value * 2**20)} kB" for key, value in lines.items())
    return {f"{NODE}/node{node}/cpulist": cpus, f"{NODE}/node{node}/meminfo": text}


def regular(packages: int = 1, cores: int = 2, threads: int = 1, nodes_per_package: int = 1) -> Files:
    """`cores` per package, nodes cut them evenly; the k-th siblings are numbered after all (k-1)-th."""
    n_cores = packages * cores
    n_nodes = packages * nodes_per_package
    files: Files = {
        f"{CPU}/online": f"0-{n_cores * threads - 1}",
        f"{CPU}/present": f"0-{n_cores * threads - 1}",
    }
    for core in range(n_cores):
        siblings = range(core, n_cores * threads, n_cores)
        for cpu in siblings:
            files |= cpu_files(cpu, core // cores, core % cores, format_cpulist(siblings))
    for node in range(n_nodes):
        first, last = node * n_cores // n_nodes, (node + 1) * n_cores // n_nodes
        own = [cpu + k * n_cores for k in range(threads) for cpu in range(first, last)]
        files |= node_files(node, format_cpulist(own))
        row = [10 if other == node else 21 for other in range(n_nodes)]
        files[f"{NODE}/node{node}/distance"] = " ".join(map(str, row))
    return files | {f"{NODE}/online": f"0-{n_nodes - 1}"}


def unpack_tree(text: str, root: Path) -> Path:
    """Lines are "# comment", "directory/", or two spaces and "name: text" with line ends as \\n."""
    directory = root
    for line in text.splitlines():
        if line.startswith("  "):
            name, _, content = line[2:].partition(": ")
            (directory / name).write_text(content.replace("\\n", "\n").replace("\\\\", "\\") + "\n")
        elif line and not line.startswith("#"):
            directory = root / line
            directory.mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture
def layout() -> Callable[..., Files]:
    return regular


@pytest.fixture
def cpu() -> Callable[..., Files]:
    return cpu_files


@pytest.fixture
def node() -> Callable[..., Files]:
    return node_files


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Files], Path]:
    return lambda files: write_tree(tmp_path, files)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Machine]:
    def read_files(files: Files, allowed: frozenset[int] | None = None) -> Machine:
        return read_machine(write_tree(tmp_path, files), allowed)

    return read_files


@pytest.fixture
def unpack() -> Callable[[str, Path], Path]:
    return unpack_tree
