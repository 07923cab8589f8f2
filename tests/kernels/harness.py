"""A simulated team for tests of ops: thread contexts of several nodes, without processes or barrier.

`Team.run` calls one op on every thread, as the interpreter would between two barriers. Arguments are given by
field name: arrays stand for buffers, `Matrix` and `Vector` for tensor records (each node sees its own slice),
numbers for themselves.
"""

import ctypes
import importlib
import struct
import threading
from functools import cache
from itertools import pairwise

import numpy as np

from strata_jit.kernels import abi
from strata_jit.kernels.dot import dot_many_kernel, dot_one_kernel
from strata_jit.kernels.layout import n_octets, octet_bytes
from strata_jit.kernels.ref.octets import pack_octets
from strata_jit.kernels.registry import OPS

ISA = "portable"
_OP = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def aligned(n_bytes, fill=0):
    """uint8[n_bytes] at a multiple of 64."""
    raw = np.full(n_bytes + 64, fill, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes]


def floats(*shape, fill=np.nan):
    """float32 array at a multiple of 64 bytes, NaN unless told: an op must write what it is to write."""
    out = aligned(4 * int(np.prod(shape))).view(np.float32).reshape(shape)
    out[...] = fill
    return out


def f32_bits(value):
    """The int64 argument that carries a float32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@cache
def dot_kernels(type_name):
    """(one, many) callbacks of a stored type."""
    return dot_one_kernel(type_name, ISA), dot_many_kernel(type_name, ISA)


@cache
def op_function(reference):
    """The C function of "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return _OP(getattr(importlib.import_module(module), attribute).address)


