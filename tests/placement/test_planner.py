"""Plans for machines that are only described, beyond the reference's examples."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jit.errors import UsageError
from strata_jit.placement import MatrixSize, ModelSizes, Plan, PlanOptions, cut_rows, plan
from strata_jit.placement.options import NUMA_POOL_MODES, POOL_AFFINITIES
from strata_jit.topology.description import Core, Machine, Node
from tests.placement.machines import GIB, hybrid, machines, numa, with_nodes


def plan_of(machine, **options):
    return plan(machine, None, PlanOptions(**options))


def layout(planned):
    return {node.node: list(node.cpus) for node in planned.nodes}


@pytest.mark.parametrize(
    ("machine", "workers"),
    [
        (numa(12, siblings=2), 11),
        (numa(2), 1),
        (numa(1), 0),
        (numa(1, siblings=2), 0),
        (numa(8, siblings=8), 7),
        (numa(8, siblings=2, mask={8, 9, 12, 15}), 3),
        (numa(4, quota=64), 3),
        # as many CPUs as a container may have of a larger machine
        (numa(44, mask=set(range(24))), 23),
    ],
)
def test_default_workers_of_one_node(machine, workers):
    planned = plan_of(machine)
    assert (planned.n_workers, planned.threads) == (workers, workers + 1)
    assert planned.spin and not planned.split.on and not planned.warnings


def test_a_mask_of_second_siblings_still_has_cores():
    planned = plan_of(numa(4, 4, siblings=2, mask=set(range(8, 16))))
    assert layout(planned) == {0: [8, 9, 10, 11], 1: [12, 13, 14]}


def test_a_mask_in_the_middle_of_a_node():
    # node 0 has 0-23 and 48-71, of which the mask leaves the second siblings
    planned = plan_of(numa(24, 24, siblings=2, mask=set(range(24, 96))))
    assert layout(planned) == {0: list(range(48, 65)), 1: list(range(24, 40))}


@pytest.mark.parametrize(
    ("machine", "shares"),
    [
        (numa(8, 8, 8, 8), (8, 7, 7, 7)),
        (numa(*[16] * 8, siblings=2), (16, *[15] * 7)),
        (numa(*[64] * 4), (17, 16, 16, 16)),
        (numa(1, 1, 1, 1), (1, 1, 1, 1)),
        (numa(2, 2), (2, 1)),
        (numa(6, 4), (6, 3)),
        # one node much smaller than the others is left out, one much larger is capped
        (numa(12, 12, 12, 2), (12, 11, 11)),
        (numa(2, 12, 12, 12), (12, 11, 11)),
        (numa(16, 8, 8, 8), (14, 7, 7, 7)),
    ],
)
def test_default_split(machine, shares):
    planned = plan_of(machine)
    assert planned.split.on and planned.shares == shares
    assert planned.split.reason == f"the pool's CPUs span {len(shares)} nodes"
    assert not planned.warnings and planned.placed


@pytest.mark.parametrize(
    ("machine", "node", "workers"),
    [(numa(3, 1), 0, 2), (numa(1, 12), 1, 11), (numa(10, 4), 0, 9), (numa(17, 1, 1), 0, 16)],
)
def test_lopsided_nodes_leave_the_larger_one(machine, node, workers):
    planned = plan_of(machine)
    assert not planned.split.on and planned.split.logged and "lopsided" in planned.split.reason
    assert (planned.nodes[0].node, planned.n_workers) == (node, workers)


def test_uneven_nodes_are_noted():
    planned = plan_of(numa(12, 4), workers=11)
    assert planned.shares == (8, 4)
    assert any("uneven nodes" in note for note in planned.notes)


def test_fewer_threads_than_nodes_take_fewer_nodes():
    planned = plan_of(numa(4, 4, 4, 4), workers=2)
    assert layout(planned) == {0: [0], 1: [4], 2: [8]}
    assert any("no slice on node 3" in note for note in planned.notes)


def test_siblings_come_after_all_cores():
    assert layout(plan_of(numa(2, 2, siblings=2), workers=4)) == {0: [0, 1, 4], 1: [2, 3]}
    assert layout(plan_of(numa(2, siblings=2), workers=2)) == {0: [0, 1, 2]}


def test_interleaved_numbers():
    cores = tuple(Core(0, i, (i,), node=i % 2) for i in range(8))
    nodes = tuple(Node(n, frozenset(range(n, 8, 2))) for n in (0, 1))
    assert layout(plan_of(Machine(frozenset(range(8)), cores, nodes))) == {0: [0, 2, 4, 6], 1: [1, 3, 5]}


def test_node_numbers_with_holes():
    machine = numa(4, 4)
    nodes = tuple(replace(node, node_id=8 * node.node_id) for node in machine.nodes)
    planned = plan_of(replace(machine, nodes=nodes))
    assert layout(planned) == {0: [0, 1, 2, 3], 8: [4, 5, 6]}
    assert [worker.node for worker in planned.workers] == [0, 0, 0, 8, 8, 8]


@pytest.mark.parametrize(
    ("machine", "options", "workers", "shares"),
    [
        (numa(8, quota=4), {}, 3, (4,)),
        (numa(8, siblings=2, quota=1), {}, 0, (1,)),
        (numa(12, 12, quota=8), {}, 7, (4, 4)),
        (numa(12, 12, quota=5), {}, 4, (3, 2)),
        (numa(12, 12, quota=1), {}, 0, (1,)),
        (numa(12, 12, quota=8), {"numa_pool": "0"}, 7, (8,)),
    ],
)
def test_a_quota_caps_the_default(machine, options, workers, shares):
    planned = plan_of(machine, **options)
    assert (planned.n_workers, planned.shares, planned.spin) == (workers, shares, True)
    assert len(planned.warnings) == 1
    assert "CPU quota" in planned.warnings[0] and "sys/fs/cgroup/cpu.max" in planned.warnings[0]


def test_workers_beyond_a_quota_are_pinned_and_never_spin():
    planned = plan_of(numa(12, 12, quota=8), workers=11)
    assert (planned.shares, planned.spin, planned.pinned) == ((6, 6), False, True)
    assert "7 workers will be faster" in planned.warnings[0]


@pytest.mark.parametrize(
    ("affinity", "workers", "cpus"),
    [
        (None, None, [0, 2, 4]),
        ("auto", None, [0, 2, 4]),
        ("p-cores", None, [0, 2, 4]),
        ("all", None, [0, 2, 4, 6, 7, 8, 9]),
        (None, 7, [0, 2, 4, 1, 3, 5, 6, 7]),
        ("auto", 7, [0, 2, 4, 1, 3, 5, 6, 7]),
        ("all", 7, [0, 2, 4, 6, 7, 8, 9, 1]),
        ("p-cores", 5, [0, 2, 4, 1, 3, 5]),
        ("p-cores", 6, None),
    ],
)
def test_hybrid_cores(affinity, workers, cpus):
    planned = plan_of(hybrid(3, 4), pool_affinity=affinity, workers=workers)
    assert planned.nodes[0].cpus == (None if cpus is None else tuple(cpus))
    assert planned.spin == (cpus is not None) == (not planned.warnings)


def test_efficient_cores_of_which_none_is_left_free_are_noted():
    assert any("4 E cores" in note for note in plan_of(hybrid(3, 4)).notes)
    assert not plan_of(hybrid(3, 4), pool_affinity="all").notes


@pytest.mark.parametrize("affinity", POOL_AFFINITIES)
def test_a_mask_of_efficient_cores_is_an_ordinary_machine(affinity):
    planned = plan_of(hybrid(3, 4, mask={6, 7, 8}), pool_affinity=affinity)
    assert planned.nodes[0].cpus == (6, 7, 8)


def test_cores_of_nodes_without_memory_are_left_out():
    # the kernel never lists such a node in Mems_allowed
    machine = with_nodes(numa(8, 8, 8, 8), memory_bytes={0: 0, 3: 0}, mem_allowed={0: False, 3: False})
    planned = plan_of(machine)
    assert layout(planned) == {1: list(range(8, 16)), 2: list(range(16, 23))}
    assert "node 0 has no memory of its own: its CPUs 0-7 are left out" in planned.notes[0]
    assert "node 3" in planned.notes[1] and not planned.warnings


def test_cores_of_nodes_without_memory_join_the_nearest_on_demand():
    machine = with_nodes(numa(8, 8, 8, 8, siblings=2), memory_bytes={0: 0, 3: 0})
    planned = plan_of(machine, workers=23)
    assert layout(planned) == {1: [*range(8, 16), 0, 1, 2, 3], 2: [*range(16, 24), 24, 25, 26, 27]}
    assert [worker.node for worker in planned.workers].count(0) == 4
    assert planned.placed and "of its CPUs 0-7,32-39, CPUs 0-3 joined node 1" in planned.notes[0]


def test_memoryless_nodes_that_are_as_near_share_their_hosts():
    far = dict.fromkeys(range(4), (10, 20, 20, 20))
    machine = with_nodes(numa(4, 4, 4, 4), memory_bytes={1: 0, 3: 0}, distances=far)
    machine = with_nodes(machine, distances={n: tuple(10 if m == n else 20 for m in range(4)) for n in far})
    planned = plan_of(machine, workers=15)
    assert layout(planned) == {0: [0, 1, 2, 3, 4, 5, 6, 7], 2: [8, 9, 10, 11, 12, 13, 14, 15]}


def test_a_node_that_cpuset_mems_excludes_has_no_slice():
    planned = plan_of(with_nodes(numa(12, 12), mem_allowed={1: False}))
    assert layout(planned) == {0: list(range(12))}
    assert not planned.split.on and "span 1 node" in planned.split.reason
    assert "node 1 (cpuset.mems): its CPUs 12-23 are left out" in planned.warnings[0]


def test_cpus_whose_memory_is_all_on_another_node():
    machine = with_nodes(numa(4, 4, mask={4, 5, 6, 7}), mem_allowed={1: False})
    planned = plan_of(machine)
    assert layout(planned) == {0: [4, 5, 6, 7]}
    assert {worker.node for worker in planned.workers} == {1} and planned.placed
    assert "node 1 (cpuset.mems): its CPUs 4-7 joined node 0" in planned.warnings[0]


def test_nodes_without_cpus_have_no_slice():
    machine = numa(4, 4)
    expander = Node(2, frozenset(), 256 * GIB, 256 * GIB, 0, (20, 20, 10))
    planned = plan_of(replace(machine, nodes=(*machine.nodes, expander)))
    assert list(layout(planned)) == [0, 1] and not planned.notes


def test_a_node_all_of_whose_cpus_are_offline():
    machine = numa(4, 4, mask={0, 1, 2, 3})
    nodes = (machine.nodes[0], replace(machine.nodes[1], cpus=frozenset()))
    planned = plan_of(replace(machine, nodes=nodes))
    assert layout(planned) == {0: [0, 1, 2, 3]} and not planned.warnings


def test_a_machine_without_nodes_or_cpus():
    assert layout(plan_of(replace(numa(4), nodes=()))) == {0: [0, 1, 2, 3]}
    planned = plan_of(Machine(frozenset(), (), ()))
    assert (planned.shares, planned.nodes[0].cpus, planned.spin) == ((1,), None, False)
    assert planned.warnings


def test_test_mode_gives_every_slice_a_thread():
    planned = plan_of(numa(2), workers=0, numa_pool="test", test_slices=4)
    assert planned.shares == (1, 1, 1, 1)
    assert (planned.n_workers, planned.threads, planned.spin) == (3, 4, False)
    planned = plan_of(numa(8), workers=6, numa_pool="test", test_slices=3, exchange_rotate=True)
    assert layout(planned) == {0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}


@pytest.mark.parametrize(
    "options",
    [
        {"workers": -1},
        {"workers": 10**9},
        {"numa_pool": "2"},
        {"numa_pool": ""},
        {"numa_pool": "test", "test_slices": 0},
        {"test_slices": 2},
        {"pool_affinity": "pcores"},
    ],
)
def test_options_without_sense(options):
    with pytest.raises(UsageError):
        PlanOptions(**options)


OPTIONS = st.builds(
    PlanOptions,
    workers=st.none() | st.integers(0, 40),
    numa_pool=st.sampled_from([*NUMA_POOL_MODES, None, None]),
    pool_affinity=st.sampled_from(POOL_AFFINITIES),
    exchange_rotate=st.sampled_from([False] * 7 + [True]),
    pinned=st.sampled_from([True] * 7 + [False]),
    platform=st.sampled_from(["linux"] * 7 + ["darwin"]),
)
SIZES = st.builds(
    ModelSizes,
    matrices=st.lists(
        st.builds(MatrixSize, st.integers(0, 300), st.integers(1, 5000), st.integers(1, 9)), max_size=4
    ).map(tuple),
    vector_bytes=st.integers(0, 10000),
    kv_bytes=st.integers(0, GIB),
    thread_bytes=st.integers(0, 10**6),
)


@settings(deadline=None, max_examples=400)
@given(machines, st.none() | SIZES, OPTIONS)
def test_plan_is_total_and_its_promises_hold(machine, sizes, options):
    planned = plan(machine, sizes, options)
    assert Plan.from_json(json.loads(json.dumps(planned.to_json()))) == planned
    check_threads(machine, options, planned)
    check_split(machine, options, planned)
    check_rows(sizes, planned)
    assert plan(machine, None, options).nodes == tuple(
        replace(node, rows=None, bytes=None, kv_bytes=None) for node in planned.nodes
    )


def check_threads(machine, options, planned):
    cpus = [cpu for node in planned.nodes for cpu in node.cpus or ()]
    assert len(cpus) == len(set(cpus)) and set(cpus) <= machine.allowed
    assert planned.threads == planned.n_workers + 1 == sum(planned.shares)
    assert all(node.threads > 0 for node in planned.nodes)
    assert len(cpus) in (0, planned.threads)
    assert [planned.host_cpu, *(worker.cpu for worker in planned.workers)] == (
        cpus or [None] * planned.threads
    )
    assert not set(planned.spare) & set(cpus) and set(planned.spare) <= machine.allowed
    if options.workers is not None and not options.testing:
        assert planned.n_workers == options.workers
    if options.workers is None and machine.cpu_quota is not None and not options.testing:
        assert planned.threads <= machine.cpu_quota
    if planned.threads > len(machine.allowed):
        assert planned.warnings and not planned.pinned and not planned.spin
    assert planned.pinned <= options.pinned


def check_split(machine, options, planned):
    assert planned.split.on == (len(planned.nodes) > 1)
    assert planned.split.reason
    if not planned.split.on or options.testing:
        return
    assert planned.pinned and planned.placed and not options.exchange_rotate
    assert options.numa_pool != "0" and options.platform == "linux"
    assert len({node.node for node in planned.nodes}) == len(planned.nodes)
    assert max(planned.shares) <= 2 * min(planned.shares)
    usable = {node.node_id for node in machine.nodes if node.has_memory and node.mem_allowed}
    unknown = {node.node for node in planned.nodes if machine.node(node.node) is None}
    # a machine none of whose nodes can have memory is described wrongly: it is believed nothing of that
    assert not usable or {node.node for node in planned.nodes} <= usable | unknown


def check_rows(sizes, planned):
    if sizes is None:
        assert {node.rows for node in planned.nodes} == {None}
        return
    assert sum(node.rows for node in planned.nodes) == sum(m.n_rows * m.n_expert for m in sizes.matrices)
    weights = sum(m.n_rows * m.n_expert * m.row_bytes for m in sizes.matrices)
    assert sum(node.bytes for node in planned.nodes) == weights + len(planned.nodes) * sizes.vector_bytes
    for i, node in enumerate(planned.nodes):
        ranges = [cut_rows(m.n_rows, planned.shares)[i] for m in sizes.matrices]
        assert node.rows == sum(
            (stop - start) * m.n_expert for (start, stop), m in zip(ranges, sizes.matrices, strict=True)
        )


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.none() | st.integers(0, 60))
def test_even_nodes_have_even_counts(n_nodes, n_cores, workers):
    planned = plan_of(numa(*[n_cores] * n_nodes, siblings=2), workers=workers)
    assert max(planned.shares) - min(planned.shares) <= 1
