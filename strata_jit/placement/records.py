"""A plan as plain values, and its JSON form.

Owns the records; how a plan comes about is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Split:
    """Whether matrices are cut over several node processes, and why, or why not."""

    on: bool
    reason: str
    logged: bool
    """Whether a run should say so: not where a split was switched off, nor, unless it was asked for, where
    the pool has one node anyway."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker thread. The host core's own thread is none."""

    cpu: int | None
    """None if it is not pinned."""
    node: int
    """NUMA node of its CPU, which is not always the one whose slice it serves: see `NodePlan.cpus`."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node process."""

    node: int
    """NUMA node of its memory; in test mode the slice's number."""
    threads: int
    """The first node's include the one on the host's core."""
    cpus: tuple[int, ...] | None
    """One per thread, in order; None where they are not pinned."""
    rows: int | None = None
    """Rows of all matrices, those of every expert counted; None without sizes, as for both sizes below."""
    bytes: int | None = None
    """Weights that it holds."""
    kv_bytes: int | None = None
    """KV memory, state of recurrent layers, its share of the step's buffers, and the threads' scratch."""
    room_bytes: int | None = None
    """Memory that it can have; None where that is not known."""

    @property
    def fits(self) -> bool | None:
        """Whether there is room for everything; None where that is not known."""
        if self.bytes is None or self.kv_bytes is None or self.room_bytes is None:
            return None
        return self.bytes + self.kv_bytes <= self.room_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Who works where. The team's threads are the workers and one on the host's core."""

    split: Split
    nodes: tuple[NodePlan, ...]
    """Node processes in order; the first holds the host core's thread, its first."""
    workers: tuple[Worker, ...]
    """In the order of the nodes' threads."""
    spin: bool
    """False where threads share CPUs or CPU time, and so must never spin."""
    placed: bool
    """Whether threads are pinned to the nodes that `nodes` names, so that memory lands there."""
    spare: tuple[int, ...] = ()
    """CPUs of the nodes in use on whose cores no thread runs."""
    warnings: tuple[str, ...] = ()
    """What to change for a faster or safer run."""
    notes: tuple[str, ...] = ()
    """Choices that may surprise."""

    @property
    def host_cpu(self) -> int | None:
        """CPU of the host core's thread; None if it is not pinned."""
        cpus = self.nodes[0].cpus
        return None if cpus is None else cpus[0]

    @property
    def n_workers(self) -> int:
        return len(self.workers)

    @property
    def threads(self) -> int:
        """Size of the team."""
        return sum(node.threads for node in self.nodes)

    @property
    def shares(self) -> tuple[int, ...]:
        """Threads of each node, as `cut_rows` takes them."""
        return tuple(node.threads for node in self.nodes)

    @property
    def pinned(self) -> bool:
        return self.nodes[0].cpus is not None

    @property
    def fits(self) -> bool | None:
        """Whether every node has room; None where that is not known."""
        known = [node.fits for node in self.nodes]
        return False if False in known else None if None in known else True

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; `from_json` is the inverse."""
        return {
            "split": asdict(self.split),
            "host_cpu": self.host_cpu,
            "spare": list(self.spare),
            "n_workers": self.n_workers,
            "threads": self.threads,
            "spin": self.spin,
            "placed": self.placed,
            "workers": [asdict(worker) for worker in self.workers],
            "nodes": [_node_json(node) for node in self.nodes],
            "fits": self.fits,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Plan:
        return cls(
            split=Split(**plain["split"]),
            nodes=tuple(_node(node) for node in plain["nodes"]),
            workers=tuple(Worker(**worker) for worker in plain["workers"]),
            spin=plain["spin"],
            placed=plain["placed"],
            spare=tuple(plain["spare"]),
            warnings=tuple(plain["warnings"]),
            notes=tuple(plain["notes"]),
        )


def _node_json(node: NodePlan) -> dict[str, Any]:
    return {**asdict(node), "cpus": None if node.cpus is None else list(node.cpus), "fits": node.fits}


def _node(plain: Mapping[str, Any]) -> NodePlan:
    known = {key: value for key, value in plain.items() if key != "fits"}
    return NodePlan(**{**known, "cpus": None if known["cpus"] is None else tuple(known["cpus"])})
