"""Bytes and room of each node."""

from dataclasses import replace

import pytest

from strata_jit.placement import HEADROOM_BYTES, MatrixSize, ModelSizes, PlanOptions, plan
from tests.placement.machines import GIB, numa, with_nodes

MIB = 1 << 20
SIZES = ModelSizes(
    matrices=(MatrixSize(768, 1 * MIB, n_expert=16), MatrixSize(512, 1 * MIB)),
    vector_bytes=3 * MIB,
    kv_bytes=2 * GIB,
    thread_bytes=MIB,
)


def test_rows_and_bytes_follow_the_shares():
    nodes = plan(numa(12, 12), SIZES).nodes
    assert [node.rows for node in nodes] == [400 * 16 + 264, 368 * 16 + 248]
    assert [node.bytes for node in nodes] == [(node.rows + 3) * MIB for node in nodes]
    assert [node.kv_bytes for node in nodes] == [GIB + 12 * MIB, GIB + 11 * MIB]


def test_recurrent_state_follows_the_threads():
    nodes = plan(numa(12, 12), replace(SIZES, state_bytes=23 * MIB - 1)).nodes
    assert [node.kv_bytes for node in nodes] == [GIB + 24 * MIB, GIB + 22 * MIB]


def test_buffers_of_a_step_are_counted():
    nodes = plan(numa(12, 12), replace(SIZES, buffer_bytes=4 * GIB)).nodes
    assert [node.kv_bytes for node in nodes] == [3 * GIB + 12 * MIB, 3 * GIB + 11 * MIB]


def test_without_sizes_only_the_room_is_known():
    planned = plan(numa(12, 12))
    node = planned.nodes[0]
    assert (node.rows, node.bytes, node.kv_bytes, node.room_bytes) == (None, None, None, 30 * GIB)
    assert node.fits is None and planned.fits is None


def needing(n_bytes):
    """Sizes that make a one-node machine's slice so large."""
    return ModelSizes(matrices=(MatrixSize(8, n_bytes // 8),))


@pytest.mark.parametrize(
    ("excess", "warned", "fits"), [(0, False, True), (1, True, True), (3 * GIB, True, False)]
)
def test_room_must_hold_the_slice_and_two_gib(excess, warned, fits):
    assert HEADROOM_BYTES == 2 * GIB
    machine = numa(4)
    room = 30 * GIB + 1 * GIB  # page cache counts where there is one node
    planned = plan(machine, needing(room - 2 * GIB + 8 * excess))
    assert planned.nodes[0].room_bytes == room
    assert bool(planned.warnings) == warned and (planned.fits is True) == (fits or not warned)


def test_a_node_without_room_is_at_risk_by_numbers():
    machine = with_nodes(numa(12, 12), free_bytes={1: 5 * GIB})
    planned = plan(machine, SIZES)
    assert planned.nodes[1].room_bytes == 5 * GIB
    assert planned.split.on and planned.fits is False
    assert len(planned.warnings) == 1
    words = ("placement at risk", "node 1 needs 7.01 GiB", "2.00 GiB to spare", "room for 5.00 GiB")
    assert all(word in planned.warnings[0] for word in words), planned.warnings


def test_page_cache_counts_where_the_kernel_reclaims_it_first():
    machine = numa(12, 12)
    assert plan(machine).nodes[0].room_bytes == 30 * GIB
    assert plan(replace(machine, zone_reclaim_mode=1)).nodes[0].room_bytes == 31 * GIB


def test_a_memory_limit_is_shared_by_the_nodes():
    machine = replace(numa(12, 12), memory_room_bytes=23 * GIB)
    planned = plan(machine)
    assert [node.room_bytes for node in planned.nodes] == [12 * GIB, 11 * GIB]
    planned = plan(replace(machine, memory_room_bytes=8 * GIB), SIZES)
    assert len(planned.warnings) == 2 and planned.fits is False
    assert all("memory limit" in warning for warning in planned.warnings)


def test_slices_of_test_mode_share_the_machine():
    machine = replace(numa(4), available_bytes=20 * GIB)
    planned = plan(machine, None, PlanOptions(numa_pool="test"))
    assert [node.room_bytes for node in planned.nodes] == [10 * GIB, 10 * GIB]


def test_unknown_memory_is_no_reason_to_warn():
    machine = with_nodes(numa(12, 12), free_bytes={0: None, 1: None})
    planned = plan(machine, SIZES)
    assert planned.nodes[0].room_bytes is None and planned.fits is None and not planned.warnings
