"""Worker counts, CPUs and row cuts for machines that are only described."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jit.errors import UsageError
from strata_jit.placement.plan import cut_rows, plan_nodes
from strata_jit.topology.machine import Core, Machine, Node


def make_machine(n_cores, siblings=1, quota=None):
    """Cores 0 .. n-1; their k-th siblings are CPUs k * n_cores + core."""
    cores = tuple(Core(0, i, tuple(range(i, n_cores * siblings, n_cores))) for i in range(n_cores))
    allowed = frozenset(range(n_cores * siblings))
    return Machine(allowed, cores, (Node(0, allowed),), quota)


@pytest.mark.parametrize(
    ("machine", "workers"),
    [
        (make_machine(12, 2), 11),
        (make_machine(2), 1),
        (make_machine(1), 0),
        (make_machine(1, 2), 0),
        (make_machine(8, 2, quota=3), 2),
        (make_machine(8, quota=1), 0),
        (make_machine(4, quota=64), 3),
    ],
)
def test_default_workers(machine, workers):
    plan = plan_nodes(machine)
    assert (plan.workers, plan.threads) == (workers, workers + 1)
    assert plan.nodes[0].cpus == tuple(range(workers + 1))
    assert plan.spin and not plan.split_on and not plan.warnings


def test_more_threads_than_cores_take_siblings():
    plan = plan_nodes(make_machine(2, 2), workers=2)
    assert plan.nodes[0].cpus == (0, 1, 2)
    assert plan.spin and not plan.warnings


@pytest.mark.parametrize(
    ("machine", "words"),
    [(make_machine(2), "process may use 2 CPUs"), (make_machine(8, quota=1), "CPU quota allows 1 CPU:")],
)
def test_too_many_threads_are_unpinned_and_never_spin(machine, words):
    plan = plan_nodes(machine, workers=5)
    assert (plan.threads, plan.nodes[0].cpus, plan.spin) == (6, None, False)
    assert len(plan.warnings) == 1 and words in plan.warnings[0]


def test_test_mode_deals_threads_in_turn():
    plan = plan_nodes(make_machine(8), workers=6, numa_pool="test", test_slices=3)
    assert plan.split_on and "test" in plan.split_reason
    assert [node.cpus for node in plan.nodes] == [(0, 3, 6), (1, 4), (2, 5)]
    assert plan.shares == (3, 2, 2)


def test_test_mode_gives_every_slice_a_thread():
    plan = plan_nodes(make_machine(2), workers=0, numa_pool="test", test_slices=4)
    assert plan.shares == (1, 1, 1, 1)
    assert (plan.workers, plan.threads, plan.spin) == (3, 4, False)
    assert plan_nodes(make_machine(4), numa_pool="test").shares == (2, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": -1},
        {"numa_pool": "2"},
        {"numa_pool": ""},
        {"numa_pool": "test", "test_slices": 0},
        {"test_slices": 2},
    ],
)
def test_plan_refuses_options_without_sense(options):
    with pytest.raises(UsageError):
        plan_nodes(make_machine(2), **options)


@given(st.integers(0, 5000), st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
def test_cut_rows_covers_everything_once(n_rows, shares):
    ranges = cut_rows(n_rows, shares)
    assert len(ranges) == len(shares)
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert (ranges[0][0], ranges[-1][1]) == (0, n_rows)
    total = sum(shares)
    for (start, stop), share in zip(ranges, shares, strict=True):
        assert start <= stop
        assert start % 8 == 0 or start == n_rows
        assert share or start == stop
        assert abs((stop - start) - n_rows * share / total) <= 16


def test_cut_rows_examples():
    assert cut_rows(768, [12, 11]) == [(0, 400), (400, 768)]
    assert cut_rows(5, [1, 1, 1]) == [(0, 0), (0, 5), (5, 5)]
    assert cut_rows(0, [1, 2]) == [(0, 0), (0, 0)]


@pytest.mark.parametrize(("n_rows", "shares"), [(8, []), (8, [0, 0]), (8, [2, -1]), (-1, [1])])
def test_cut_rows_refuses_shares_without_sense(n_rows, shares):
    with pytest.raises(UsageError):
        cut_rows(n_rows, shares)
