"""The tensor list of a GGUF header: names, shapes, types and where the bytes are.

Owns `TensorInfo` and its checks against the file's size; knows no tensor's meaning. Layout: ggml's gguf.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from strata_jit.errors import quoted
from strata_jit.gguf.cursor import Cursor
from strata_jit.gguf.types import REMOVED_TYPES, GGMLType

MAX_TENSORS = 1 << 18
MAX_DIMS = 4
"""`GGML_MAX_DIMS` of ggml.h."""
_MAX_ELEMENTS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a model file; its bytes are checked to lie within the file.

    `shape` is in GGUF order: `shape[0]` is the length of a row (the input side of a matrix), `shape[1]` the
    number of rows (outputs), `shape[2]` the number of experts. `offset` counts from the start of file
    `GGUFFile.parts[part]`.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    part: int
    offset: int
    nbytes: int

    @property
    def n_cols(self) -> int:
        """Elements of a row."""
        return self._dim(0)

    @property
    def n_rows(self) -> int:
        """Rows of one expert's matrix, or of the whole one."""
        return self._dim(1)

    @property
    def n_expert(self) -> int:
        """Matrices that lie one behind the other; 1 where there are no experts."""
        return self._dim(2)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.type.row_bytes(self.n_cols)

    def _dim(self, axis: int) -> int:
        return self.shape[axis] if axis < len(self.shape) else 1


def read_tensors(cursor: Cursor, n_tensors: int, part: int, alignment: int) -> dict[str, TensorInfo]:
    """Read the tensor list, which ends the header, and check that every tensor's bytes are in the file."""
    infos: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        info = _read_info(cursor, i, part)
        if info.name in infos:
            raise cursor.fault(f"name of tensor {i}", f"{quoted(info.name)} a second time", "every name once")
        infos[info.name] = info
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = {name: _placed(cursor, info, data_start, alignment) for name, info in infos.items()}
    _check_apart(cursor, tensors)
    return tensors


def _read_info(cursor: Cursor, i: int, part: int) -> TensorInfo:
    """One entry of the list; its offset still counts from the start of the data."""
    name = cursor.name(f"name of tensor {i}")
    field = _field(name)
    n_dims = cursor.u32(field)
    if n_dims > MAX_DIMS:
        raise cursor.fault(field, f"{n_dims} dimensions", f"at most {MAX_DIMS}")
    shape = tuple(cursor.u64(field) for _ in range(n_dims))
    ggml_type = _read_type(cursor, field)
    _check_shape(cursor, field, shape, ggml_type)
    nbytes = math.prod(shape) // ggml_type.block_size * ggml_type.type_size
    return TensorInfo(name, shape, ggml_type, part, cursor.u64(field), nbytes)


def _read_type(cursor: Cursor, field: str) -> GGMLType:
    type_id = cursor.u32(field)
    try:
        return GGMLType(type_id)
    except ValueError:
        pass
    if type_id in REMOVED_TYPES:
        found = f"unsupported tensor type {REMOVED_TYPES[type_id]} (id {type_id}), which ggml has given up"
        raise cursor.fault(field, found, "a current type; convert the model again")
    found = f"unsupported tensor type id {type_id}"
    raise cursor.fault(field, found, f"one of the ggml types 0 to {max(GGMLType)}")


def _check_shape(cursor: Cursor, field: str, shape: tuple[int, ...], ggml_type: GGMLType) -> None:
    if math.prod(shape) > _MAX_ELEMENTS or any(n > _MAX_ELEMENTS for n in shape):
        sizes = " x ".join(str(n) for n in shape)
        raise cursor.fault(field, f"a shape of {sizes}", "less than 2^63 elements")
    n_cols = shape[0] if shape else 1
    if n_cols % ggml_type.block_size:
        found = f"rows of {n_cols} elements in type {ggml_type.name}"
        raise cursor.fault(field, found, f"a multiple of its block size {ggml_type.block_size}")


def _placed(cursor: Cursor, info: TensorInfo, data_start: int, alignment: int) -> TensorInfo:
    """The entry with its offset counted from the start of the file."""
    if info.offset % alignment:
        raise cursor.fault(_field(info.name), f"offset {info.offset}", f"a multiple of {alignment}")
    offset = data_start + info.offset
    if offset + info.nbytes > cursor.size:
        found = f"data at bytes {offset} to {offset + info.nbytes}"
        expected = f"all of it within the file's {cursor.size} bytes (is the file cut short?)"
        raise cursor.fault(_field(info.name), found, expected)
    return TensorInfo(info.name, info.shape, info.type, info.part, offset, info.nbytes)


def _check_apart(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    held = sorted((info for info in tensors.values() if info.nbytes), key=lambda info: info.offset)
    for first, second in pairwise(held):
        if first.offset + first.nbytes > second.offset:
            found = f"data at byte {second.offset}"
            expected = f"byte {first.offset + first.nbytes} or later, where {_field(first.name)} ends"
            raise cursor.fault(_field(second.name), found, expected)


def _field(name: str) -> str:
    return f"tensor {quoted(name)}"
