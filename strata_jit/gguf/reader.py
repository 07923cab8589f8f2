"""Opening a GGUF model, of one file or several, and looking things up in it.

Owns `open_gguf` and `GGUFFile`; knows neither tokenizers nor architectures and reads no tensor's bytes.
Versions 2 and 3, little-endian. Layout: ggml's docs/gguf.md and gguf.h.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from strata_jit.errors import ModelError, quoted
from strata_jit.gguf.cursor import Cursor, open_cursor
from strata_jit.gguf.metadata import MAX_KEYS, StringArray, read_metadata, read_raw_pairs, typed_value
from strata_jit.gguf.split import SplitKeys, check_part, check_tensor_count, part_paths, read_split_keys
from strata_jit.gguf.tensors import MAX_TENSORS, TensorInfo, read_tensors

__all__ = ["GGUFFile", "StringArray", "TensorInfo", "open_gguf", "raw_pairs"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # a name of one letter, no dimensions
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # a key of one letter, a value of one byte

T = TypeVar("T")
D = TypeVar("D")
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF model: its files, metadata and tensors.

    `path` is what was asked for, `parts` all files in order (one, unless the model is split). `version`,
    `alignment` and `metadata` are the first part's; `tensors` are those of all parts, in file order.
    Values of `metadata`: Python scalars, `str`, NumPy arrays, `StringArray`, lists of arrays.
    """

    path: Path
    parts: tuple[Path, ...]
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorInfo]

    @overload
    def get(self, key: str, type: type[T]) -> T: ...

    @overload
    def get(self, key: str, type: type[T], default: D) -> T | D: ...

    def get(self, key: str, type: type[T], default: Any = _REQUIRED) -> Any:
        """The value of a metadata key as `type`: int, float, str, bool, numpy.ndarray, StringArray or list.

        Integers of any width are int, and float takes integers too. Raises `ModelError` where the value is
        of another type, or where the key is missing and there is no default.
        """
        value = typed_value(self.parts[0], self.metadata, key, type)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError.at(self.parts[0], quoted(key), "no such key", type.__name__)
        return default

    def tensor(self, name: str) -> TensorInfo:
        """The tensor of that name; `ModelError` if there is none."""
        if name not in self.tensors:
            found = f"none of that name among {len(self.tensors)}"
            raise ModelError.at(self.path, f"tensor {quoted(name)}", found, "the tensor")
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class _Part:
    """One file of a model."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Any]
    split: SplitKeys
    tensors: dict[str, TensorInfo]


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read the header of a GGUF model; of a split one, any part may be named and all are read.

    Raises `ModelError`, one line with file, field, what was found and expected, for whatever is wrong with
    the file. No file stays open.
    """
    if not os.fspath(path):
        raise ModelError("the path of the model is empty, expected that of a GGUF file")
    given = _read_part(Path(path))
    parts = _read_parts(given) if given.split.is_split else (given,)
    return GGUFFile(
        path=given.path,
        parts=tuple(part.path for part in parts),
        version=parts[0].version,
        alignment=parts[0].alignment,
        metadata=parts[0].metadata,
        tensors=_joined(parts),
    )


def _read_parts(given: _Part) -> tuple[_Part, ...]:
    """All parts of a split model, in order."""
    paths = part_paths(given.path, given.split)
    parts = []
    for no, path in enumerate(paths):
        part = given if no == given.split.no else _read_part(path)
        check_part(path, part.split, no, len(paths))
        parts.append(part)
    check_tensor_count(paths[0], parts[0].split, sum(len(part.tensors) for part in parts))
    return tuple(parts)


def _joined(parts: tuple[_Part, ...]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for name, info in part.tensors.items():
            if name in tensors:
                found = f"a second one, after that in {parts[tensors[name].part].path.name}"
                raise ModelError.at(part.path, f"tensor {quoted(name)}", found, "every name once")
            tensors[name] = info
    return tensors


def _read_part(path: Path) -> _Part:
    with open_cursor(path) as cursor:
        version, n_tensors, n_keys = _read_counts(cursor)
        metadata = read_metadata(cursor, n_keys)
        alignment = _alignment(path, metadata)
        split = read_split_keys(path, metadata)
        tensors = read_tensors(cursor, n_tensors, split.no, alignment)
        return _Part(path, version, alignment, metadata, split, tensors)


def raw_pairs(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Metadata of one file: key -> the bytes of key, type and value, in file order. Errors as `open_gguf`."""
    with open_cursor(Path(path)) as cursor:
        _, _, n_keys = _read_counts(cursor)
        return read_raw_pairs(cursor, n_keys)


def _read_counts(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    version = _read_version(cursor)
    n_tensors = cursor.count("number of tensors", _MIN_TENSOR_BYTES, MAX_TENSORS)
    return version, n_tensors, cursor.count("number of keys", _MIN_PAIR_BYTES, MAX_KEYS)


def _read_version(cursor: Cursor) -> int:
    if cursor.size == 0:
        raise cursor.fault("file", "an empty file", "a GGUF file")
    magic = cursor.take(len(MAGIC), "magic")
    if magic != MAGIC:
        raise cursor.fault("magic", repr(magic), f"{MAGIC!r}, with which GGUF files begin")
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise cursor.fault("byte order", "a big-endian file", "a little-endian one; convert the model again")
    raise cursor.fault("version", str(version), " or ".join(str(known) for known in VERSIONS))


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    key = "general.alignment"
    alignment = cast("int | None", typed_value(path, metadata, key, int))
    if alignment is None:
        return DEFAULT_ALIGNMENT
    if alignment <= 0 or alignment & (alignment - 1):
        raise ModelError.at(path, quoted(key), str(alignment), "a power of two")
    return alignment
