"""Which CPUs make a core, a package and a cache; offline CPUs; hybrid machines."""

import pytest

from strata_jit.topology.machine import Core

CPU = "sys/devices/system/cpu"


def test_cores_without_sibling_lists_are_pairs_of_package_and_core_id(read, cpu):
    files = {f"{CPU}/online": "0-7"}
    for number in range(8):
        files |= cpu(number, number // 2 % 2, number % 2)
    machine = read(files)
    assert machine.cores == (Core(0, 0, (0, 4)), Core(0, 1, (1, 5)), Core(1, 0, (2, 6)), Core(1, 1, (3, 7)))


def test_sibling_lists_tell_cores_with_equal_ids_apart(read, cpu):
    """Two dies in a package, each numbering its cores from 0."""
    files = {f"{CPU}/online": "0-3"}
    for number in range(4):
        files |= cpu(number, 0, number % 2, str(number))
    machine = read(files)
    assert [core.cpus for core in machine.cores] == [(0,), (1,), (2,), (3,)]
    assert machine.packages[0].cores == 4


def test_core_cpus_of_newer_kernels_and_masks_of_older_ones(read, cpu):
    files = {f"{CPU}/online": "0-3"}
    for number in range(4):
        files |= cpu(number, 0, 7)
    files |= {f"{CPU}/cpu{n}/topology/core_cpus_list": "0-1" for n in (0, 1)}
    files |= {f"{CPU}/cpu{n}/topology/thread_siblings": "0000000c" for n in (2, 3)}
    assert [core.cpus for core in read(files).cores] == [(0, 1), (2, 3)]


def test_lists_that_contradict_each_other_still_give_each_cpu_one_core(read, cpu):
    files = {f"{CPU}/online": "0-3"}
    for number, siblings in enumerate(["0-2", "1", "0,2", "7"]):
        files |= cpu(number, 0, 0, siblings)
    assert [core.cpus for core in read(files).cores] == [(0, 2), (1,), (3,)]


def test_siblings_with_different_core_ids_are_two_cores(read, cpu):
    """Modules of two cores that share a front end and a floating-point unit."""
    files = {f"{CPU}/online": "0-3"}
    for number in range(4):
        files |= cpu(number, 0, number, "0-1" if number < 2 else "2-3")
    machine = read(files)
    assert [core.cpus for core in machine.cores] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_any_number_of_siblings(read, layout, threads):
    machine = read(layout(cores=4, threads=threads))
    assert len(machine.cores) == 4 and len(machine.cores[0].cpus) == threads


def test_without_topology_every_cpu_is_a_core(read):
    machine = read({f"{CPU}/online": "0,64,1030"})
    assert [core.cpus for core in machine.cores] == [(0,), (64,), (1030,)]
    assert [core.core_id for core in machine.cores] == [0, 64, 1030]


def test_cpu_numbers_over_1024(read, cpu):
    files = {f"{CPU}/online": "0,1500", **cpu(0, 0, 0, "0"), **cpu(1500, 1, 0, "1500")}
    machine = read(files | {"proc/self/status": "Cpus_allowed_list:\t1500"})
    assert machine.allowed == {1500} and [core.cpus for core in machine.cores] == [(1500,)]


def test_a_mask_never_gains_a_sibling(read, layout):
    machine = read(layout(packages=2, cores=2, threads=2), allowed=frozenset({5, 3, 7}))
    assert [(core.cpus, core.siblings) for core in machine.cores] == [((3, 7), (3, 7)), ((5,), (1, 5))]
    assert [core.siblings for core in machine.other_cores] == [(0, 4), (2, 6)]
    assert [core.siblings for core in machine.all_cores] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_cpu_0_offline(read, layout):
    files = {path: text for path, text in layout(cores=16).items() if "/cpu0/" not in path}
    machine = read(files | {f"{CPU}/online": "1-15"})
    assert machine.cpus_offline == {0} and machine.allowed == set(range(1, 16))
    assert machine.nodes[0].cpus == set(range(1, 16))
    assert machine.packages[0].cores == 15


def test_without_an_online_file_each_cpu_says_so_itself(read, layout):
    files = layout(cores=4)
    del files[f"{CPU}/online"]
    machine = read(files | {f"{CPU}/cpu0/online": 1, f"{CPU}/cpu2/online": 0})
    assert (machine.cpus_online, machine.cpus_offline) == ({0, 1, 3}, {2})


@pytest.mark.parametrize("listed", ["0-3", None])
def test_a_cpu_without_topology_is_offline_where_others_have_it(read, layout, listed):
    files = {path: text for path, text in layout(cores=4).items() if "/cpu2/topology" not in path}
    if listed is None:
        del files[f"{CPU}/online"]
    machine = read(files)
    assert (machine.cpus_online, machine.cpus_offline) == ({0, 1, 3}, {2})


def test_offline_siblings_are_no_part_of_a_core(read, layout):
    machine = read(layout(cores=2, threads=2) | {f"{CPU}/online": "0-2"})
    assert [core.siblings for core in machine.cores] == [(0, 2), (1,)]


def test_packages_without_ids_come_from_their_lists(read, cpu):
    files = {f"{CPU}/online": "0-3"}
    for number in range(4):
        files |= cpu(number, -1, number)
        files[f"{CPU}/cpu{number}/topology/package_cpus_list"] = "0-1" if number < 2 else "2-3"
    assert [(p.package_id, sorted(p.cpus)) for p in read(files).packages] == [(0, [0, 1]), (1, [2, 3])]


def capacities(*values):
    return {f"{CPU}/cpu{cpu}/cpu_capacity": value for cpu, value in enumerate(values)}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ((1024, 1024, 600, 600), "PPEE"),
        ((1024, 1012, 1024, 1012), "PPPP"),  # favoured cores of one kind
        ((1024, 930, 922, 921), "PPPE"),  # 90 % of 1024 is 921.6
        ((1024, 1024, 400), "PPPP"),  # one does not say
        ((0, 0, 0, 0), "PPPP"),
        ((1024, "junk", 400, 400), "PPPP"),
        ((), "PPPP"),
    ],
)
def test_kinds_by_capacity(read, layout, values, kinds):
    machine = read(layout(cores=4) | capacities(*values))
    assert "".join(core.kind for core in machine.cores) == kinds
    assert machine.hybrid == ("E" in kinds)


