"""The memory that host and node processes share: its layout, and a mapping of it.

One memfd, mapped by everybody. Byte offsets, all regions page-aligned:

    0                header         stop word at 0, done word at 128
    STEP             step block     abi.STEP_WORDS words, written by the host before each step
    layout.rows      rows           int64[max_rows][4]: token, position, sequence, want_logits
    layout.out_rows  output rows    int64[max_rows]: rows whose logits are wanted, ascending
    layout.kv_table  KV table       int64[n_seq][kv_blocks]: KV slot of (sequence, block)
    layout.nodes     nodes          one region of layout.node_stride bytes each, on pages of their own:
                                      sync block (sync_abi), thread contexts (abi.THREAD_WORDS words each),
                                      int64[n_kinds] nanoseconds per op kind, claim logs
    layout.buffers   buffers        shared activations and results, 64-byte aligned

A node's region is first touched by that node's pinned threads, so it lies in their memory: the host reads it
only once the node has said that its threads have written their contexts.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from strata_jit.errors import PoolError
from strata_jit.kernels import abi, sync_abi
from strata_jit.pool.program import PoolSpec
from strata_jit.units import format_bytes

PAGE = mmap.PAGESIZE
STOP = 0
DONE = 128
STEP = PAGE
THREAD_BYTES = abi.THREAD_WORDS * abi.WORD_BYTES
CONTEXTS = sync_abi.SYNC_BYTES
"""Byte offset of the first thread context in a node's region."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ControlLayout:
    """Byte offsets of the regions; see the module's docstring."""

    rows: int
    out_rows: int
    kv_table: int
    nodes: int
    node_stride: int
    kind_ns: int
    """Offset in a node's region."""
    claim_logs: int
    """Offset in a node's region."""
    claim_log_bytes: int
    """Bytes of one thread's claim log."""
    buffers: tuple[int, ...]
    """Offset of each buffer."""
    nbytes: int

    def node(self, node: int) -> int:
        """Offset of a node's region, which begins with its sync block."""
        return self.nodes + node * self.node_stride

    def thread(self, node: int, thread: int) -> int:
        """Offset of a thread context."""
        return self.node(node) + CONTEXTS + thread * THREAD_BYTES

    def claim_log(self, node: int, thread: int) -> int:
        """Offset of a thread's claim log."""
        return self.node(node) + self.claim_logs + thread * self.claim_log_bytes


def plan_control(spec: PoolSpec) -> ControlLayout:
    """The layout for a pool; host and nodes compute it from the same spec."""
    rows = STEP + PAGE
    out_rows = rows + _up(8 * abi.ROW_WORDS * spec.max_rows, PAGE)
    kv_table = out_rows + _up(8 * spec.max_rows, PAGE)
    nodes = kv_table + _up(8 * spec.n_seq * spec.kv_blocks, PAGE)
    most_threads = max(node.n_threads for node in spec.nodes)
    kind_ns = CONTEXTS + most_threads * THREAD_BYTES
    claim_logs = kind_ns + _up(8 * max(1, len(spec.program.kinds)), abi.LINE_BYTES)
    log_words = sync_abi.CLAIM_LOG_ENTRIES + 2 * spec.claim_log if spec.claim_log else 0
    log_bytes = _up(8 * log_words, abi.LINE_BYTES)
    node_stride = _up(claim_logs + most_threads * log_bytes, PAGE)
    end = nodes + len(spec.nodes) * node_stride
    buffers = []
    for buffer in spec.program.buffers:
        buffers.append(end)
        end += _up(buffer.nbytes, abi.LINE_BYTES)
    return ControlLayout(
        rows,
        out_rows,
        kv_table,
        nodes,
        node_stride,
        kind_ns,
        claim_logs,
        log_bytes,
        tuple(buffers),
        _up(end, PAGE),
    )


def create_memfd(name: str, nbytes: int) -> int:
    """Descriptor of new shared memory, all zero; it costs pages only as they are touched."""
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Memory:
    """Shared or private memory as seen by this process.

    `address` is that of byte 0. Views keep the memory alive: after `close` it goes when the last one does.
    """

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.nbytes = nbytes
        self._memory: mmap.mmap | None = mmap.mmap(fd, nbytes, flags=flags)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._memory, dtype=np.uint8)
        self.address: int = self._bytes.__array_interface__["data"][0]

    def view(self, offset: int, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.int64) -> Any:
        """Writable array of `dtype` at a byte offset."""
        if self._bytes is None:
            raise ValueError("the memory is closed")
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * kind.itemsize
        return self._bytes[offset : offset + nbytes].view(kind).reshape(shape)

    def close(self) -> None:
        """Give up the memory; idempotent."""
        self._bytes = None
        memory, self._memory = self._memory, None
        if memory is not None:
            with suppress(
                BufferError
            ):  # somebody still holds a view, which must not become a view of nothing
                memory.close()


def allocate(nbytes: int, arena: str, name: str) -> Memory:
    """Page-aligned zero memory of one process: "memfd" or "anon". Pages exist once they are touched."""
    nbytes = max(nbytes, PAGE)
    try:
        if arena == "anon":
            return Memory(nbytes)
        fd = create_memfd(name, nbytes)
        try:
            return Memory(nbytes, fd)
        finally:
            os.close(fd)
    except OSError as fault:
        size = format_bytes(nbytes)
        raise PoolError(
            f"{name}: cannot get {size} of memory ({fault.strerror}): "
            "free some, or take a smaller model or context"
        ) from None


def _up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple
