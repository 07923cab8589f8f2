"""Puts a step program together: tensors by GGUF name, buffers, scratch, ops by field name.

Owns ids, sizes and the check that every tensor of the file is used; knows no architecture.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile, TensorInfo
from strata_jit.kernels.abi import ROW_GROUP
from strata_jit.kernels.layout import (
    STORE_TYPES,
    act_planes,
    round_up,
    store_type_of,
)
from strata_jit.kernels.registry import OPS
from strata_jit.pool.program import Arg, ArgKind, BufferSpec, Op, Program, TensorSpec

Count = Literal["rows", "out"]
Role = Literal["matrix", "vector"]
Part = tuple[int, int]
"""(i, n): the i-th of n equal parts of a tensor that holds several."""
WHOLE: Part = (0, 1)
LINE = 64
NONE = -1
"""No tensor, for an optional field."""
KINDS = ("F32", "Q256", "Q32")
"""Activation kinds, in the order of their planes in an activation row."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the result of a layer's half goes: float32 rows of n_embd."""

    buffer: int
    stride: int
    add: bool = True
    """Add to what is there, else replace it."""
    scale: float = 1.0
    """Factor of the result."""


class Act:
    """An activation row: where it lies and where each kind's planes start in it."""

    def __init__(
        self,
        builder: ProgramBuilder,
        name: str,
        n_cols: int,
        kinds: Iterable[str],
        n_rows: int,
        rows_one: int,
    ):
        self.offsets: dict[str, int] = dict.fromkeys(KINDS, -1)
        self.stride = 0
        for kind in KINDS:
            if kind in kinds:
                self.offsets[kind] = self.stride
                self.stride += act_planes(kind, n_cols).nbytes
        self.shared = builder.buffer(name, n_rows * self.stride)
        self.scratch = builder.scratch(rows_one * self.stride)

    @property
    def read(self) -> dict[str, int]:
        """Fields of an op that reads the row."""
        return {"act_scratch": self.scratch, "act_shared": self.shared, "act_stride": self.stride}

    @property
    def write(self) -> dict[str, int]:
        """Fields of an op that writes it."""
        return self.read | {f"off_{kind.lower()}": self.offsets[kind] for kind in KINDS}