def even_slices(n_rows, n_nodes):
    """Row ranges in whole octets, as even as they come; some are empty where octets do not suffice."""
    octets = n_octets(n_rows)
    cuts = [min(n_rows, abi.ROW_GROUP * (octets * i // n_nodes)) for i in range(n_nodes)] + [n_rows]
    return list(pairwise(cuts))


class Vector:
    """A vector tensor, or with two axes one of each expert; every node has the whole of it."""

    def __init__(self, values):
        values = np.asarray(values, np.float32)
        self.n_cols = values.shape[-1]
        self.values = floats(values.size + abi.ROW_GROUP)
        self.values[: values.size] = values.ravel()

    def record(self, node):
        words = np.zeros(abi.TENSOR_WORDS, np.int64)
        words[abi.TENSOR_ADDR] = self.values.ctypes.data
        words[abi.TENSOR_N_COLS] = self.n_cols
        return words


class Matrix:
    """Expert matrices as octets, each node holding its slice of the rows.

    `experts`: uint8[n_expert][n_rows][row bytes] as in the file (2-D for a matrix without experts).
    """

    def __init__(self, type_name, experts, n_cols, slices):
        self.type_name, self.n_cols, self.slices = type_name, n_cols, slices
        self.has_experts = np.ndim(experts) == 3
        self.experts = experts if self.has_experts else experts[None]
        self.own_bytes = octet_bytes(type_name, n_cols)
        self.memory = [self._pack(start, stop) for start, stop in slices]
        self.offset, self.gap = 0, 0

    def _pack(self, start, stop):
        shape = len(self.experts), n_octets(stop - start), self.own_bytes
        memory = aligned(int(np.prod(shape))).reshape(shape)
        if stop > start:
            for octets, rows in zip(memory, self.experts, strict=True):
                octets[:] = pack_octets(self.type_name, rows[start:stop], self.n_cols)
        return memory

    def record(self, node):
        one, many = dot_kernels(self.type_name)
        start, stop = self.slices[node]
        stride = self.own_bytes + self.gap
        words = np.zeros(abi.TENSOR_WORDS, np.int64)
        words[abi.TENSOR_ADDR] = self.memory[node].ctypes.data + self.offset
        words[abi.TENSOR_ROW_START], words[abi.TENSOR_ROW_STOP] = start, stop
        words[abi.TENSOR_N_OCTETS] = n_octets(stop - start)
        words[abi.TENSOR_N_COLS] = self.n_cols
        words[abi.TENSOR_OCTET_STRIDE] = stride
        words[abi.TENSOR_EXPERT_STRIDE] = n_octets(stop - start) * stride if self.has_experts else 0
        words[abi.TENSOR_DOT_ONE], words[abi.TENSOR_DOT_MANY] = one.address, many.address
        words[abi.TENSOR_N_EXPERT] = len(self.experts) if self.has_experts else 1
        words[abi.TENSOR_N_ROWS] = self.experts.shape[1]
        return words


def pair(gate, up):
    """Make the octets of two matrices of the same type and slices alternate in memory."""
    both = []
    for gates, ups in zip(gate.memory, up.memory, strict=True):
        memory = aligned(2 * gates.nbytes).reshape(*gates.shape[:2], 2, gate.own_bytes)
        memory[:, :, 0], memory[:, :, 1] = gates, ups
        both.append(memory)
    for position, matrix in enumerate((gate, up)):
        matrix.memory, matrix.gap, matrix.offset = both, gate.own_bytes, position * gate.own_bytes


class Team:
    """`threads[node]` threads in each node."""

    def __init__(self, threads, scratch_bytes=1 << 17, kv_bytes=0, state_bytes=0):
        self.threads = tuple(threads)
        self.claims = [aligned(64).view(np.int64) for _ in threads]
        self.kv = [aligned(kv_bytes) for _ in threads]
        self.state = [aligned(state_bytes, fill=0xFF) for _ in threads]
        self.members = [(node, i) for node, n in enumerate(threads) for i in range(n)]
        self.scratch = [aligned(scratch_bytes, fill=0xFF) for _ in self.members]
        self.contexts = [self._context(k, *member) for k, member in enumerate(self.members)]

    def _context(self, team_index, node, index):
        words = np.zeros(abi.THREAD_WORDS, np.int64)
        words[abi.THREAD_INDEX], words[abi.THREAD_N_THREADS] = index, self.threads[node]
        words[abi.THREAD_NODE], words[abi.THREAD_N_NODES] = node, len(self.threads)
        words[abi.THREAD_TEAM_INDEX], words[abi.THREAD_TEAM_SIZE] = team_index, len(self.members)
        words[abi.THREAD_SCRATCH] = self.scratch[team_index].ctypes.data
        words[abi.THREAD_CLAIM] = self.claims[node].ctypes.data
        words[abi.THREAD_KV] = self.kv[node].ctypes.data
        words[abi.THREAD_STATE] = self.state[node].ctypes.data
        return words

    def run(self, op, step, *, segments=(), order=None, **args):
        """Run one op: its one-row form if `step` has one of the rows that it counts, else its many-row form.

        `order` (a permutation of the team) runs the threads one after the other, else all run at once.
        """
        definition = OPS[op]
        function = definition.one if step.count(args) == 1 else definition.many
        if function is None:
            return
        call = op_function(function)
        words = [self._arguments(definition, args, segments, node) for node in range(len(self.threads))]
        for claim in self.claims:
            claim[:] = 0

        def work(k):
            node, _ = self.members[k]
            call(step.block.ctypes.data, words[node][0].ctypes.data, self.contexts[k].ctypes.data)

        if order is not None:
            for k in order:
                work(k)
            return
        running = [threading.Thread(target=work, args=(k,)) for k in range(len(self.members))]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    def _arguments(self, definition, args, segments, node):
        """(int64 words, what they point to) of an op for one node."""
        alive, words = [], []
        for names, kinds, values in [
            (definition.fields, definition.field_kinds, args),
            *((definition.repeat, definition.repeat_kinds, s) for s in segments),
        ]:
            if set(names) != set(values):
                raise KeyError(f"{definition.name}: fields {sorted(set(names) ^ set(values))}")
            for name, kind in zip(names, kinds, strict=True):
                value = values[name]
                if hasattr(value, "record"):
                    value = value.record(node)
                alive.append(value)
                words.append(_word(value, kind))
        return np.array(words, np.int64), alive


def _word(value, kind):
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return f32_bits(value) if kind == "f" else int(value)


class Step:
    """A step block with its rows (token, position, sequence, want_logits) and KV table."""

    def __init__(self, n_rows, rows=None, out_rows=(), kv_table=None):
        self.rows = np.zeros((n_rows, abi.ROW_WORDS), np.int64)
        if rows is not None:
            self.rows[:] = rows
        table = np.zeros((1, 1), np.int64) if kv_table is None else np.asarray(kv_table, np.int64)
        parts = [self.rows.ravel(), np.asarray(out_rows, np.int64), table.ravel()]
        self.block = np.concatenate([np.zeros(abi.STEP_WORDS, np.int64), *parts])
        starts = np.cumsum([abi.STEP_WORDS, *map(len, parts)]) * abi.WORD_BYTES
        self.block[abi.STEP_N_ROWS], self.block[abi.STEP_N_OUT] = n_rows, len(out_rows)
        self.block[abi.STEP_ROWS], self.block[abi.STEP_OUT_ROWS], self.block[abi.STEP_KV_TABLE] = starts[:3]
        self.block[abi.STEP_KV_TABLE_STRIDE] = table.shape[1]

    def count(self, args):
        """Rows that an op with these arguments sees."""
        word = args.get("count", abi.STEP_N_OUT if args.get("gather") else abi.STEP_N_ROWS)
        return int(self.block[word])
