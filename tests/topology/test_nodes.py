"""Nodes: holes in ids, without memory, without CPUs, without a directory; distances and memory."""

import pytest

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
GIB = 2**30


def ids(machine):
    return [node.node_id for node in machine.nodes]


def test_nodes_come_from_their_directories_never_from_packages(read, layout):
    machine = read(layout(packages=2, cores=4, nodes_per_package=2))
    assert (len(machine.packages), ids(machine)) == (2, [0, 1, 2, 3])
    assert [core.node for core in machine.cores] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_four_nodes_two_without_memory(read, layout, node):
    files = layout(packages=4, cores=2)
    for number in (0, 3):
        files |= node(number, f"{2 * number}-{2 * number + 1}", gib=0)
    machine = read(files)
    assert [n.node_id for n in machine.nodes if n.cpus and n.has_memory] == [1, 2]
    assert machine.nodes[0].memory_bytes == 0 and len(machine.nodes[0].cpus) == 2


def test_has_memory_speaks_for_a_node_without_meminfo(read, layout):
    files = layout(packages=2, cores=1) | {f"{NODE}/has_memory": "1"}
    del files[f"{NODE}/node0/meminfo"]
    machine = read(files)
    assert (machine.nodes[0].memory_bytes, machine.nodes[0].has_memory) == (0, False)


def test_a_node_that_says_nothing_is_taken_to_have_memory(read, layout):
    files = layout(cores=1)
    del files[f"{NODE}/node0/meminfo"]
    node = read(files).nodes[0]
    assert (node.memory_bytes, node.free_bytes, node.has_memory) == (None, None, True)


@pytest.mark.parametrize("numbers", [(0, 8), (4, 5, 6, 7), (250, 1030)])
def test_node_ids_with_holes(read, layout, node, numbers):
    files = {path: text for path, text in layout(cores=len(numbers)).items() if NODE not in path}
    for cpu, number in enumerate(numbers):
        files |= node(number, str(cpu))
        files[f"{NODE}/node{number}/distance"] = " ".join("10" if n == number else "40" for n in numbers)
    machine = read(files | {f"{NODE}/online": ",".join(map(str, numbers))})
    assert ids(machine) == list(numbers)
    assert [machine.node_of(cpu) for cpu in range(len(numbers))] == list(numbers)
    assert machine.distance(numbers[0], numbers[1]) == 40
    assert machine.distance(numbers[1], numbers[1]) == 10
    assert machine.node(numbers[1]) == machine.nodes[1] and machine.node(99) is None


def test_a_mask_that_cuts_off_a_nodes_first_range(read, layout):
    machine = read(layout(packages=2, cores=24, threads=2), allowed=frozenset(range(24, 96)))
    assert machine.nodes[0].cpus & machine.allowed == set(range(48, 72))
    assert [core.cpus for core in machine.cores if core.node == 0] == [(cpu,) for cpu in range(48, 72)]


def test_all_cpus_of_a_node_offline(read, layout):
    machine = read(layout(packages=2, cores=2) | {f"{CPU}/online": "0-1"})
    assert [(n.node_id, sorted(n.cpus), n.memory_bytes) for n in machine.nodes] == [
        (0, [0, 1], 8 * GIB),
        (1, [], 8 * GIB),
    ]


def test_a_node_of_memory_only(read, layout, node):
    machine = read(layout(cores=2) | node(1, "", gib=64) | {f"{NODE}/possible": "0-3"})
    assert [(n.node_id, len(n.cpus), n.memory_bytes) for n in machine.nodes] == [
        (0, 2, 8 * GIB),
        (1, 0, 64 * GIB),
    ]
    assert machine.nodes_offline == {2, 3}


def test_no_node_directory_is_one_virtual_node(read, layout):
    files = {path: text for path, text in layout(packages=2).items() if NODE not in path}
    meminfo = (
        "MemTotal:  2048 kB\nMemFree:  1024 kB\nActive(file):  100 kB\nInactive(file):  60 kB\nDirty:  10 kB"
    )
    machine = read(files | {"proc/meminfo": f"{meminfo}\nMemAvailable:  1200 kB"})
    (node,) = machine.nodes
    assert node.virtual and node.cpus == set(range(4)) and node.distances == (10,)
    assert (node.memory_bytes, node.free_bytes, node.reclaimable_bytes) == (
        2048 * 1024,
        1024 * 1024,
        150 * 1024,
    )
    assert (machine.memory_bytes, machine.available_bytes) == (2048 * 1024, 1200 * 1024)


def test_available_memory_of_old_kernels(read, layout):
    machine = read(layout() | {"proc/meminfo": "MemTotal: 9 kB\nMemFree: 4 kB\nBuffers: 1 kB\nCached: 2 kB"})
    assert machine.available_bytes == 7 * 1024


@pytest.mark.parametrize("row", [None, "", "10", "10 20 30", "10 x", "10 -20"])
def test_distances_that_are_missing_or_malformed(read, layout, row):
    files = layout(packages=2)
    del files[f"{NODE}/node0/distance"]
    machine = read(files if row is None else files | {f"{NODE}/node0/distance": row})
    assert [node.distances for node in machine.nodes] == [(10, 20), (21, 10)]


def test_a_row_of_distances_may_count_nodes_that_are_not_shown(read, layout, node):
    files = {path: text for path, text in layout(cores=1).items() if NODE not in path}
    files |= node(1, "0") | {f"{NODE}/possible": "0-1", f"{NODE}/node1/distance": "21 11"}
    assert read(files).nodes[0].distances == (11,)


def test_masks_where_there_are_no_lists(read, layout):
    files = layout(packages=2, cores=2)
    for number, mask in enumerate(["3", "c"]):
        del files[f"{NODE}/node{number}/cpulist"]
        files[f"{NODE}/node{number}/cpumap"] = mask
    assert [sorted(node.cpus) for node in read(files).nodes] == [[0, 1], [2, 3]]


def test_a_cpu_that_no_node_lists(read, layout):
    files = layout(packages=2, cores=2) | {f"{NODE}/node1/cpulist": "junk"}
    files |= {f"{CPU}/cpu2/node1/uevent": ""}
    assert [sorted(node.cpus) for node in read(files).nodes] == [[0, 1, 3], [2]]


def test_nodes_that_claim_the_same_cpus(read, layout):
    files = layout(packages=2, cores=2)
    files |= {f"{NODE}/node{number}/cpulist": "0-3" for number in (0, 1)}
    assert [sorted(node.cpus) for node in read(files).nodes] == [[0, 1, 2, 3], []]


def test_interleaved_numbers(read, layout):
    files = layout(packages=2, cores=2)
    files |= {f"{NODE}/node0/cpulist": "0,2", f"{NODE}/node1/cpulist": "1,3"}
    assert [core.node for core in read(files).cores] == [0, 1, 0, 1]
