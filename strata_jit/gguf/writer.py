"""Writing a GGUF file: header first, then the bytes of the tensors, in any order and by any thread.

Owns the layout of the file and its way to its name: it grows under another name beside it, and gets its own
when it is whole. Knows no type's meaning. Layout: ggml's gguf.h, version 3.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from strata_jit.errors import UsageError
from strata_jit.gguf.metadata import ValueType
from strata_jit.gguf.types import GGMLType

VERSION = 3


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written; `shape` in GGUF order, the length of a row first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) // self.type.block_size * self.type.type_size


def u32_pair(key: str, value: int) -> bytes:
    """The bytes of a metadata pair with a 32-bit value."""
    return _string(key) + struct.pack("<II", ValueType.UINT32, value)


class GGUFWriter:
    """A file in the making: `write` fills tensors, `finish` gives it its name.

    Use as a context manager: leaving it without `finish` removes every trace. All of the file's room is taken
    at the start, so that a full disk shows then.

    path     a file that is there already is replaced by `finish`; UsageError if it is something else, or if
             no file can be made there
    pairs    bytes of metadata pairs, see `reader.raw_pairs`
    OSError, with the path, for whatever the system refuses.
    """

    def __init__(
        self, path: Path, pairs: Iterable[bytes], tensors: Sequence[NewTensor], alignment: int
    ) -> None:
        self.path = Path(os.path.realpath(path))
        if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
            raise UsageError(f"{path}: found something that is not a regular file, expected a file to write")
        offsets, data_bytes = _offsets(tensors, alignment)
        header = _header(list(pairs), tensors, offsets)
        data_start = _round_up(len(header), alignment)
        self._starts = [data_start + offset for offset in offsets]
        self._partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        self._fd = self._open()
        try:
            self._take(data_start + data_bytes)
            self._put(header, 0)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def write(self, tensor: int, offset: int, data: Any) -> None:
        """Put the bytes of `data` (a buffer) at byte `offset` of tensor number `tensor`."""
        self._put(data, self._starts[tensor] + offset)

    def finish(self) -> None:
        """Give the file its name, once its bytes are on the disk."""
        try:
            os.fsync(self._fd)
            os.replace(self._partial, self.path)
        except OSError as error:
            raise self._named(error) from error
        os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        try:
            return os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror}") from None

    def _take(self, n_bytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, n_bytes)
        except OSError as error:
            raise self._named(error) from error

    def _put(self, data: Any, at: int) -> None:
        rest = memoryview(data).cast("B")
        try:
            while rest:
                n_bytes = os.pwrite(self._fd, rest, at)
                rest, at = rest[n_bytes:], at + n_bytes
        except OSError as error:
            raise self._named(error) from error

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with suppress(FileNotFoundError):
                os.unlink(self._partial)

    def _named(self, error: OSError) -> OSError:
        """The error, about the file that was asked for."""
        return OSError(error.errno, error.strerror, os.fspath(self.path))


def _offsets(tensors: Sequence[NewTensor], alignment: int) -> tuple[list[int], int]:
    """Where each tensor's bytes begin, from the start of the data, and the bytes of all."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end = _round_up(end + tensor.nbytes, alignment)
    return offsets, end


def _header(pairs: Sequence[bytes], tensors: Sequence[NewTensor], offsets: Sequence[int]) -> bytes:
    infos = (
        _string(tensor.name)
        + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        + struct.pack("<IQ", tensor.type, offset)
        for tensor, offset in zip(tensors, offsets, strict=True)
    )
    return struct.pack("<4sIQQ", b"GGUF", VERSION, len(tensors), len(pairs)) + b"".join([*pairs, *infos])


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
