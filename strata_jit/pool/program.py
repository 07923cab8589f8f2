"""What a pool is asked to do, as data: ops, tensors, shared buffers, node processes.

Owns the records and their JSON form, in which they travel to the node processes. Knows neither a model (a
builder elsewhere makes programs) nor an address (each node process resolves the names for itself).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from strata_jit.errors import PoolError
from strata_jit.kernels.abi import MAX_TASKS, STEP_N_OUT, STEP_N_ROWS

ArgKind = Literal["t", "b", "i", "f", "s"]
Arg = tuple[ArgKind, float]
"""("t", tensor id) | ("b", buffer id) | ("i", int) | ("f", float32) | ("s", byte offset in the scratch)."""

COUNT_FIELDS = {"rows": STEP_N_ROWS, "out": STEP_N_OUT}
AUTO_F32 = "auto-f32"
"""Store type of a float matrix: BF16 where that loses nothing, else F32."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the program: what to call for one row and for many, and where the team meets afterwards."""

    name: str
    label: str
    """For people, such as "blk.3.attn_q"."""
    one: str | None
    """"module:attribute" of the op kernel of a step with one row; None where there is nothing to do."""
    many: str | None
    barrier_one: bool
    barrier_many: bool
    count: Literal["rows", "out"]
    """Which rows the op sees: all of the step, or those whose logits are wanted. None of them skips it."""
    args: tuple[Arg, ...]
    kind: str
    """Metric class."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the file, or rows of one, as the ops see it. Ids are positions in the program's tuple."""

    id: int
    name: str
    role: Literal["matrix", "vector"]
    """A vector lies whole, as float32, on every node; a matrix is cut by rows and stored in octets."""
    file_type: str
    store_type: str
    """Type of the octets, or "auto-f32"; "F32" for a vector."""
    n_cols: int
    n_rows: int
    n_expert: int
    """1 where there are none."""
    part: int
    offset: int
    """Byte in the part where the first row begins."""
    row_bytes: int
    expert_bytes: int
    """Bytes from one expert's first row to the next one's; 0 where there is one."""
    pair: int | None = None
    """Id of the matrix whose octets alternate with this one's, this one's second."""
    experts: tuple[int, ...] | None = None
    """Experts of the file that are held, `n_expert` of them, in this order; None for all."""

    def __post_init__(self) -> None:
        if self.experts is not None and len(self.experts) != self.n_expert:
            raise PoolError(f"{self.name}: {len(self.experts)} experts are listed, expected {self.n_expert}")

    def expert_offset(self, expert: int) -> int:
        """Byte in the part where the first row of the `expert`-th held expert begins."""
        in_file = expert if self.experts is None else self.experts[expert]
        return self.offset + in_file * self.expert_bytes


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Memory that host and nodes share. 64-byte aligned, zero at first; only pages in use cost memory."""

    id: int
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that all nodes share about the work."""

    ops: tuple[Op, ...]
    tensors: tuple[TensorSpec, ...]
    buffers: tuple[BufferSpec, ...]
    scratch_bytes: int
    """Private memory of each thread."""
    kv_bytes: int
    """KV memory of each node."""
    state_bytes: int = 0
    """State of recurrent layers. Every node has room for all of it, but touches only what its threads
    compute: their share of the team."""

    def __post_init__(self) -> None:
        _check_ids([(tensor.id, tensor.name) for tensor in self.tensors])
        _check_ids([(buffer.id, buffer.name) for buffer in self.buffers])
        for op in self.ops:
            self._check_args(op)

    def _check_args(self, op: Op) -> None:
        sizes = {"t": len(self.tensors), "b": len(self.buffers), "s": self.scratch_bytes + 1}
        for kind, value in op.args:
            if kind not in ("i", "f") and not 0 <= value < sizes.get(kind, 0):
                raise PoolError(f"op {op.label!r}: argument ({kind!r}, {value}) refers to nothing")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Metric classes in the order of their first op; a program row carries the position."""
        return tuple(dict.fromkeys(op.kind for op in self.ops))

    @property
    def op_refs(self) -> tuple[str, ...]:
        """Every op kernel that is called, once."""
        refs = (ref for op in self.ops for ref in (op.one, op.many) if ref is not None)
        return tuple(dict.fromkeys(refs))


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node process."""

    node: int
    cpus: tuple[int, ...] | None
    """One per thread; None where threads are not pinned."""
    n_threads: int
    row_ranges: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Matrix id -> rows [start, stop) of this node, start a multiple of 8."""

    def __post_init__(self) -> None:
        if self.n_threads < 1 or (self.cpus is not None and len(self.cpus) != self.n_threads):
            raise PoolError(
                f"node {self.node}: {self.n_threads} threads on CPUs {self.cpus}, expected one each"
            )


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool: the program, who runs it, on which files, within which limits."""

    program: Program
    nodes: tuple[NodeSpec, ...]
    files: tuple[str, ...]
    max_rows: int
    n_seq: int
    kv_blocks: int
    """KV blocks of a sequence."""
    isa: str | None = None
    """Instruction set of the kernels; None for the best that the CPU has."""
    reference: bool = False
    """Dequantise every matrix at load and store it as F32."""
    spin_us: int = 200
    """Microseconds that a waiting thread spins before it sleeps; 0 where threads share CPUs."""
    arena: Literal["memfd", "anon"] = "memfd"
    helper_cpus: tuple[int, ...] | None = None
    """CPUs of a node's threads outside the team; None for all that the process may use."""
    tasks: int = 0
    """Runs into which a node cuts its rows of a one-row op; 0 for as many as suit its threads."""
    claim_log: int = 0
    """Claims that each thread records, for tests; 0 records none."""

    def __post_init__(self) -> None:
        if [node.node for node in self.nodes] != list(range(len(self.nodes))) or not self.nodes:
            raise PoolError(f"nodes are numbered {[n.node for n in self.nodes]}, expected 0, 1, ...")
        if not 0 <= self.tasks <= MAX_TASKS:
            raise PoolError(f"tasks: found {self.tasks}, expected 0 to {MAX_TASKS}")

    @property
    def team_size(self) -> int:
        return sum(node.n_threads for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, strings and numbers; `from_json` is the inverse."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PoolSpec:
        program = plain["program"]
        return _record(
            cls,
            plain,
            files=tuple(plain["files"]),
            nodes=tuple(_node(node) for node in plain["nodes"]),
            helper_cpus=_cpus(plain["helper_cpus"]),
            program=_record(
                Program,
                program,
                ops=tuple(_op(op) for op in program["ops"]),
                tensors=tuple(_tensor(tensor) for tensor in program["tensors"]),
                buffers=tuple(_record(BufferSpec, buffer) for buffer in program["buffers"]),
            ),
        )


def _check_ids(items: list[tuple[int, str]]) -> None:
    for position, (id_, name) in enumerate(items):
        if id_ != position:
            raise PoolError(f"{name!r} has id {id_}, expected its position {position}")


def _record(cls: type[T], plain: Mapping[str, Any], **decoded: Any) -> T:
    return cls(**{**plain, **decoded})


def _op(plain: Mapping[str, Any]) -> Op:
    return _record(Op, plain, args=tuple((kind, value) for kind, value in plain["args"]))


def _tensor(plain: Mapping[str, Any]) -> TensorSpec:
    return _record(TensorSpec, plain, experts=None if plain["experts"] is None else tuple(plain["experts"]))


def _node(plain: Mapping[str, Any]) -> NodeSpec:
    ranges = {int(id_): (start, stop) for id_, (start, stop) in plain["row_ranges"].items()}
    return _record(NodeSpec, plain, cpus=_cpus(plain["cpus"]), row_ranges=ranges)


def _cpus(plain: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if plain is None else tuple(plain)
