"""What a process may use: masks, cpusets, quotas and memory limits of control groups, other limits."""

import pytest

from strata_jit.topology.machine import read_machine

CGROUP = "sys/fs/cgroup"


def limit(machine, name):
    found = machine.limit(name)
    return None if found is None else (found.value, found.source)


def test_a_quota_of_four_cpus_on_eight(read, layout):
    files = layout(cores=8) | {"proc/self/cgroup": "0::/", f"{CGROUP}/cpu.max": "400000 100000"}
    machine = read(files)
    assert machine.cpu_quota == 4 and len(machine.allowed) == 8
    assert limit(machine, "cpu_quota") == (4, "/sys/fs/cgroup/cpu.max")


def test_the_tightest_ancestor_sets_the_quota(read, layout):
    files = layout(cores=8) | {
        "proc/self/cgroup": "0::/outer/inner",
        f"{CGROUP}/outer/inner/cpu.max": "400000 100000",
        f"{CGROUP}/outer/cpu.max": "250000 100000",
    }
    assert limit(read(files), "cpu_quota") == (2, "/sys/fs/cgroup/outer/cpu.max")


def test_a_quota_below_one_cpu_is_one(read, layout):
    assert read(layout() | {f"{CGROUP}/cpu.max": "50000 100000"}).cpu_quota == 1


@pytest.mark.parametrize("text", ["max 100000", "", "junk", "0 0", "100000 0", "-1 100000"])
def test_no_quota(read, layout, text):
    machine = read(layout() | {"proc/self/cgroup": "0::/a", f"{CGROUP}/a/cpu.max": text})
    assert machine.cpu_quota is None and machine.limit("cpu_quota") is None


@pytest.mark.parametrize("place", ["cpu,cpuacct", "cpu"])
def test_version_1_in_a_container_stands_at_the_mount(read, layout, place):
    files = layout(cores=4) | {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/0123\n0::/",
        f"{CGROUP}/{place}/cpu.cfs_quota_us": "350000",
        f"{CGROUP}/{place}/cpu.cfs_period_us": "100000",
    }
    assert read(files).cpu_quota == 3


def test_version_1_without_a_quota(read, layout):
    files = {f"{CGROUP}/cpu/cpu.cfs_quota_us": "-1", f"{CGROUP}/cpu/cpu.cfs_period_us": "100000"}
    assert read(layout() | files).cpu_quota is None


MOUNTINFO = "31 23 0:28 {root} {path} rw,nosuid - {kind} none {options}"


def mountinfo(root, path="/sys/fs/cgroup", kind="cgroup2", options="rw"):
    return {"proc/self/mountinfo": MOUNTINFO.format(root=root, path=path, kind=kind, options=options)}


def test_a_mount_that_shows_a_group_as_its_root(read, layout):
    """The path is the host's, the mount shows the container's group and below."""
    files = layout(cores=8) | mountinfo("/pod/container", "/cg", "cgroup", "rw,cpu")
    files |= {
        "proc/self/cgroup": "3:cpu:/pod/container/job",
        "cg/job/cpu.cfs_quota_us": "300000",
        "cg/job/cpu.cfs_period_us": "100000",
        "cg/cpu.cfs_quota_us": "500000",
        "cg/cpu.cfs_period_us": "100000",
        "cg/pod/cpu.cfs_quota_us": "100000",  # a group of the container's own, named like the host's
        "cg/pod/cpu.cfs_period_us": "100000",
    }
    assert limit(read(files), "cpu_quota") == (3, "/cg/job/cpu.cfs_quota_us")


@pytest.mark.parametrize(
    ("root", "path", "quota"),
    [
        ("/", "/a", 2),
        ("/..", "/../a", 2),  # beside the namespace's root, whose parent the mount shows
        ("/..", "/a", 4),  # inside, but the mount does not say under which name
        ("/", "/../a", 4),  # outside of what the mount shows: a group named alike is another one
        ("/", "/nowhere/b", 4),
    ],
)
def test_paths_of_namespaces(read, layout, root, path, quota):
    files = layout(cores=8) | mountinfo(root) | {"proc/self/cgroup": f"0::{path}"}
    files |= {f"{CGROUP}/cpu.max": "400000 100000", f"{CGROUP}/a/cpu.max": "200000 100000"}
    assert read(files).cpu_quota == quota


@pytest.mark.parametrize("text", ["", "junk", "1:2", ":::", "0::", "x:cpu:relative/path"])
def test_malformed_group_paths(read, layout, text):
    files = layout(cores=8) | {"proc/self/cgroup": text, f"{CGROUP}/cpu.max": "400000 100000"}
    assert read(files).cpu_quota == 4


def test_a_cpuset_of_four_cores_with_siblings(read, layout):
    files = layout(cores=8, threads=2) | {
        "proc/self/cgroup": "0::/job",
        f"{CGROUP}/job/cpuset.cpus.effective": "0-3,8-11",
        f"{CGROUP}/cpuset.cpus.effective": "0-15",
    }
    machine = read(files)
    assert len(machine.cores) == 4 and machine.allowed == {0, 1, 2, 3, 8, 9, 10, 11}
    assert limit(machine, "cpuset_cpus")[1] == "/sys/fs/cgroup/job/cpuset.cpus.effective"


