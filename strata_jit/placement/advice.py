"""Settings of a machine that make a run slower or less certain, each with what to do about it.

Owns their words and thresholds; decides nothing. What depends on a plan is said by the plan itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from strata_jit.placement.sizes import HEADROOM_BYTES
from strata_jit.placement.words import counted
from strata_jit.topology.cpulist import format_cpulist
from strata_jit.topology.description import Machine, Node
from strata_jit.units import GIB, format_bytes

NUMA_BALANCING_FILE = "/proc/sys/kernel/numa_balancing"
GOVERNOR_FILES = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
GOOD_GOVERNORS = frozenset({"performance"})
SMALL_NODE = 2
"""A node is small if another has more than so many times its memory."""
CACHE_BYTES = GIB
"""From so much page cache on, dropping it is worth the words."""


def advice(machine: Machine) -> tuple[str, ...]:
    """One line for each setting worth changing, most harmful first."""
    return (*_quota(machine), *_numa_balancing(machine), *_governor(machine), *_small_nodes(machine))


def _quota(machine: Machine) -> Iterator[str]:
    quota = machine.cpu_quota
    if quota is None or quota >= len(machine.cores):
        return
    limit = machine.limit("cpu_quota")
    found = (
        f"to lift the CPU quota of {counted(quota, 'CPU')} on {counted(len(machine.cores), 'core')}, give "
        "the container or service a larger one"
    )
    if limit is None:
        yield found
        return
    unlimited = "max" if limit.source.endswith("cpu.max") else "-1"
    yield f"{found} (docker run --cpus, systemd CPUQuota=), or: {_write(unlimited, limit.source)}"


def _numa_balancing(machine: Machine) -> Iterator[str]:
    """Harmless on one node."""
    if machine.numa_balancing and sum(node.has_memory for node in machine.nodes) > 1:
        yield (
            f"the kernel moves pages between nodes by itself ({NUMA_BALANCING_FILE} is "
            f"{machine.numa_balancing}), and every look at where they should be interrupts a thread: "
            f"{_write('0', NUMA_BALANCING_FILE)}"
        )


def _governor(machine: Machine) -> Iterator[str]:
    slow = [governor for governor in machine.governors if governor not in GOOD_GOVERNORS]
    if slow:
        yield (
            f"the frequency governor is {' and '.join(slow)}, which slows cores that wait often: "
            f"{_write('performance', GOVERNOR_FILES)}"
        )


def _small_nodes(machine: Machine) -> Iterator[str]:
    """Nodes with CPUs that this process may use, but with little memory or little of it free."""
    nodes = [
        node for node in machine.nodes if node.has_memory and node.mem_allowed and node.cpus & machine.allowed
    ]
    largest = max((node.memory_bytes or 0 for node in nodes), default=0)
    for node in nodes:
        if node.memory_bytes is not None and SMALL_NODE * node.memory_bytes < largest:
            yield (
                f"node {node.node_id} has {format_bytes(node.memory_bytes)}, another "
                f"{format_bytes(largest)}: rows are cut by threads, not by memory; if its share does not "
                f"fit, leave its CPUs out: numactl --physcpubind={_others(machine, node)} strata-jit ..."
            )
        elif node.free_bytes is not None and node.free_bytes < HEADROOM_BYTES:
            yield _full_node(node)


def _full_node(node: Node) -> str:
    found = f"node {node.node_id} has only {format_bytes(node.free_bytes or 0)} free"
    cache = node.reclaimable_bytes or 0
    if cache < CACHE_BYTES:
        return f"{found}: end what fills it (numactl --hardware, numastat -m)"
    drop = f"sync; {_write('1', '/proc/sys/vm/drop_caches')}"
    return f"{found}, {format_bytes(cache)} hold cached files, which do not always make way: {drop}"


def _others(machine: Machine, node: Node) -> str:
    return format_cpulist(machine.allowed - node.cpus) or "CPUS"


def _write(value: str, path: str) -> str:
    return f"echo {value} | sudo tee {path}"
