"""The key-value part of a GGUF header: all 13 value types, arrays of arrays included.

Owns value types, `StringArray` and typed look-up; knows no key's meaning. Numbers and booleans become Python
scalars, strings `str`, arrays of numbers read-only NumPy arrays, arrays of strings `StringArray`, arrays of
arrays lists of these. Layout: ggml's gguf.h.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from strata_jit.errors import ModelError, quoted
from strata_jit.gguf.cursor import Cursor

MAX_KEYS = 1 << 16
MAX_NESTED_ARRAYS = 1 << 16
"""Arrays within arrays in one file; every one is a Python object, so their number is bounded."""
MAX_DEPTH = 4

T = TypeVar("T")


class ValueType(IntEnum):
    """Type of a metadata value, as stored."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_CODES: dict[ValueType, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "B",  # any byte but 0 is true, as in ggml
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_FORMS = {value_type: struct.Struct("<" + code) for value_type, code in _CODES.items()}
_DTYPES = {value_type: np.dtype("<" + code) for value_type, code in _CODES.items()}


class StringArray(Sequence[str]):
    """An array of strings that decodes an item when it is asked for.

    A vocabulary of 250,000 tokens costs its bytes and four more each. Bytes that are no UTF-8 come out as
    U+FFFD; `bytes_at` gives them as they are.
    """

    __slots__ = ("_base", "_blob", "_starts")

    def __init__(self, blob: bytes, starts: array[int], base: int) -> None:
        """String i is `blob[starts[i] - base : starts[i + 1] - 8 - base]`."""
        self._blob = blob
        self._starts = starts
        self._base = base

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.bytes_at(index).decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"

    def bytes_at(self, index: int) -> bytes:
        """The bytes of one string."""
        i = range(len(self))[index]
        return self._blob[self._starts[i] - self._base : self._starts[i + 1] - 8 - self._base]

    def tolist(self) -> list[str]:
        """All strings, decoded."""
        blob, base = self._blob, self._base
        starts = self._starts.tolist()
        return [
            blob[start - base : stop - 8 - base].decode("utf-8", "replace")
            for start, stop in pairwise(starts)
        ]


def read_metadata(cursor: Cursor, n_keys: int) -> dict[str, Any]:
    """Read `n_keys` key-value pairs, leaving the cursor at the tensor list."""
    return {key: value for key, value, _ in _read_pairs(cursor, n_keys)}


def read_raw_pairs(cursor: Cursor, n_keys: int) -> dict[str, bytes]:
    """Read `n_keys` pairs: the bytes of each, key and type included, as the file holds them."""
    return {key: cursor.slice(start, cursor.pos) for key, _, start in _read_pairs(cursor, n_keys)}


def _read_pairs(cursor: Cursor, n_keys: int) -> Iterator[tuple[str, Any, int]]:
    """Key, value and first byte of each pair; the cursor is at its end then."""
    reader = _ValueReader(cursor)
    seen: set[str] = set()
    for i in range(n_keys):
        start = cursor.pos
        key = cursor.name(f"name of key {i}")
        if key in seen:
            raise cursor.fault(f"name of key {i}", f"{quoted(key)} a second time", "every key once")
        seen.add(key)
        yield key, reader.value(reader.value_type(quoted(key)), quoted(key), depth=0), start


class _ValueReader:
    """Reads values and counts the arrays within arrays, which is what could be many."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.n_nested = 0

    def value_type(self, field: str) -> ValueType:
        type_id = self.cursor.u32(field)
        try:
            return ValueType(type_id)
        except ValueError:
            known = f"one of the GGUF value types 0 to {max(ValueType)}"
            raise self.cursor.fault(field, f"unknown value type {type_id}", known) from None

    def value(self, value_type: ValueType, field: str, depth: int) -> Any:
        if value_type is ValueType.STRING:
            return self.cursor.string(field).decode("utf-8", "replace")
        if value_type is ValueType.ARRAY:
            return self._array(field, depth)
        number = self.cursor.unpack(_FORMS[value_type], field)
        return number != 0 if value_type is ValueType.BOOL else number

    def _array(self, field: str, depth: int) -> Any:
        if depth == MAX_DEPTH:
            raise self.cursor.fault(field, "deeper nested arrays", f"at most {MAX_DEPTH} levels")
        item_type = self.value_type(field)
        if item_type is ValueType.ARRAY:
            return self._nested(field, depth)
        if item_type is ValueType.STRING:
            return self._strings(field)
        dtype = _DTYPES[item_type]
        n_items = self.cursor.count(f"length of {field}", dtype.itemsize)
        items = np.frombuffer(self.cursor.take(n_items * dtype.itemsize, field), dtype)
        return items != 0 if item_type is ValueType.BOOL else items

    def _strings(self, field: str) -> StringArray:
        n_strings = self.cursor.count(f"length of {field}", 8)
        base = self.cursor.pos
        starts = self.cursor.skip_strings(n_strings, field)
        return StringArray(self.cursor.slice(base, self.cursor.pos), starts, base)

    def _nested(self, field: str, depth: int) -> list[Any]:
        n_arrays = self.cursor.count(f"length of {field}", 12, MAX_NESTED_ARRAYS - self.n_nested)
        self.n_nested += n_arrays
        return [self._array(f"{field}[{i}]", depth + 1) for i in range(n_arrays)]


def typed_value(path: Path, metadata: Mapping[str, Any], key: str, wanted: type[T]) -> T | None:
    """The value of `key` as `wanted`, None if there is no such key, `ModelError` if it is something else.

    Integers of any width are `int`; `float` takes integers too; a boolean is only `bool`.
    """
    if key not in metadata:
        return None
    value = metadata[key]
    if wanted is float and type(value) is int:
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ModelError.at(path, quoted(key), _described(value), wanted.__name__)
    return value


def _described(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, (StringArray, np.ndarray, list)):
        return f"{kind} of {len(value)} items"
    return f"{kind} {quoted(value) if isinstance(value, str) else value}"
