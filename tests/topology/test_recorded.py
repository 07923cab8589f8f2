"""Recorded machines against hwloc's reading of them.

hwloc shows what the process may use: packages with an allowed CPU, nodes with allowed memory. Where it
departs from sysfs on purpose, sysfs decides here, since the kernel places threads and pages by it.
"""

from __future__ import annotations

import json
import re
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from strata_jit.topology.machine import read_machine

DATA = Path(__file__).parents[1] / "data" / "topologies"
EXPECTED = json.loads((DATA / "expected.json").read_text())

# name -> field, what sysfs says, why hwloc says something else
SYSFS_WINS = {
    "16amd64-8n2c-cpusets": ("packages", 6, "hwloc keeps package 4, without allowed CPUs, for its memory"),
    "32amd64-4s2n4c-cgroup2": ("packages", 1, "hwloc keeps packages 1 and 2 for their memory as well"),
    "40intel64-4n10c+pci-conflicts": ("packages", 4, "the mask of CPU 3's package contradicts the list"),
    "8em64t-2s2ca2c-buggynuma": ("nodes", list(range(8)), "hwloc drops nodes that claim the same CPUs"),
    "nvidiagpunumanodes": ("nodes", [0, 8, *range(250, 256)], "hwloc hides the memory of GPUs"),
}

READ = re.compile(
    r"(proc/(self/)?[^/]+|sys/devices/cpu_\w+/.*|sys/kernel/mm/.*|(sys/fs/cgroup|dev/cpuset|cgroup)\b.*"
    r"|sys/devices/system/cpu/(\w+|cpu\d+/(\w+|topology/.*|cache/.*|node.*))"
    r"|sys/devices/system/node/(\w+|node\d+/\w+))"
)


def usable(machine):
    return {
        "packages": len({core.package for core in machine.cores}),
        "nodes": [node.node_id for node in machine.nodes if node.mem_allowed],
        "cores": len(machine.cores),
        "cpus": sorted(machine.allowed),
    }


def with_sysfs(name, expected):
    field, value, _ = SYSFS_WINS.get(name, (None, None, None))
    return expected if field is None else expected | {field: value}


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_tree(name, unpack, tmp_path):
    machine = read_machine(unpack((DATA / f"{name}.tree").read_text(), tmp_path))
    assert usable(machine) == with_sysfs(name, EXPECTED[name])


@pytest.fixture
def recorded(unpack, tmp_path):
    return lambda name: read_machine(unpack((DATA / f"{name}.tree").read_text(), tmp_path))


def test_offline_and_forbidden_cpus_are_told_apart(recorded):
    machine = recorded("16amd64-8n2c-cpusets")
    assert machine.cpus_offline == {4} and machine.cpus_online - machine.allowed == {7, 8, 9, 10, 11}
    assert len(machine.packages) == 8 and sum(package.cores for package in machine.packages) == 15


def test_offline_node(recorded):
    machine = recorded("offline-cpu0-node0")
    assert machine.cpus_offline == {0, 1, 2, 3, 21, 22, 23} and machine.nodes_offline == {0}
    assert [(n.node_id, n.distances) for n in machine.nodes] == [(1, (10,))]


def test_sparse_node_ids(recorded):
    machine = recorded("48amd64-4pa2n6c-sparse")
    assert [node.node_id for node in machine.nodes] == [0, 1, 2, 33, 34, 45, 72, 73]
    assert {len(node.cpus) for node in machine.nodes} == {6} and len(machine.packages) == 4
    assert machine.distance(0, 1) == machine.nodes[0].distances[1] != machine.distance(0, 0)


def test_nodes_without_cpus_or_memory(recorded):
    """CPUs and memory are on different nodes; distances tell which belong together."""
    machine = recorded("fakememinitiators-1np2c+1npp+gi")
    assert [n.node_id for n in machine.nodes if n.cpus and not n.has_memory] == [0, 1, 2, 3]
    assert [n.node_id for n in machine.nodes if not n.cpus and n.has_memory] == [5, 6, 7, 8, 9, 10]
    assert [n.node_id for n in machine.nodes if not n.cpus and not n.has_memory] == [4]
    nearest = [min(range(5, 11), key=lambda end: machine.distance(start, end)) for start in range(4)]
    assert nearest == [5, 8, 6, 9]


def test_gpu_memory_is_a_node_without_cpus(recorded):
    machine = recorded("nvidiagpunumanodes")
    assert [len(node.cpus) for node in machine.nodes] == [16, 16, 0, 0, 0, 0, 0, 0]
    assert {len(core.siblings) for core in machine.cores} == {4}


def test_arm_classes(recorded):
    kinds = [core.kind for core in recorded("nvidia-dgx-gb10").cores]
    assert (kinds.count("P"), kinds.count("E")) == (10, 10)


def test_a_hybrid_that_does_not_say_so_is_none(recorded):
    assert not recorded("20em64t-hybrid-1p6c2t+2ca4co1t").hybrid


def test_nothing_but_a_cpuset(recorded):
    machine = recorded("allowed_test1.fsroot")
    assert machine.allowed == {1, 2, 3, 4, 5, 6, 10, 12, 13, 14}
    assert machine.nodes[0].virtual


@pytest.mark.slow
def test_the_given_trees(topologies_dir, tmp_path):
    archives = sorted(topologies_dir.glob("*.tar.bz2"))
    assert archives
    wrong = {}
    for number, archive in enumerate(archives):
        name = archive.name.removesuffix(".tar.bz2")
        found = usable(read_machine(extract(archive, tmp_path / str(number))))
        expected = hwloc_reading(topologies_dir, name)
        if expected is not None and found != with_sysfs(name, expected):
            wrong[name] = (found, with_sysfs(name, expected))
    assert wrong == {}


def extract(archive, target):
    """Regular files and directories, since links would lead out of the tree; few of them, for speed."""
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts[1:]
            path = target.joinpath(*parts)
            if ".." in parts or READ.fullmatch("/".join(parts)) is None:
                continue
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif member.isreg():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(member).read())
    return target


def hwloc_reading(directory, name):
    for suffix, parse in ((".console", parse_console), (".xml", parse_xml)):
        if (directory / f"{name}{suffix}").exists():
            return parse((directory / f"{name}{suffix}").read_text())
    return None


def parse_console(text):
    """Lines such as "    NUMANode(NVM) L#2 (P#7 local=742GiB)"; tables below name nodes without P#."""
    found = re.findall(
        r"^ *(Package|NUMANode|Core|PU)(?:\([^)]*\))? L#\d+(?: \(P#(\d+))?", text, re.MULTILINE
    )
    return counted(found)


def parse_xml(text):
    objects = ET.fromstring(text).iter("object")
    return counted([(item.get("type"), item.get("os_index")) for item in objects])


def counted(objects):
    return {
        "packages": sum(kind == "Package" for kind, _ in objects),
        "nodes": sorted(int(number) for kind, number in objects if kind == "NUMANode" and number),
        "cores": sum(kind == "Core" for kind, _ in objects),
        "cpus": sorted(int(number) for kind, number in objects if kind == "PU"),
    }


def test_the_parser_of_console_output():
    lines = ["Machine (P#0)", "  Package L#0", "    NUMANode(NVM) L#0 (P#7 local=1GiB)", "    Core L#0 (P#1)"]
    lines += ["      PU L#0 (P#3)", "  NUMANode L#0 = 131072 from cpuset 0x3"]
    assert parse_console("\n".join(lines)) == {"packages": 1, "nodes": [7], "cores": 1, "cpus": [3]}