def test_an_empty_cpuset_takes_that_of_the_group_above(read, layout):
    files = layout(cores=4) | {
        "proc/self/cgroup": "5:cpuset:/a/b",
        f"{CGROUP}/cpuset/a/b/cpuset.cpus": "",
        f"{CGROUP}/cpuset/a/cpuset.cpus": "1-2",
        f"{CGROUP}/cpuset/a/cpuset.mems": "0",
    }
    assert read(files).allowed == {1, 2}


def test_a_cpuset_that_shares_no_cpu_with_the_mask_is_ignored(read, layout):
    files = layout(cores=4) | {f"{CGROUP}/cpuset.cpus.effective": "8-9"}
    assert read(files, allowed=frozenset({1})).allowed == {1}


def test_the_mask_of_a_recorded_machine(read, layout):
    machine = read(
        layout(cores=4) | {"proc/self/status": "Name:\tx\nCpus_allowed:\tf\nCpus_allowed_list:\t1-2,9"}
    )
    assert machine.allowed == {1, 2}
    assert limit(machine, "affinity") == ((1, 2, 9), "/proc/self/status")


def test_a_mask_without_a_list(read, layout):
    assert read(layout(cores=4) | {"proc/self/status": "Cpus_allowed:\t00000000,00000009"}).allowed == {0, 3}


def test_a_given_mask_wins_but_never_allows_offline_cpus(write, layout):
    root = write(layout(cores=4) | {"proc/self/status": "Cpus_allowed_list:\t0"})
    assert read_machine(root, frozenset({2, 3, 77})).allowed == {2, 3}


def test_mems_allowed_leaves_a_node_out_whose_cpus_are_allowed(read, layout):
    machine = read(layout(packages=2) | {"proc/self/status": "Mems_allowed:\t3\nMems_allowed_list:\t0"})
    assert [(node.node_id, node.mem_allowed) for node in machine.nodes] == [(0, True), (1, False)]
    assert machine.nodes[1].cpus <= machine.allowed
    assert limit(machine, "mems_allowed") == ((0,), "/proc/self/status")


def test_mems_of_the_cpuset_where_the_status_says_nothing(read, layout):
    machine = read(layout(packages=2) | {f"{CGROUP}/cpuset.mems.effective": "1"})
    assert [node.mem_allowed for node in machine.nodes] == [False, True]


def test_memory_limits_and_room(read, layout):
    files = layout() | {
        "proc/self/cgroup": "0::/a/b",
        f"{CGROUP}/a/b/memory.max": "4000000",
        f"{CGROUP}/a/b/memory.current": "1000000",
        f"{CGROUP}/a/memory.max": "5000000",
        f"{CGROUP}/a/memory.current": "4500000",
        f"{CGROUP}/a/memory.stat": "anon 9\nfile 400000\ninactive_file 300000\nactive_file 100000",
        f"{CGROUP}/memory.max": "max",
    }
    machine = read(files)
    assert limit(machine, "memory_limit") == (4_000_000, "/sys/fs/cgroup/a/b/memory.max")
    assert limit(machine, "memory_room") == (800_000, "/sys/fs/cgroup/a/memory.max")
    assert (machine.memory_limit_bytes, machine.memory_room_bytes) == (4_000_000, 800_000)


def test_memory_limits_of_version_1(read, layout):
    files = layout() | {
        "proc/self/cgroup": "4:memory:/m",
        f"{CGROUP}/memory/m/memory.limit_in_bytes": "3000000",
        f"{CGROUP}/memory/m/memory.usage_in_bytes": "3500000",
        f"{CGROUP}/memory/m/memory.stat": "inactive_file 1\ntotal_inactive_file 100000",
        f"{CGROUP}/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    machine = read(files)
    assert (machine.memory_limit_bytes, machine.memory_room_bytes) == (3_000_000, 0)


def test_a_memory_limit_without_usage_leaves_all_of_it(read, layout):
    assert read(layout() | {f"{CGROUP}/memory.max": "77"}).memory_room_bytes == 77


@pytest.mark.parametrize(("text", "value"), [("65536", 65536), ("unlimited", None)])
def test_locked_memory(read, layout, text, value):
    line = f"Limit   Soft Limit   Hard Limit   Units\nMax locked memory         {text}     unlimited   bytes"
    machine = read(layout() | {"proc/self/limits": line})
    assert machine.memlock_bytes == value
    assert limit(machine, "memlock") == (value, "/proc/self/limits")


def test_nothing_limits_where_nothing_says_so(read, layout):
    machine = read(layout())
    assert machine.limits == ()
    assert machine.memory_limit_bytes is machine.memlock_bytes is machine.shm_bytes is None
