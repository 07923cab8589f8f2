"""Settings worth changing, and the remedies named for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from strata_jit.placement.advice import advice
from strata_jit.topology.description import Limit
from tests.placement.machines import GIB, machines, numa, with_nodes


def test_a_good_machine_needs_none():
    machine = replace(numa(12, 12), numa_balancing=0, governors=("performance",))
    assert advice(machine) == ()


def test_numa_balancing_is_harmless_on_one_node():
    assert advice(replace(numa(12), numa_balancing=1)) == ()
    (line,) = advice(replace(numa(12, 12), numa_balancing=1))
    assert line.endswith("echo 0 | sudo tee /proc/sys/kernel/numa_balancing")


@pytest.mark.parametrize(
    ("source", "value"),
    [("/sys/fs/cgroup/a/cpu.max", "max"), ("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1")],
)
def test_quota_is_lifted_in_the_words_of_its_version(source, value):
    machine = replace(numa(12), cpu_quota=4, limits=(Limit("cpu_quota", 4, source),))
    (line,) = advice(machine)
    assert line.endswith(f"echo {value} | sudo tee {source}")


def test_quota_of_all_cores_is_none():
    assert advice(numa(12, quota=12)) == ()


def test_small_node_is_left_out_by_its_cpus():
    (line,) = advice(with_nodes(numa(4, 4), memory_bytes={1: 8 * GIB}))
    assert "numactl --physcpubind=0-3 " in line


def test_small_node_that_is_not_used_is_no_matter():
    assert advice(with_nodes(numa(4, 4, mask={0, 1}), memory_bytes={1: 8 * GIB})) == ()
    assert advice(with_nodes(numa(4, 4), memory_bytes={1: 8 * GIB}, mem_allowed={1: False})) == ()


@given(machines)
def test_every_machine_gets_lines(machine):
    assert all(line.isprintable() and line for line in advice(machine))
