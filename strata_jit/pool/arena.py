"""Where each tensor lies in a node's arena, and in which type it is stored.

Owns the layout of the arena (pure arithmetic) and the one decision about types that needs the file's data:
whether a float matrix can be kept as BF16. Knows no thread and no address; the loader fills what is planned
here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from strata_jit.errors import ModelError, PoolError
from strata_jit.kernels.layout import ALIGN, CONVERSIONS, n_octets, octet_bytes, round_up
from strata_jit.pool.files import open_part
from strata_jit.pool.program import AUTO_F32, Program, TensorSpec

SCAN_BYTES = 4 << 20
VECTOR_SLACK = 32
"""Bytes that may be read behind a vector: kernels load whole octets of a bias."""
DEQUANTISED = "F32"
"""Conversion of rows that were dequantised first."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in the arena of a node. Strides are bytes; see `kernels.abi`, tensor record."""

    spec: TensorSpec
    offset: int
    row_start: int
    row_stop: int
    octet_bytes: int
    """0 for a vector, as are the strides."""
    octet_stride: int
    expert_stride: int

    @property
    def n_octets(self) -> int:
        """Octets of the slice, of one expert."""
        return n_octets(self.row_stop - self.row_start) if self.spec.role == "matrix" else 0


@dataclass(frozen=True, slots=True)
class Arena:
    """All tensors of a node, by id, and the bytes that they take."""

    placed: tuple[Placed, ...]
    nbytes: int


def plan_arena(program: Program, row_ranges: Mapping[int, tuple[int, int]]) -> Arena:
    """Lay out a node's slice of every tensor; store types must be settled (`settle_store_types`)."""
    seconds = {t.pair: t for t in program.tensors if t.pair is not None}
    placed: dict[int, Placed] = {}
    end = 0
    for tensor in program.tensors:
        if tensor.id in placed or tensor.pair is not None:
            continue
        if tensor.role == "vector":
            placed[tensor.id] = Placed(tensor, end, 0, tensor.n_rows, 0, 0, 0)
            end += round_up(4 * tensor.n_cols * tensor.n_rows * tensor.n_expert + VECTOR_SLACK, ALIGN)
            continue
        group = [tensor, seconds[tensor.id]] if tensor.id in seconds else [tensor]
        for member in _place_matrices(group, end, row_ranges):
            placed[member.spec.id] = member
            size = member.expert_stride
        end += size * tensor.n_expert
    return Arena(tuple(placed[t.id] for t in program.tensors), end)


def _place_matrices(
    group: Sequence[TensorSpec], offset: int, row_ranges: Mapping[int, tuple[int, int]]
) -> list[Placed]:
    """One matrix, or two whose octets alternate."""
    shapes = {(t.store_type, t.n_cols, t.n_rows, t.n_expert, row_ranges.get(t.id)) for t in group}
    if len(shapes) != 1 or any(t.role != "matrix" for t in group):
        raise PoolError(f"{' and '.join(t.name for t in group)} cannot alternate: they differ in {shapes}")
    first = group[0]
    start, stop = row_ranges.get(first.id, (-1, -1))
    cut_at_eights = all(row % 8 == 0 or row == first.n_rows for row in (start, stop))
    if not (0 <= start <= stop <= first.n_rows and cut_at_eights):
        raise PoolError(
            f"{first.name}: rows {start}:{stop} of {first.n_rows}, expected a range cut at eights"
        )
    size = octet_bytes(first.store_type, first.n_cols)
    stride = size * len(group)
    expert = stride * n_octets(stop - start)
    return [Placed(t, offset + i * size, start, stop, size, stride, expert) for i, t in enumerate(group)]


def conversion_of(tensor: TensorSpec) -> tuple[str, bool]:
    """Converter from the file's rows to octets, and whether the rows must be dequantised before it."""
    name = "F32_BF16" if (tensor.file_type, tensor.store_type) == ("F32", "BF16") else tensor.file_type
    if name in CONVERSIONS and CONVERSIONS[name].store == tensor.store_type:
        return name, False
    if tensor.store_type != DEQUANTISED:
        raise ModelError(f"{tensor.name}: {tensor.file_type} rows cannot be stored as {tensor.store_type}")
    return DEQUANTISED, True


def settle_store_types(program: Program, files: Sequence[str], *, reference: bool) -> Program:
    """The program with a store type for every tensor; a pair that ends up in two types is no pair.

    `reference` stores every matrix as F32. Otherwise "auto-f32" becomes BF16 where no weight would change,
    which is read from the files: the same answer for every node.
    """
    with ExitStack() as stack:
        fds = []
        for path in files:
            fds.append(open_part(path))
            stack.callback(os.close, fds[-1])
        settled = []
        for tensor in program.tensors:
            store = tensor.store_type
            if tensor.role == "vector" or reference:
                store = "F32"
            elif store == AUTO_F32:
                store = "BF16" if _is_bf16(tensor, fds[tensor.part]) else "F32"
            settled.append(replace(tensor, store_type=store))
    pairs = [
        t.pair if t.pair is None or settled[t.pair].store_type == t.store_type else None for t in settled
    ]
    tensors = tuple(replace(t, pair=pair) for t, pair in zip(settled, pairs, strict=True))
    return replace(program, tensors=tensors)


def _is_bf16(tensor: TensorSpec, fd: int) -> bool:
    """Whether the low 16 bits of every weight of a float matrix are zero."""
    if tensor.file_type != "F32":
        return tensor.file_type == "BF16"
    nbytes = tensor.n_rows * tensor.row_bytes
    for expert in range(tensor.n_expert):
        first = tensor.expert_offset(expert)
        for start in range(0, nbytes, SCAN_BYTES):
            data = os.pread(fd, min(SCAN_BYTES, nbytes - start), first + start)
            if (np.frombuffer(data[: len(data) // 4 * 4], dtype="<u4") & 0xFFFF).any():
                return False
    return True
