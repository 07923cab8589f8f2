"""NUMA nodes and memory as /sys/devices/system/node and /proc/meminfo describe them.

Owns which CPUs and how much memory a node has, and how far nodes are apart. Nodes come from node directories
alone, never from packages; a kernel without them gets one virtual node.
"""

from __future__ import annotations

import re
from dataclasses import replace

from strata_jit.topology.cpus import CPU_DIR
from strata_jit.topology.description import LOCAL_DISTANCE, REMOTE_DISTANCE, Core, Node
from strata_jit.topology.sysfs import Tree, kib_of

NODE_DIR = "sys/devices/system/node"
MEMINFO = "proc/meminfo"


def read_nodes(tree: Tree, online: frozenset[int], mems_allowed: frozenset[int] | None) -> tuple[Node, ...]:
    """All nodes that are online, ascending; every CPU that is online is on exactly one of them."""
    ids = tree.numbered(NODE_DIR, "node")
    if not ids:
        return (_virtual_node(tree, online),)
    cpus = _node_cpus(tree, ids, online)
    memory_ids = tree.read_list(f"{NODE_DIR}/has_memory")
    nodes = []
    for node_id in ids:
        memory = read_node_memory(tree, node_id)
        total = memory.memory_bytes
        if total is None and memory_ids and node_id not in memory_ids:
            total = 0
        nodes.append(
            replace(
                memory,
                cpus=cpus[node_id],
                memory_bytes=total,
                distances=_distances(tree, ids, node_id),
                mem_allowed=mems_allowed is None or node_id in mems_allowed,
            )
        )
    return tuple(nodes)


def read_node_memory(tree: Tree, node_id: int) -> Node:
    """A node with nothing but its number and the present state of its memory."""
    table = _node_table(tree, node_id)
    total, free = kib_of(table, "MemTotal"), kib_of(table, "MemFree")
    return Node(node_id, frozenset(), total, free, _reclaimable(table))


def read_nodes_offline(tree: Tree) -> frozenset[int]:
    """Numbers of nodes that could be but are not."""
    online = frozenset(tree.numbered(NODE_DIR, "node"))
    return (tree.read_list(f"{NODE_DIR}/possible") or online) - online


def read_memory(tree: Tree) -> tuple[int | None, int | None]:
    """Bytes of the whole machine: total, and available without swapping."""
    table = tree.read_table(MEMINFO)
    available = kib_of(table, "MemAvailable")
    if available is None:  # kernels before 3.14
        parts = [kib_of(table, key) for key in ("MemFree", "Buffers", "Cached")]
        available = None if parts[0] is None else sum(part or 0 for part in parts)
    return kib_of(table, "MemTotal"), available


def place_cores(cores: tuple[Core, ...], nodes: tuple[Node, ...]) -> tuple[Core, ...]:
    """The same cores, each with the node of its first CPU."""
    node_of = {cpu: node.node_id for node in nodes for cpu in node.cpus}
    return tuple(replace(core, node=node_of.get(core.siblings[0], 0)) for core in cores)


def _virtual_node(tree: Tree, online: frozenset[int]) -> Node:
    table = tree.read_table(MEMINFO)
    total, free = kib_of(table, "MemTotal"), kib_of(table, "MemFree")
    return Node(0, online, total, free, _reclaimable(table), (LOCAL_DISTANCE,), virtual=True)


def _node_cpus(tree: Tree, ids: list[int], online: frozenset[int]) -> dict[int, frozenset[int]]:
    """CPUs of each node. One that two nodes claim goes to the lower; one that none claims to where its own
    directory says, or else to the first node."""
    left = online
    cpus: dict[int, frozenset[int]] = {}
    for node_id in ids:
        base = f"{NODE_DIR}/node{node_id}"
        claimed = tree.read_set(f"{base}/cpulist", f"{base}/cpumap") or frozenset()
        cpus[node_id] = claimed & left
        left -= claimed
    for cpu in left:
        linked = [node for node in tree.numbered(f"{CPU_DIR}/cpu{cpu}", "node") if node in cpus]
        home = linked[0] if linked else ids[0]
        cpus[home] |= {cpu}
    return cpus


def _node_table(tree: Tree, node_id: int) -> dict[str, str]:
    """Fields of a node's meminfo: lines are "Node 0 MemTotal:  123 kB"."""
    table = tree.read_table(f"{NODE_DIR}/node{node_id}/meminfo")
    return {re.sub(r"^Node\s+[0-9]+\s+", "", key): value for key, value in table.items()}


def _reclaimable(table: dict[str, str]) -> int | None:
    """Clean page cache of files, which the kernel can drop."""
    active, inactive = kib_of(table, "Active(file)"), kib_of(table, "Inactive(file)")
    if active is None or inactive is None:
        return None
    return max(0, active + inactive - (kib_of(table, "Dirty") or 0) - (kib_of(table, "Writeback") or 0))


def _distances(tree: Tree, ids: list[int], node_id: int) -> tuple[int, ...]:
    """Distances to `ids`. The kernel's row has one number per node that is online, ascending."""
    row = (tree.read(f"{NODE_DIR}/node{node_id}/distance") or "").split()
    known = all(re.fullmatch(r"[0-9]{1,9}", word) for word in row)
    lists = (tree.read_list(f"{NODE_DIR}/{name}") for name in ("online", "possible"))
    for targets in (ids, *(sorted(found or ()) for found in lists)):
        if known and len(row) == len(targets) and node_id in targets:
            by_id = dict(zip(targets, map(int, row), strict=True))
            return tuple(by_id.get(other, _default(node_id, other)) for other in ids)
    return tuple(_default(node_id, other) for other in ids)


def _default(start: int, end: int) -> int:
    return LOCAL_DISTANCE if start == end else REMOTE_DISTANCE
