"""Reading the header of one GGUF file from front to back, with every length checked before it is believed.

Owns the bytes of the header and the errors about its end; knows no field. It reads with `pread` and not
through a mapping, so that a file cut short by someone else is an error here and not a SIGBUS.
"""

from __future__ import annotations

import os
import stat
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata_jit.errors import ModelError, quoted

HEADER_LIMIT_BYTES = 256 << 20
"""Metadata and tensor list of one file; real ones take 2 to 30 MB. Bounds memory whatever a file claims."""
NAME_LIMIT_BYTES = 65535
"""Longest key or tensor name, as in ggml's docs/gguf.md."""
_READ_BYTES = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in the header of an open file; every read names the `field` that it is for.

    Reads raise `ModelError` where the file ends too early or a length cannot be true.
    """

    __slots__ = ("_data", "_fd", "path", "pos", "size")

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.size = size
        self.pos = 0
        self._fd = fd
        self._data = bytearray()

    @property
    def room(self) -> int:
        """Bytes after the position that can still belong to the header."""
        return min(self.size, HEADER_LIMIT_BYTES) - self.pos

    def fault(self, field: str, found: str, expected: str) -> ModelError:
        """The error to raise about a field of this file."""
        return ModelError.at(self.path, field, found, expected)

    def unpack(self, form: struct.Struct, field: str) -> int | float:
        """The next number, in the form of one `struct` code."""
        self._need(form.size, field)
        value: int | float = form.unpack_from(self._data, self.pos)[0]
        self.pos += form.size
        return value

    def u32(self, field: str) -> int:
        """The next unsigned 32-bit integer."""
        return int(self.unpack(_U32, field))

    def u64(self, field: str) -> int:
        """The next unsigned 64-bit integer."""
        return int(self.unpack(_U64, field))

    def take(self, n_bytes: int, field: str) -> bytes:
        """The next `n_bytes` bytes."""
        self._need(n_bytes, field)
        start = self.pos
        self.pos += n_bytes
        return self.slice(start, self.pos)

    def slice(self, start: int, stop: int) -> bytes:
        """Bytes that were read before, by position in the file."""
        return bytes(memoryview(self._data)[start:stop])

    def string(self, field: str) -> bytes:
        """The next string: a 64-bit length, then that many bytes."""
        n_bytes = self.u64(field)
        if n_bytes > self.room:
            raise self._too_long(field, n_bytes, self.room)
        return self.take(n_bytes, field)

    def name(self, field: str) -> str:
        """The next string, as the name of something: UTF-8, not empty, not longer than names may be."""
        raw = self.string(field)
        if not 0 < len(raw) <= NAME_LIMIT_BYTES:
            raise self.fault(field, f"a name of {len(raw)} bytes", f"1 to {NAME_LIMIT_BYTES}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as err:
            shown = quoted(raw.decode("utf-8", "backslashreplace"))
            raise self.fault(field, f"{shown}, invalid at byte {err.start}", "UTF-8") from None

    def count(self, field: str, min_item_bytes: int, limit: int | None = None) -> int:
        """The next 64-bit count of items that take `min_item_bytes` or more each, at most `limit`."""
        n_items = self.u64(field)
        most = max(self.room, 0) // min_item_bytes
        if n_items > most:
            raise self.fault(field, f"{n_items}", f"at most {most} in the {self.room} bytes left")
        if limit is not None and n_items > limit:
            raise self.fault(field, f"{n_items}", f"at most {limit}")
        return n_items

    def skip_strings(self, n_strings: int, field: str) -> array[int]:
        """Pass over strings; positions of the first byte of each, and at last that of a string to follow.

        String i is thus `slice(starts[i], starts[i + 1] - 8)`. The one tight loop of the reader: a
        vocabulary has hundreds of thousands of strings.
        """
        data, limit, pos = self._data, len(self._data), self.pos
        starts: array[int] = array("I")
        append, length_at = starts.append, _U64.unpack_from
        for _ in range(n_strings):
            start = pos + 8
            if start > limit:
                limit = self._read_past(pos, 8, starts, field)
            append(start)
            pos = start + length_at(data, pos)[0]
        if pos > limit:
            self._read_past(pos, 0, starts, field)
        append(pos + 8)
        self.pos = pos
        return starts

    def _read_past(self, pos: int, n_bytes: int, starts: array[int], field: str) -> int:
        """Read on to `n_bytes` after `pos`, the end of the last string; how far has been read then."""
        last = len(starts) - 1
        if starts and pos > self.size:
            raise self._too_long(f"{field}[{last}]", pos - starts[last], self.size - starts[last])
        self.pos = pos
        self._need(n_bytes, f"{field}[{last + 1}]")
        return len(self._data)

    def _need(self, n_bytes: int, field: str) -> None:
        stop = self.pos + n_bytes
        if stop <= len(self._data):
            return
        if stop > self.size:
            raise self._truncated(field, n_bytes)
        if stop > HEADER_LIMIT_BYTES:
            raise self.fault(field, f"a header of {stop} bytes or more", f"at most {HEADER_LIMIT_BYTES}")
        while len(self._data) < stop:
            self._read_more(stop, field)

    def _read_more(self, stop: int, field: str) -> None:
        start = len(self._data)
        ahead = max(_READ_BYTES, start)  # doubling keeps the copies few
        try:
            chunk = os.pread(self._fd, max(stop - start, min(ahead, HEADER_LIMIT_BYTES - start)), start)
        except OSError as err:
            raise self.fault(field, f"a read error ({err.strerror})", "readable bytes") from err
        if not chunk:
            self.size = start
            raise self._truncated(field, stop - self.pos)
        self._data += chunk

    def _truncated(self, field: str, n_bytes: int) -> ModelError:
        found = f"the end of the file at byte {self.size}"
        return self.fault(field, found, f"{n_bytes} bytes from byte {self.pos} on (is the file cut short?)")

    def _too_long(self, field: str, n_bytes: int, rest: int) -> ModelError:
        return self.fault(field, f"a string of {n_bytes} bytes", f"at most the {rest} bytes left")


@contextmanager
def open_cursor(path: Path) -> Iterator[Cursor]:
    """Open a regular file for reading; `ModelError` if there is none or it may not be read."""
    try:
        status = os.stat(path)  # before opening: opening a pipe would wait for its writer
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "something that is not a regular file"
            raise ModelError.at(path, "file", kind, "a GGUF file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as err:
        raise ModelError.at(path, "file", f"an error ({err.strerror})", "a readable GGUF file") from err
    except ValueError as err:  # a null character in the path
        raise ModelError.at(path, "file", f"an error ({err})", "a readable GGUF file") from err
    try:
        yield Cursor(path, fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