def test_kinds_by_intels_lists_win_over_capacities(read, layout):
    files = layout(cores=4) | capacities(1024, 500, 1024, 1024)
    files |= {"sys/devices/cpu_core/cpus": "0-1", "sys/devices/cpu_atom/cpus": "2-3"}
    machine = read(files)
    assert [core.kind for core in machine.cores] == ["P", "P", "E", "E"]
    assert [core.capacity for core in machine.cores] == [1024, 500, 1024, 1024]


def test_one_list_alone_does_not_make_a_hybrid(read, layout):
    assert not read(layout(cores=4) | {"sys/devices/cpu_core/cpus": "0-3"}).hybrid


def test_eight_cores_with_siblings_and_sixteen_efficient_ones(read, cpu):
    files = {
        f"{CPU}/online": "0-31",
        "sys/devices/cpu_core/cpus": "0-15",
        "sys/devices/cpu_atom/cpus": "16-31",
    }
    for number in range(32):
        core = number // 2 * 4 if number < 16 else 32 + number
        files |= cpu(number, 0, core, f"{number & ~1}-{number | 1}" if number < 16 else str(number))
    kinds = [core.kind for core in read(files).cores]
    assert (kinds.count("P"), kinds.count("E")) == (8, 16)


def test_caches_are_listed_once(read, layout):
    files = layout(cores=2, threads=2)
    for cpu in range(4):
        for index, (level, kind, cpus) in enumerate(
            [(1, "Data", f"{cpu % 2},{cpu % 2 + 2}"), (3, "Unified", "0-3")]
        ):
            base = f"{CPU}/cpu{cpu}/cache/index{index}"
            files |= {f"{base}/level": level, f"{base}/type": kind, f"{base}/shared_cpu_list": cpus}
            files |= {f"{base}/size": "32K" if level == 1 else "16M"}
    found = [(c.level, c.kind, c.size_bytes, sorted(c.cpus)) for c in read(files).caches]
    assert found == [
        (1, "Data", 2**15, [0, 2]),
        (1, "Data", 2**15, [1, 3]),
        (3, "Unified", 2**24, [0, 1, 2, 3]),
    ]
