"""The reference's worked examples: two sockets of 12 cores, CPUs 0-11 and 12-23, siblings 24-47."""

from dataclasses import dataclass

import pytest

from strata_jit.placement import Plan, PlanOptions, plan
from strata_jit.topology.description import Machine
from tests.placement.machines import numa

BOX = numa(12, 12, siblings=2)
SOCKET_0 = numa(12, 12, siblings=2, mask={*range(12), *range(24, 36)})
"""As under `numactl --cpunodebind=0`."""
TWO_32 = numa(32, 32, siblings=2)
MASKED = numa(12, 12, mask=set(range(16)))


@dataclass
class Example:
    name: str
    machine: Machine
    options: dict[str, object]
    workers: int
    on: bool
    layout: list[list[int]]
    """CPUs of each node's threads."""
    logged: bool
    words: str


def span(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


EXAMPLES = [
    Example("unset", BOX, {}, 22, True, [span(0, 12), span(12, 23)], True, "span 2 nodes"),
    Example("off", BOX, {"numa_pool": "0"}, 11, False, [span(0, 12)], False, "switched off"),
    Example("on", BOX, {"numa_pool": "1"}, 22, True, [span(0, 12), span(12, 23)], True, "span 2 nodes"),
    Example("12 workers", BOX, {"workers": 12}, 12, True, [span(0, 7), span(12, 18)], True, "span 2 nodes"),
    Example(
        "off, 22 workers",
        BOX,
        {"numa_pool": "0", "workers": 22},
        22,
        False,
        [span(0, 23)],
        False,
        "switched off",
    ),
    Example("numactl-bound", SOCKET_0, {}, 11, False, [span(0, 12)], False, "span 1 node"),
    Example("numactl-bound, on", SOCKET_0, {"numa_pool": "1"}, 11, False, [span(0, 12)], True, "span 1 node"),
    Example(
        "numactl-bound, off", SOCKET_0, {"numa_pool": "0"}, 11, False, [span(0, 12)], False, "switched off"
    ),
    Example("rotation", BOX, {"exchange_rotate": True}, 11, False, [span(0, 12)], True, "exchange rotation"),
    Example(
        "rotation, 12 workers",
        BOX,
        {"exchange_rotate": True, "workers": 12},
        12,
        False,
        [span(0, 13)],
        True,
        "exchange rotation",
    ),
    Example("not Linux", BOX, {"platform": "darwin"}, 11, False, [span(0, 12)], True, "needs Linux"),
    Example("cap of 32", TWO_32, {}, 32, True, [span(0, 17), span(32, 48)], True, "span 2 nodes"),
    Example("cap of 32, off", TWO_32, {"numa_pool": "0"}, 31, False, [span(0, 32)], False, "switched off"),
    Example(
        "mask of 12 + 4",
        MASKED,
        {},
        11,
        False,
        [span(0, 12)],
        True,
        "lopsided: node 0 would have 12 threads, node 1 would have 3 threads",
    ),
    Example("one socket of 12", numa(12), {}, 11, False, [span(0, 12)], False, "span 1 node"),
    Example("one socket of 8, SMT", numa(8, siblings=2), {}, 7, False, [span(0, 8)], False, "span 1 node"),
    Example("one socket of 16", numa(16), {"numa_pool": "1"}, 15, False, [span(0, 16)], True, "span 1 node"),
    Example("64 cores on one node", numa(64, siblings=2), {}, 32, False, [span(0, 33)], False, "span 1 node"),
]


def cpus_of(planned: Plan) -> list[list[int]]:
    return [list(node.cpus) for node in planned.nodes]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_worked_example(example):
    planned = plan(example.machine, None, PlanOptions(**example.options))
    assert planned.n_workers == example.workers
    assert planned.threads == example.workers + 1
    assert planned.split.on == example.on
    assert cpus_of(planned) == example.layout
    assert planned.split.logged == example.logged
    assert example.words in planned.split.reason
    assert planned.spin and planned.host_cpu == 0 and not planned.warnings


def test_the_host_core_and_the_spare_core():
    planned = plan(BOX)
    assert planned.shares == (12, 11)
    assert [node.node for node in planned.nodes] == [0, 1]
    assert (planned.host_cpu, planned.spare) == (0, (23, 47))
    assert {(worker.cpu, worker.node) for worker in planned.workers} == {
        *((cpu, 0) for cpu in range(1, 12)),
        *((cpu, 1) for cpu in range(12, 23)),
    }
    assert planned.placed


def test_an_unsplit_pool_over_both_sockets_is_not_placed():
    planned = plan(BOX, None, PlanOptions(numa_pool="0", workers=22))
    assert [worker.node for worker in planned.workers] == [0] * 11 + [1] * 11
    assert not planned.placed
    assert plan(BOX, None, PlanOptions(numa_pool="0")).placed


def test_unpinned_threads_have_no_split():
    planned = plan(BOX, None, PlanOptions(pinned=False))
    assert (planned.split.on, planned.split.logged) == (False, True)
    assert "not pinned" in planned.split.reason
    assert (planned.n_workers, planned.host_cpu, planned.placed) == (11, None, False)
    assert {(worker.cpu, worker.node) for worker in planned.workers} == {(None, 0)}


@pytest.mark.parametrize("mode", [None, "0", "1"])
def test_more_workers_than_cpus_are_warned_of_and_never_refused(mode):
    planned = plan(BOX, None, PlanOptions(workers=48, numa_pool=mode))
    assert (planned.n_workers, planned.split.on, planned.spin, planned.pinned) == (48, False, False, False)
    assert len(planned.warnings) == 1 and "49 threads" in planned.warnings[0]
    assert planned.split.logged == (mode != "0")
    if mode != "0":
        assert planned.split.reason == "threads are not pinned: 49 of them on 48 CPUs"


def test_test_mode_slices_what_one_socket_would_have():
    planned = plan(BOX, None, PlanOptions(numa_pool="test"))
    assert planned.split.on and planned.split.logged and "test mode: 2 slices" in planned.split.reason
    assert cpus_of(planned) == [span(0, 12)[::2], span(0, 12)[1::2]]
    assert [node.node for node in planned.nodes] == [0, 1]
    assert not planned.placed


def test_test_mode_slices_threads_that_are_not_pinned():
    planned = plan(numa(2), None, PlanOptions(numa_pool="test", workers=5))
    assert planned.split.on and planned.shares == (3, 3)
    assert not planned.pinned and not planned.spin and planned.warnings


@pytest.mark.parametrize("workers", range(1, 48))
def test_any_number_of_workers_is_spread_evenly(workers):
    planned = plan(BOX, None, PlanOptions(workers=workers))
    assert planned.split.on and planned.n_workers == workers
    assert max(planned.shares) - min(planned.shares) <= 1
    cores = [cpu % 24 for cpus in cpus_of(planned) for cpu in cpus]
    assert len(set(cores)) == min(workers + 1, 24)


def test_no_worker_has_one_node():
    planned = plan(BOX, None, PlanOptions(workers=0))
    assert (planned.shares, planned.split.on, planned.split.logged) == ((1,), False, False)
    assert planned.workers == ()
