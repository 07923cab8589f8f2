"""What nopython code reads by address: the program table and the tensor records of a node.

Owns the way from the names in a program to addresses of this process. Knows no thread and no file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from strata_jit.kernels import abi
from strata_jit.pool.arena import Arena, Placed
from strata_jit.pool.control import Int64Array
from strata_jit.pool.program import COUNT_FIELDS, Arg, Program

TENSOR_BYTES = abi.TENSOR_WORDS * abi.WORD_BYTES


def address_of(array: Int64Array) -> int:
    """Address of an array's first element; whoever passes it on keeps the array alive."""
    return int(array.__array_interface__["data"][0])


class ProgramTable:
    """`rows`: int64[n_ops, OP_WORDS], whose argument pointers lead into an array that lives as long."""

    def __init__(
        self, program: Program, ops: Mapping[str, int], buffers: Sequence[int], tensors: int
    ) -> None:
        """`ops`: op kernel -> address; `buffers`: address of each; `tensors`: address of the first record."""
        self._buffers = buffers
        self._tensors = tensors
        self.rows: Int64Array = np.zeros((len(program.ops), abi.OP_WORDS), dtype=np.int64)
        self.args: Int64Array = np.zeros(sum(len(op.args) for op in program.ops) + 1, dtype=np.int64)
        at = 0
        for row, op in zip(self.rows, program.ops, strict=True):
            row[abi.OP_COUNT_FIELD] = COUNT_FIELDS[op.count]
            row[abi.OP_ADDR_ONE] = ops[op.one] if op.one else 0
            row[abi.OP_BARRIER_ONE] = op.barrier_one
            row[abi.OP_ADDR_MANY] = ops[op.many] if op.many else 0
            row[abi.OP_BARRIER_MANY] = op.barrier_many
            row[abi.OP_ARGS] = address_of(self.args) + abi.WORD_BYTES * at
            row[abi.OP_KIND] = program.kinds.index(op.kind)
            self.args[at : at + len(op.args)] = [self._argument(argument) for argument in op.args]
            at += len(op.args)

    def _argument(self, argument: Arg) -> int:
        kind, value = argument
        if kind == "f":
            return int(struct.unpack("<I", struct.pack("<f", value))[0])
        if kind == "t":
            return self._tensors + int(value) * TENSOR_BYTES
        if kind == "b":
            return self._buffers[int(value)]
        return int(value)


def tensor_table(arena: Arena, arena_address: int, dots: Mapping[str, tuple[int, int]]) -> Int64Array:
    """int64[n_tensors, TENSOR_WORDS]: a node's tensor records. `dots`: store type -> kernel addresses."""
    table = np.zeros((len(arena.placed), abi.TENSOR_WORDS), dtype=np.int64)
    for record, placed in zip(table, arena.placed, strict=True):
        _fill_record(record, placed, arena_address)
        if placed.spec.role == "matrix":
            record[[abi.TENSOR_DOT_ONE, abi.TENSOR_DOT_MANY]] = dots[placed.spec.store_type]
    return table


def _fill_record(record: Int64Array, placed: Placed, arena_address: int) -> None:
    spec = placed.spec
    record[abi.TENSOR_ADDR] = arena_address + placed.offset
    record[abi.TENSOR_ROW_START] = placed.row_start
    record[abi.TENSOR_ROW_STOP] = placed.row_stop
    record[abi.TENSOR_N_OCTETS] = placed.n_octets
    record[abi.TENSOR_N_COLS] = spec.n_cols
    record[abi.TENSOR_OCTET_STRIDE] = placed.octet_stride
    record[abi.TENSOR_EXPERT_STRIDE] = placed.expert_stride if spec.n_expert > 1 else 0
    record[abi.TENSOR_N_EXPERT] = spec.n_expert
    record[abi.TENSOR_N_ROWS] = spec.n_rows
