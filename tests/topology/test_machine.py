"""Whole machines: this one, described ones, and ones whose files are damaged."""

import dataclasses
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_jit.errors import TopologyError
from strata_jit.topology.machine import read_machine

CPU = "sys/devices/system/cpu"


def test_this_machine_agrees_with_the_kernel():
    machine = read_machine()
    assert machine.allowed == os.sched_getaffinity(0)
    assert {cpu for core in machine.cores for cpu in core.cpus} == machine.allowed
    assert machine.allowed <= machine.cpus_online
    assert machine.memlock_bytes is None or machine.memlock_bytes >= 0
    assert machine.shm_bytes == os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks
    assert len(machine.cpus_online) == os.sysconf("SC_NPROCESSORS_ONLN")


def test_a_regular_machine(read, layout):
    machine = read(layout(packages=2, cores=4, threads=2))
    assert machine.allowed == machine.cpus_online == set(range(16))
    assert [core.cpus for core in machine.cores] == [(i, i + 8) for i in range(8)]
    assert [(p.package_id, p.cores, sorted(p.cpus)) for p in machine.packages] == [
        (0, 4, [0, 1, 2, 3, 8, 9, 10, 11]),
        (1, 4, [4, 5, 6, 7, 12, 13, 14, 15]),
    ]
    assert [(n.node_id, min(n.cpus), n.memory_bytes, n.free_bytes) for n in machine.nodes] == [
        (0, 0, 8 * 2**30, 4 * 2**30),
        (1, 4, 8 * 2**30, 4 * 2**30),
    ]
    assert [core.node for core in machine.cores] == [0] * 4 + [1] * 4
    assert [machine.node_of(cpu) for cpu in (0, 12, 99)] == [0, 1, 0]
    assert (machine.distance(0, 0), machine.distance(0, 1), machine.distance(5, 0)) == (10, 21, 20)
    assert machine.limits == () and not machine.hybrid and machine.other_cores == ()


def test_a_machine_never_changes(read, layout):
    machine = read(layout())
    with pytest.raises(dataclasses.FrozenInstanceError):
        machine.allowed = frozenset()
    assert hash(machine) == hash(dataclasses.replace(machine))


def test_a_root_without_cpus_is_an_error(tmp_path):
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(TopologyError, match="no CPU"):
            read_machine(root)


def test_without_sysfs_cpuinfo_or_the_mask_name_the_cpus(read):
    assert read({"proc/cpuinfo": "processor\t: 0\nmodel name\t: A  B\n\nprocessor\t: 3"}).allowed == {0, 3}
    machine = read({"proc/self/status": "Cpus_allowed_list:\t1-2", "proc/cpuinfo": ""})
    assert [core.cpus for core in machine.cores] == [(1,), (2,)]
    assert machine.nodes[0].virtual


def test_settings(read, layout):
    files = layout() | {
        "proc/sys/kernel/numa_balancing": 1,
        "proc/sys/vm/zone_reclaim_mode": 0,
        "proc/cmdline": "quiet mitigations=off",
        "proc/cpuinfo": "processor\t: 0\nmodel\t\t: 7\nmodel name\t: Some  CPU @ 2 GHz",
        f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
        f"{CPU}/cpu1/cpufreq/scaling_governor": "performance",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": 16,
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": 6,
        "sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages": 1,
    }
    machine = read(files)
    assert (machine.numa_balancing, machine.zone_reclaim_mode) == (1, 0)
    assert machine.governors == ("performance", "powersave")
    assert machine.kernel_cmdline == "quiet mitigations=off"
    assert machine.cpu_model == "Some CPU @ 2 GHz"
    pages = machine.huge_pages
    assert (pages.enabled, pages.defrag, pages.shmem_enabled) == ("madvise", None, "never")
    assert [(p.page_bytes, p.total, p.free, p.node) for p in pages.pools] == [
        (2**21, 16, 6, None),
        (2**30, 1, None, 0),
    ]


def test_settings_that_are_not_there_are_unknown(read, layout):
    machine = read(layout())
    assert (machine.numa_balancing, machine.kernel_cmdline, machine.cpu_model) == (None, None, None)
    assert machine.governors == () and machine.huge_pages.enabled is None and machine.shm_bytes is None


JUNK = [
    "",
    "-1",
    "junk",
    "0-",
    "99999999999999999999",
    "\0\0",
    "0x",
    ",,,",
    "4294967295",
    "max",
    "[",
    "1 2 3",
    "ÿ",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_damaged_files_never_break_the_reading(tmp_path_factory, layout, seed):
    source = random.Random(seed)
    files = layout(packages=2, cores=2, threads=2) | {
        "proc/self/cgroup": "3:cpu,cpuacct:/a\n0::/a/b",
        "proc/self/status": "Cpus_allowed_list:\t0-6\nMems_allowed_list:\t0-1",
        "proc/self/limits": "Max locked memory  65536  65536  bytes",
        "proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 none rw",
        "proc/meminfo": "MemTotal: 100 kB\nMemFree: 50 kB",
        "sys/fs/cgroup/a/b/cpu.max": "300000 100000",
        "sys/fs/cgroup/a/memory.max": "1000000",
        "sys/fs/cgroup/a/memory.stat": "inactive_file 10",
        "sys/fs/cgroup/a/cpuset.cpus.effective": "0-7",
        "sys/devices/system/node/possible": "0-3",
        "sys/devices/system/node/has_memory": "0-1",
        f"{CPU}/cpu0/cache/index0/level": 1,
        f"{CPU}/cpu0/cache/index0/type": "Data",
        f"{CPU}/cpu0/cpu_capacity": 1024,
        "sys/devices/cpu_core/cpus": "0-3",
        "sys/devices/cpu_atom/cpus": "4-7",
    }
    root = tmp_path_factory.mktemp("damaged")
    for path, text in files.items():
        fate = source.random()
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if fate < 0.2:
            target.mkdir()
        elif fate < 0.7:
            target.write_text(source.choice(JUNK) if fate < 0.5 else str(text)[: source.randrange(8)])
        else:
            target.write_text(str(text))
    try:
        machine = read_machine(root)
    except TopologyError:
        return
    owners = [cpu for node in machine.nodes for cpu in node.cpus]
    assert sorted(owners) == sorted(machine.cpus_online)
    assert sorted(cpu for core in machine.all_cores for cpu in core.siblings) == sorted(machine.cpus_online)
    assert all(len(node.distances) == len(machine.nodes) for node in machine.nodes)
    assert machine.allowed <= machine.cpus_online
