"""From the files to a node's arena: each team thread reads, converts and so first touches its share.

Owns the cutting of the work in chunks, and the reading (`preadv` into a scratch, the file's pages dropped
behind it). Runs in node processes; knows nothing of pinning and messages. Chunks come in the order of the
files, whichever thread takes which.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata_jit.errors import ModelError
from strata_jit.gguf.quants import dequantize
from strata_jit.gguf.types import GGMLType
from strata_jit.kernels import abi
from strata_jit.kernels.repack import repack
from strata_jit.pool.arena import Arena, Placed, conversion_of
from strata_jit.pool.control import PAGE, Memory

SCRATCH_BYTES = 2 << 20
"""Scratch of a loading thread; more only where eight rows are longer."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [row, row + n_rows) of one expert of a tensor, contiguous in the file."""

    placed: Placed
    expert: int
    row: int
    n_rows: int

    @property
    def offset(self) -> int:
        """Byte in the part."""
        spec = self.placed.spec
        return spec.expert_offset(self.expert) + self.row * spec.row_bytes

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.placed.spec.row_bytes


def scratch_bytes(arena: Arena) -> int:
    """Scratch that each loading thread needs."""
    return max([SCRATCH_BYTES, *(8 * p.spec.row_bytes for p in arena.placed)])


def file_bytes(arena: Arena) -> int:
    """Bytes that loading the arena reads."""
    return sum((p.row_stop - p.row_start) * p.spec.row_bytes * p.spec.n_expert for p in arena.placed)


class ChunkQueue:
    """The chunks of an arena in file order, dealt to whichever thread asks."""

    def __init__(self, arena: Arena) -> None:
        self._lock = threading.Lock()
        self._chunks = _chunks(arena, scratch_bytes(arena))

    def take(self) -> Chunk | None:
        with self._lock:
            return next(self._chunks, None)


def _chunks(arena: Arena, budget: int) -> Iterator[Chunk]:
    for placed in sorted(arena.placed, key=lambda p: (p.spec.part, p.spec.offset)):
        step = max(8, budget // placed.spec.row_bytes // 8 * 8)
        for expert in range(placed.spec.n_expert):
            for row in range(placed.row_start, placed.row_stop, step):
                yield Chunk(placed, expert, row, min(step, placed.row_stop - row))


class Loader:
    """Loads chunks with a scratch of its own; make one in each thread, after pinning it."""

    def __init__(self, arena: Arena, memory: Memory, fds: Sequence[int], files: Sequence[str]) -> None:
        self._arena = memory
        self._fds = fds
        self._files = files
        self._scratch_memory = Memory(scratch_bytes(arena))
        size = self._scratch_memory.nbytes
        self._scratch: npt.NDArray[np.uint8] = self._scratch_memory.view(0, size, np.uint8)

    def load(self, queue: ChunkQueue, on_bytes: Callable[[int], None]) -> None:
        """Load chunks until there are none; `on_bytes` gets the bytes of each."""
        while (chunk := queue.take()) is not None:
            self._read(chunk)
            if chunk.placed.spec.role == "vector":
                self._store_vector(chunk)
            else:
                self._store_octets(chunk)
            on_bytes(chunk.nbytes)

    def close(self) -> None:
        """Give the scratch back."""
        del self._scratch
        self._scratch_memory.close()

    def _read(self, chunk: Chunk) -> None:
        part = chunk.placed.spec.part
        target, done = self._scratch.data[: chunk.nbytes], 0
        while done < chunk.nbytes:
            n = os.preadv(self._fds[part], [target[done:]], chunk.offset + done)
            if n == 0:
                raise ModelError.at(
                    self._files[part],
                    chunk.placed.spec.name,
                    f"the end of the file at byte {chunk.offset + done}",
                    f"{chunk.nbytes} bytes from byte {chunk.offset} on",
                )
            done += n
        first = chunk.offset // PAGE * PAGE
        os.posix_fadvise(self._fds[part], first, chunk.offset + done - first, os.POSIX_FADV_DONTNEED)

    def _floats(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        """float32[n_rows, n_cols], C-contiguous."""
        spec = chunk.placed.spec
        rows = self._scratch[: chunk.nbytes].reshape(chunk.n_rows, spec.row_bytes)
        return np.ascontiguousarray(dequantize(GGMLType[spec.file_type], rows, spec.n_cols))

    def _store_vector(self, chunk: Chunk) -> None:
        spec = chunk.placed.spec
        floats = self._floats(chunk)
        first = (chunk.expert * spec.n_rows + chunk.row) * spec.n_cols * 4
        self._arena.view(chunk.placed.offset + first, floats.size, np.float32)[:] = floats.reshape(-1)

    def _store_octets(self, chunk: Chunk) -> None:
        placed, spec = chunk.placed, chunk.placed.spec
        octet = (chunk.row - placed.row_start) // abi.ROW_GROUP
        target = self._arena.address + placed.offset + chunk.expert * placed.expert_stride
        target += octet * placed.octet_stride
        conversion, dequantised = conversion_of(spec)
        source, row_bytes = self._scratch_memory.address, spec.row_bytes
        if dequantised:
            floats = self._floats(chunk)
            source, row_bytes = floats.__array_interface__["data"][0], 4 * spec.n_cols
        convert = repack(conversion)
        convert(source, row_bytes, chunk.n_rows, spec.n_cols, target, placed.octet_stride)