class ProgramBuilder:
    """Collects the parts of a `Program`."""

    def __init__(self, file: GGUFFile, *, reference: bool = False) -> None:
        self.file = file
        self.reference = reference
        self._tensors: list[TensorSpec] = []
        self._ids: dict[tuple[str, int], int] = {}
        self._buffers: list[BufferSpec] = []
        self._ops: list[Op] = []
        self._scratch = 0

    # --- tensors ------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the file holds the tensor."""
        return name in self.file.tensors

    def vector(self, name: str, *shape: int) -> int:
        """Id of a float32 vector, or of a small table of such rows (n_cols, n_rows), whole on every node."""
        info = self.file.tensor(name)
        if info.shape != shape:
            raise self._shape_fault(info, shape)
        self._check_vector(info)
        return self._add(info, "vector", "F32")

    def matrix(self, name: str, n_cols: int, n_rows: int) -> int:
        """Id of a matrix, cut by rows over the nodes; one row may stand in the file as a vector."""
        is_vector = n_rows == 1 and self.has(name) and len(self.file.tensor(name).shape) == 1
        return self._matrix(name, (n_cols,) if is_vector else (n_cols, n_rows))

    def experts(
        self,
        name: str,
        n_cols: int,
        n_rows: int,
        n_expert: int,
        pair: int | None = None,
        chosen: tuple[int, ...] | None = None,
        part: Part = WHOLE,
    ) -> int:
        """Id of the matrices of all experts, or of the `chosen` ones.

        `pair`: the gate whose octets alternate with this up's, where both are stored alike. `part`: which
        part of the tensor's rows they are.
        """
        if pair is not None and self.store_type(pair) != self._store_type(self.file.tensor(name)):
            pair = None
        return self._matrix(name, (n_cols, part[1] * n_rows, n_expert), pair, chosen, part)

    def expert_vectors(
        self, name: str, n: int, n_expert: int, chosen: tuple[int, ...] | None = None, part: Part = WHOLE
    ) -> int:
        """Id of float32 vectors of n elements, one of each expert (or `chosen` one), whole on every node."""
        info = self.file.tensor(name)
        if info.shape != (part[1] * n, n_expert):
            raise self._shape_fault(info, (part[1] * n, n_expert))
        self._check_vector(info)
        return self._add(info, "vector", "F32", chosen=chosen, part=part)

    def embedding(self, name: str, n_cols: int) -> TensorInfo:
        """A matrix whose rows are read from the file one by one, by the host."""
        info = self.file.tensor(name)
        if len(info.shape) != 2 or info.n_cols != n_cols or not info.n_rows:
            raise self._shape_fault(info, (n_cols, "n_vocab"))
        self._store_type(info)
        return info

    def act_kind(self, tensor: int) -> str:
        """Activation kind that the tensor's dot kernel reads."""
        store = self.store_type(tensor)
        return "F32" if store == "auto-f32" else STORE_TYPES[store].act_kind

    def store_type(self, tensor: int) -> str:
        """Store type of a tensor, "auto-f32" where the file decides between F32 and BF16."""
        return self._tensors[tensor].store_type

    def n_cols(self, tensor: int) -> int:
        """Length of a row of the tensor."""
        return self._tensors[tensor].n_cols

    def _check_vector(self, info: TensorInfo) -> None:
        if info.type.name not in ("F32", "F16", "BF16"):
            raise ModelError(
                f"{self.file.path}: vector {info.name} has type {info.type.name}, expected F32, F16 or BF16"
            )

    def _matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        pair: int | None = None,
        chosen: tuple[int, ...] | None = None,
        part: Part = WHOLE,
    ) -> int:
        info = self.file.tensor(name)
        if info.shape != shape:
            raise self._shape_fault(info, shape)
        if 0 in shape:
            raise ModelError.at(self.file.path, f"tensor {name}", "no elements", "a matrix")
        store = self._store_type(info)
        stored_as = STORE_TYPES["F32" if store == "auto-f32" else store]
        if info.n_cols % stored_as.block_cols:
            expected = f"a multiple of {stored_as.block_cols}, as {stored_as.name} is stored"
            raise ModelError.at(self.file.path, f"tensor {name}", f"rows of {info.n_cols}", expected)
        return self._add(info, "matrix", store, pair, chosen, part)

    def _store_type(self, info: TensorInfo) -> str:
        try:
            store = store_type_of(info.type.name).name
        except ModelError as fault:
            raise ModelError(f"{self.file.path}: tensor {info.name}: {fault}") from None
        if self.reference:
            return "F32"
        return "auto-f32" if info.type.name == "F32" else store

    def _add(
        self,
        info: TensorInfo,
        role: Role,
        store: str,
        pair: int | None = None,
        chosen: tuple[int, ...] | None = None,
        part: Part = WHOLE,
    ) -> int:
        """Experts lie along the last axis; a part of each is of its rows, or of a vector's elements."""
        key = info.name, part[0]
        if key in self._ids:
            return self._ids[key]
        is_vector, n_bytes = role == "vector", info.row_bytes * (1 if role == "vector" else info.n_rows)
        n_expert = info.n_rows if is_vector else info.n_expert
        tensor = len(self._tensors)
        self._tensors.append(
            TensorSpec(
                id=tensor,
                name=info.name,
                role=role,
                file_type=info.type.name,
                store_type=store,
                n_cols=info.n_cols // part[1] if is_vector else info.n_cols,
                n_rows=1 if is_vector else info.n_rows // part[1],
                n_expert=n_expert if chosen is None else len(chosen),
                experts=chosen,
                part=info.part,
                offset=info.offset + n_bytes * part[0] // part[1],
                row_bytes=info.row_bytes // part[1] if is_vector else info.row_bytes,
                expert_bytes=n_bytes,
                pair=pair,
            )
        )
        self._ids[key] = tensor
        return tensor

    def _shape_fault(self, info: TensorInfo, expected: Sequence[object]) -> ModelError:
        found, wanted = (" x ".join(map(str, shape)) for shape in (info.shape, expected))
        return ModelError.at(self.file.path, f"tensor {info.name}", f"shape {found}", wanted)

    # --- memory -------------------------------------------------------------------------------------------

    def buffer(self, name: str, n_bytes: int) -> int:
        """Id of a shared buffer."""
        self._buffers.append(BufferSpec(len(self._buffers), name, round_up(max(n_bytes, 1), LINE)))
        return len(self._buffers) - 1

    def scratch(self, n_bytes: int) -> int:
        """Offset of n_bytes in every thread's scratch."""
        start, self._scratch = self._scratch, self._scratch + round_up(n_bytes, LINE)
        return start

    def act(self, name: str, n_cols: int, kinds: Iterable[str], n_rows: int, rows_one: int = 1) -> Act:
        """An activation row buffer for n_rows rows, and a scratch for `rows_one` rows of a one-row step."""
        return Act(self, name, n_cols, set(kinds), n_rows, rows_one)

    # --- ops ----------------------------------------------------------------------------------------------

    def op(
        self,
        name: str,
        label: str,
        fields: Mapping[str, float],
        segments: Sequence[Mapping[str, float]] = (),
        count: Count = "rows",
    ) -> None:
        """Append an op; every field of the registry must be given, by its name."""
        spec = OPS[name]
        args = _arguments(name, spec.fields, spec.field_kinds, fields)
        for segment in segments:
            args += _arguments(name, spec.repeat, spec.repeat_kinds, segment)
        self._ops.append(
            Op(
                name=name,
                label=label,
                one=spec.one,
                many=spec.many,
                barrier_one=spec.barrier_one,
                barrier_many=spec.barrier_many,
                count=count,
                args=tuple(args),
                kind=spec.kind,
            )
        )

    @property
    def n_ops(self) -> int:
        """Ops so far."""
        return len(self._ops)

    def finish(self, kv_bytes: int, state_bytes: int = 0) -> Program:
        """The program."""
        parts = tuple(self._ops), tuple(self._tensors), tuple(self._buffers)
        return Program(*parts, self._scratch, kv_bytes, state_bytes)

    def check_all_used(self, ignored: Iterable[str] = ()) -> None:
        """ModelError for a tensor that no op reads: leaving it out would change the model's answers."""
        known = {name for name, _ in self._ids} | set(ignored)
        unused = [name for name in self.file.tensors if name not in known]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            arch = self.file.get("general.architecture", str)
            raise ModelError(
                f"{self.file.path}: tensor {unused[0]}{more} has no use in strata-jit's {arch}; "
                "this variant of the architecture is not supported"
            )


def padded(n: int) -> int:
    """Bytes of n float32 outputs, padded to whole octets and to a cache line."""
    return round_up(4 * round_up(n, ROW_GROUP), LINE)


def _arguments(
    op: str, names: tuple[str, ...], kinds: tuple[str, ...], values: Mapping[str, float]
) -> list[Arg]:
    if set(values) != set(names):
        wrong = sorted(set(values) ^ set(names))
        raise ValueError(f"op {op}: fields {', '.join(wrong)} are missing or unknown")
    args: list[Arg] = []
    for name, kind in zip(names, kinds, strict=True):
        value = values[name]
        if kind == "t?":
            # NONE: the kernel sees address 0
            args.append(("i", 0) if value < 0 else ("t", value))
        elif kind == "f":
            args.append(("f", struct.unpack("<f", struct.pack("<f", value))[0]))
        else:
            args.append((cast(ArgKind, kind), int(value)))
    return args
