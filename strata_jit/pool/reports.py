"""What a pool tells about itself: nodes, kernels, times; and how that is read from the shared memory.

Owns these records. Reads words that the team's threads write without order: a figure may be a moment old.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strata_jit.errors import PoolError
from strata_jit.kernels import abi, sync_abi
from strata_jit.pool.control import ControlLayout, Int64Array, Memory
from strata_jit.pool.program import PoolSpec


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node process says about itself once its slice is loaded."""

    node: int
    pid: int
    cpus: tuple[tuple[int, ...], ...]
    """CPU mask of each thread, read back from the kernel."""
    arena_bytes: int
    """Weights as stored."""
    kv_bytes: int
    pages: int

    @classmethod
    def from_message(cls, node: int, pid: int, plain: Mapping[str, Any]) -> NodeReport:
        """From the "loaded" message of a node process."""
        cpus = tuple(tuple(mask) for mask in plain["cpus"])
        return cls(node, pid, cpus, plain["bytes"], plain["kv_bytes"], plain["pages"])


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """An op, or the type of a matrix, and the variant of its kernels that runs."""

    op: str
    variant: str


@dataclass(frozen=True, slots=True)
class ThreadStats:
    """One team thread since the start."""

    node: int
    thread: int
    wait_ns: int
    """Lost at barriers."""
    sleeps: int
    """Futex sleeps, those between steps included."""
    state: str
    op: int
    """Row of the program that it executes or executed last."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Cumulative figures; differences of two of them describe the time between."""

    threads: tuple[ThreadStats, ...]
    kind_ns: tuple[dict[str, int], ...]
    """Per node: nanoseconds inside ops of each metric class, on the node's first thread."""

    @property
    def wait_ns(self) -> tuple[int, ...]:
        """Nanoseconds lost at barriers, by thread."""
        return tuple(thread.wait_ns for thread in self.threads)


def read_stats(memory: Memory, layout: ControlLayout, spec: PoolSpec) -> PoolStats:
    """Figures of all threads and nodes."""
    names = spec.program.kinds
    kinds = []
    for node in spec.nodes:
        spent = memory.view(layout.node(node.node) + layout.kind_ns, len(names))
        kinds.append(dict(zip(names, spent.tolist(), strict=True)))
    threads = tuple(_thread_stats(*context) for context in _contexts(memory, layout, spec))
    return PoolStats(threads, tuple(kinds))


def loaded_bytes(memory: Memory, layout: ControlLayout, spec: PoolSpec) -> int:
    """File bytes that all threads have loaded so far."""
    return sum(int(words[sync_abi.PRIVATE_LOADED_BYTES]) for _, _, words in _contexts(memory, layout, spec))


def read_claims(memory: Memory, layout: ControlLayout, node: int, thread: int) -> Int64Array:
    """int64[n, 2]: (serial of the op, unit) of a thread's claims. PoolError if the log was too small."""
    log = memory.view(layout.claim_log(node, thread), layout.claim_log_bytes // abi.WORD_BYTES)
    count, capacity = int(log[sync_abi.CLAIM_LOG_COUNT]), int(log[sync_abi.CLAIM_LOG_CAPACITY])
    if count > capacity:
        raise PoolError(f"claim log of {capacity} entries overflowed: {count} claims")
    first = sync_abi.CLAIM_LOG_ENTRIES
    entries: Int64Array = log[first : first + 2 * count].reshape(count, 2).copy()
    return entries


def _contexts(memory: Memory, layout: ControlLayout, spec: PoolSpec) -> Iterator[tuple[int, int, Int64Array]]:
    """(node, thread, words of the context) of every thread."""
    for node in spec.nodes:
        for thread in range(node.n_threads):
            yield node.node, thread, memory.view(layout.thread(node.node, thread), abi.THREAD_WORDS)


def _thread_stats(node: int, thread: int, words: Int64Array) -> ThreadStats:
    return ThreadStats(
        node,
        thread,
        int(words[sync_abi.PRIVATE_WAIT_NS]),
        int(words[sync_abi.PRIVATE_SLEEPS]),
        sync_abi.STATE_NAMES[words[sync_abi.PRIVATE_STATE]],
        int(words[sync_abi.PRIVATE_OP]),
    )
