"""What a model needs, node by node, and whether a node has room for it.

Owns the arithmetic of bytes. Never refuses: what does not fit is said in a warning, since first touch places
what it can and the rest is only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata_jit.placement.records import NodePlan
from strata_jit.placement.rows import cut_rows
from strata_jit.topology.description import Machine
from strata_jit.units import GIB, format_bytes

HEADROOM_BYTES = 2 * GIB
"""Memory that should stay free on every node."""


@dataclass(frozen=True, slots=True)
class MatrixSize:
    """A matrix that is cut by rows, or one for each of `n_expert` experts."""

    n_rows: int
    row_bytes: int
    n_expert: int = 1


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model needs in memory."""

    matrices: tuple[MatrixSize, ...] = ()
    vector_bytes: int = 0
    """Tensors that every node holds whole."""
    kv_bytes: int = 0
    """KV memory over all nodes, which share it evenly."""
    state_bytes: int = 0
    """State of recurrent layers over all nodes, which share it in proportion to their threads."""
    buffer_bytes: int = 0
    """Activations and results of a step, which all nodes share; counted evenly."""
    thread_bytes: int = 0
    """Scratch memory of each thread."""


def with_sizes(nodes: Sequence[NodePlan], sizes: ModelSizes | None) -> list[NodePlan]:
    """The nodes with rows and bytes of their slices, in proportion to their threads."""
    if sizes is None:
        return list(nodes)
    shares = [node.threads for node in nodes]
    rows, weights = [0] * len(nodes), [sizes.vector_bytes] * len(nodes)
    for matrix in sizes.matrices:
        for i, (start, stop) in enumerate(cut_rows(matrix.n_rows, shares)):
            rows[i] += matrix.n_expert * (stop - start)
            weights[i] += matrix.n_expert * (stop - start) * matrix.row_bytes
    kv = -(-(sizes.kv_bytes + sizes.buffer_bytes) // len(nodes))
    state = state_by_node(sizes.state_bytes, shares)
    kept = [kv + state[i] + share * sizes.thread_bytes for i, share in enumerate(shares)]
    return [
        replace(node, rows=rows[i], bytes=weights[i], kv_bytes=kept[i]) for i, node in enumerate(nodes)
    ]


def state_by_node(n_bytes: int, shares: Sequence[int]) -> list[int]:
    """Each node's part of the recurrent state, of which every thread computes the same."""
    return [-(-n_bytes * share // sum(shares)) for share in shares]


def with_room(nodes: Sequence[NodePlan], machine: Machine, *, slices: bool = False) -> list[NodePlan]:
    """The nodes with the memory that each can have; `slices`: they are parts of the machine, no NUMA nodes.

    What a control group leaves to the process is shared as the rows are, so that all of it is not promised
    to every node.
    """
    threads = sum(node.threads for node in nodes)
    shared = [machine.memory_room_bytes, machine.available_bytes if slices else None]
    limits = [limit for limit in shared if limit is not None]
    roomy = []
    for node in nodes:
        room = [limit * node.threads // threads for limit in limits]
        own = None if slices else _node_room(machine, node.node)
        room += [] if own is None else [own]
        roomy.append(replace(node, room_bytes=max(0, min(room)) if room else None))
    return roomy


def _node_room(machine: Machine, node_id: int) -> int | None:
    """Memory that a node can give; None where that is not known.

    Page cache counts only where the kernel must give it up: on a machine whose other nodes cannot help, or
    that reclaims before it uses them. Elsewhere a node that is full of cache hands out another's memory.
    """
    node = machine.node(node_id)
    if node is None or node.free_bytes is None:
        return None
    return node.free_bytes + (node.reclaimable_bytes or 0 if _reclaims(machine) else 0)


def _reclaims(machine: Machine) -> bool:
    usable = [node for node in machine.nodes if node.has_memory and node.mem_allowed]
    return len(usable) <= 1 or bool(machine.zone_reclaim_mode)


def room_warnings(nodes: Sequence[NodePlan], machine: Machine) -> list[str]:
    """One line for each node without room for what it needs and `HEADROOM_BYTES`."""
    lines = [_room_warning(node, machine, len(nodes)) for node in nodes]
    return [line for line in lines if line]


def _room_warning(node: NodePlan, machine: Machine, n_nodes: int) -> str:
    needed = (node.bytes or 0) + (node.kv_bytes or 0)
    if node.bytes is None or node.room_bytes is None or needed + HEADROOM_BYTES <= node.room_bytes:
        return ""
    found = (
        f"placement at risk: node {node.node} needs {format_bytes(needed)} and "
        f"{format_bytes(HEADROOM_BYTES)} to spare, but has room for {format_bytes(node.room_bytes)}"
    )
    if node.room_bytes != _node_room(machine, node.node) and machine.memory_room_bytes is not None:
        return f"{found} within the control group's memory limit: raise it, or the kernel may end the run"
    if n_nodes > 1:
        return f"{found}: free memory there, or pages will lie on other nodes"
    return f"{found}: free memory, or take a smaller model or context"
