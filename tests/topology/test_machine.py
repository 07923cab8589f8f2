"""Reading recorded machines below a root, and this one."""

import os

import pytest

from strata_jit.errors import TopologyError
from strata_jit.topology.machine import Core, cpu_quota, parse_cpulist, read_machine


def make_tree(root, files):
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
    return root


def cpu_files(cpu, package, core_id):
    base = f"sys/devices/system/cpu/cpu{cpu}/topology"
    return {f"{base}/physical_package_id": package, f"{base}/core_id": core_id}


@pytest.fixture
def smt_machine(tmp_path):
    """Two packages of two cores of two siblings; equal core ids on both packages."""
    files = {"sys/devices/system/cpu/online": "0-7"}
    for cpu in range(8):
        files |= cpu_files(cpu, cpu // 2 % 2, cpu % 2)
    files |= {
        f"sys/devices/system/node/node{n}/cpulist": f"{2 * n}-{2 * n + 1},{2 * n + 4}-{2 * n + 5}"
        for n in (0, 1)
    }
    files["sys/devices/system/node/node2/cpulist"] = ""  # memory only
    return make_tree(tmp_path, files)


def test_cores_are_pairs_of_package_and_core_id(smt_machine):
    machine = read_machine(smt_machine)
    assert machine.allowed == frozenset(range(8))
    assert machine.cores == (Core(0, 0, (0, 4)), Core(0, 1, (1, 5)), Core(1, 0, (2, 6)), Core(1, 1, (3, 7)))
    assert [(node.node_id, sorted(node.cpus)) for node in machine.nodes] == [
        (0, [0, 1, 4, 5]),
        (1, [2, 3, 6, 7]),
    ]
    assert [machine.node_of(cpu) for cpu in (0, 3, 99)] == [0, 1, 0]


def test_a_mask_never_gains_a_sibling(smt_machine):
    machine = read_machine(smt_machine, allowed=frozenset({5, 3, 7}))
    assert machine.cores == (Core(1, 1, (3, 7)), Core(0, 1, (5,)))


def test_without_topology_every_cpu_is_a_core(tmp_path):
    make_tree(tmp_path, {"sys/devices/system/cpu/online": "0,64,1030"})
    assert [core.cpus for core in read_machine(tmp_path).cores] == [(0,), (64,), (1030,)]


def test_a_root_without_cpus_is_an_error(tmp_path):
    with pytest.raises(TopologyError, match="no CPU"):
        read_machine(tmp_path)


def test_this_machine_agrees_with_the_kernel():
    machine = read_machine()
    assert machine.allowed == os.sched_getaffinity(0)
    assert {cpu for core in machine.cores for cpu in core.cpus} == machine.allowed


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("5\n", {5}), ("0-10:4", {0, 4, 8}), ("1,1-2", {1, 2})],
)
def test_parse_cpulist(text, cpus):
    assert parse_cpulist(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1--2", "0x3", "1;2"])
def test_parse_cpulist_raises_on_junk(text):
    with pytest.raises(TopologyError, match="CPU list"):
        parse_cpulist(text)


def test_quota_v2_is_that_of_the_tightest_ancestor(tmp_path):
    files = {
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/inner/cpu.max": "400000 100000",
        "sys/fs/cgroup/outer/cpu.max": "250000 100000",
    }
    assert cpu_quota(make_tree(tmp_path, files)) == 2


def test_quota_v1_in_a_container_stands_at_the_mount(tmp_path):
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/0123\n0::/",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert cpu_quota(make_tree(tmp_path, files)) == 1


@pytest.mark.parametrize("text", ["max 100000", "", "junk"])
def test_no_quota(tmp_path, text):
    files = {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": text}
    assert cpu_quota(make_tree(tmp_path, files)) is None
    assert cpu_quota(tmp_path / "nowhere") is None
