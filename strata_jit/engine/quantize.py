"""A GGUF file's weights in other types: plan, then every tensor from file to file in pieces.

Owns the order, the threads and the sums of squared errors. Threads take runs of rows in turn, each reading,
converting and writing its own, so that neither a model nor a tensor is ever in memory whole.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata_jit.engine.quantize_types import (
    FILE_TYPES,
    choose_types,
    parse_overrides,
    role_of,
    target_type,
)
from strata_jit.engine.setup import Progress
from strata_jit.errors import ModelError, UsageError, quoted
from strata_jit.gguf.quants import BLOCK_DTYPES, dequantize
from strata_jit.gguf.reader import GGUFFile, TensorInfo, open_gguf, raw_pairs
from strata_jit.gguf.types import GGMLType
from strata_jit.gguf.writer import GGUFWriter, NewTensor, u32_pair
from strata_jit.kernels.cache import open_cache
from strata_jit.pool.files import open_part
from strata_jit.topology.machine import read_machine

PIECE_BYTES = 4 << 20
"""Of float32 values, or of bytes that are copied: what a thread holds at a time."""
QUANTIZATION_VERSION = 2
"""`general.quantization_version`; ggml.h, GGML_QNT_VERSION."""
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """What will be done; nothing has been read but the header, nothing written."""

    file: GGUFFile
    target: Path
    type_name: str
    types: dict[str, GGMLType]
    """Of every tensor, in file order."""

    @property
    def changed(self) -> list[TensorInfo]:
        """Tensors that get another type; the bytes of the others are copied."""
        return [info for info in self.file.tensors.values() if info.type != self.types[info.name]]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What costs quality."""
        again = [info for info in self.changed if info.type not in _FLOATS]
        if not again:
            return ()
        kinds = ", ".join(sorted({info.type.name for info in again}))
        return (
            f"{len(again)} tensors are quantised already ({kinds}) and will be quantised again: the errors "
            "of both add up, a file of F16, BF16 or F32 gives better results",
        )


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One tensor before and after."""

    name: str
    role: str
    n_elements: int
    source_type: str
    type: str
    source_bytes: int
    bytes: int
    relative_rmse: float | None
    """sqrt(sum of squared errors / sum of squares); None where the bytes were copied."""


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What was written."""

    path: str
    type: str
    tensors: tuple[QuantizedTensor, ...]
    threads: int
    seconds: float


def plan_quantization(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    type_name: str,
    overrides: Sequence[str] = (),
) -> QuantizePlan:
    """Read the header of `source` and choose a type for each tensor.

    type_name  one of `quantize_types.TARGETS`
    overrides  PATTERN=TYPE: a regular expression searched in the names of matrices; later ones win
    UsageError for options that cannot be, ModelError for a file that cannot be read or whose weights are of a
    type without a definition here.
    """
    type_name = target_type(type_name, "TYPE")
    chosen = parse_overrides(overrides)
    file = open_gguf(source)
    for part in file.parts:
        if os.path.exists(target) and os.path.samefile(part, target):
            raise UsageError(f"{os.fspath(target)}: found the input as output, expected another file")
    types = choose_types(file, type_name, chosen)
    plan = QuantizePlan(file, Path(target), type_name, types)
    for info in plan.changed:
        if info.type not in BLOCK_DTYPES:
            known = ", ".join(known.name for known in BLOCK_DTYPES)
            field = f"tensor {quoted(info.name)}"
            raise ModelError.at(file.path, field, f"type {info.type.name}", f"one of {known}")
    return plan


def quantize(plan: QuantizePlan, on_progress: Progress | None = None) -> QuantizeResult:
    """Write the planned file. Leaves nothing behind if it fails or is interrupted.

    ModelError for a weight that is no finite number or beyond what its type can hold, OSError for what the
    system refuses.
    """
    begin = time.monotonic()
    report = on_progress or (lambda stage, done, total: None)
    file = plan.file
    tensors = [NewTensor(info.name, info.shape, plan.types[info.name]) for info in file.tensors.values()]
    kernels = _load_kernels(plan, report)
    n_threads = _n_threads()
    with GGUFWriter(plan.target, _pairs(plan), tensors, file.alignment) as writer:
        run = _Run(plan, writer, kernels)
        run.work(n_threads, report)
        writer.finish()
    results = tuple(run.result(i, info) for i, info in enumerate(file.tensors.values()))
    seconds = time.monotonic() - begin
    return QuantizeResult(os.fspath(plan.target), plan.type_name, results, n_threads, seconds)


def _load_kernels(plan: QuantizePlan, report: Progress) -> dict[str, Any]:
    # The only command that computes in the user's process: it starts no node process.
    from strata_jit.kernels.compile import load_quantizers

    changed = {plan.types[info.name].name for info in plan.changed}
    cache = open_cache()
    try:
        return load_quantizers(
            sorted(changed), cache.path, lambda done, total, name: report("compile", done, total)
        )
    finally:
        cache.close()


def _n_threads() -> int:
    """One for each physical core that this process may use, within the CPU quota."""
    machine = read_machine()
    return max(1, min(len(machine.cores), machine.cpu_quota or len(machine.cores)))


def _pairs(plan: QuantizePlan) -> list[bytes]:
    """The first part's metadata as it is, but for the type of the file."""
    pairs = raw_pairs(plan.file.parts[0])
    own = {
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.file_type": FILE_TYPES[plan.type_name],
    }
    pairs.update((key, u32_pair(key, value)) for key, value in own.items())
    return [pair for key, pair in pairs.items() if key not in _SPLIT_KEYS]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows (all experts' rows counted through) of a tensor, or bytes where it is copied."""

    number: int
    info: TensorInfo
    first: int
    count: int


class _Run:
    """The threads' common state."""

    def __init__(self, plan: QuantizePlan, writer: GGUFWriter, kernels: dict[str, Any]) -> None:
        self._plan = plan
        self._writer = writer
        self._kernels = kernels
        self._pieces = self._all_pieces()
        self._lock = threading.Lock()
        self._stop = False
        self._faults: list[BaseException] = []
        self._bytes_read = 0
        self._sums: dict[int, list[npt.NDArray[np.float64]]] = {}

    def work(self, n_threads: int, report: Progress) -> None:
        """Convert everything; raises what a thread raised, after all have ended."""
        files = [open_part(os.fspath(part)) for part in self._plan.file.parts]
        total = sum(info.nbytes for info in self._plan.file.tensors.values())
        threads = [threading.Thread(target=self._thread, args=(files,)) for _ in range(n_threads)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_S)
                    report("quantising", self._bytes_read, total)
        finally:
            self._stop = True
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for fd in files:
                os.close(fd)
        if self._faults:
            raise self._faults[0]

    def result(self, number: int, info: TensorInfo) -> QuantizedTensor:
        """What became of a tensor."""
        kind = self._plan.types[info.name]
        n_elements = math.prod(info.shape)
        new_bytes = NewTensor(info.name, info.shape, kind).nbytes
        rmse = None
        if kind != info.type:
            squares, errors = (math.fsum(column) for column in zip(*self._sums.get(number, ()), strict=True))
            rmse = math.sqrt(errors / squares) if squares else 0.0
        return QuantizedTensor(
            info.name, role_of(info.name), n_elements, info.type.name, kind.name, info.nbytes, new_bytes, rmse
        )

    def _all_pieces(self) -> Iterator[_Piece]:
        for number, info in enumerate(self._plan.file.tensors.values()):
            if self._plan.types[info.name] == info.type:
                n, step = info.nbytes, PIECE_BYTES
            else:
                n, step = math.prod(info.shape[1:]), max(1, PIECE_BYTES // (4 * info.n_cols))
            for first in range(0, n, step):
                yield _Piece(number, info, first, min(step, n - first))

    def _next(self) -> _Piece | None:
        with self._lock:
            return None if self._stop else next(self._pieces, None)

    def _thread(self, files: Sequence[int]) -> None:
        try:
            while (piece := self._next()) is not None:
                is_copy = self._plan.types[piece.info.name] == piece.info.type
                (self._copy if is_copy else self._quantize)(piece, files[piece.info.part])
        except BaseException as fault:  # noqa: BLE001 - raised again by the thread that waits
            self._stop = True
            self._faults.append(fault)

    def _copy(self, piece: _Piece, fd: int) -> None:
        self._writer.write(piece.number, piece.first, self._read(fd, piece.info, piece.first, piece.count))

    def _quantize(self, piece: _Piece, fd: int) -> None:
        info, kind = piece.info, self._plan.types[piece.info.name]
        raw = self._read(fd, info, piece.first * info.row_bytes, piece.count * info.row_bytes)
        rows = np.frombuffer(raw, np.uint8).reshape(piece.count, info.row_bytes)
        values = np.ascontiguousarray(dequantize(info.type, rows, info.n_cols))
        row_bytes = kind.row_bytes(info.n_cols)
        packed = np.empty(piece.count * row_bytes, np.uint8)
        sums = _quantize_values(self._kernels[kind.name], kind, values, packed)
        if isinstance(sums, int):
            raise self._refusal(piece, kind, sums, float(values.reshape(-1)[sums]))
        self._writer.write(piece.number, piece.first * row_bytes, packed)
        with self._lock:
            self._sums.setdefault(piece.number, []).append(sums)

    def _read(self, fd: int, info: TensorInfo, offset: int, n_bytes: int) -> bytes:
        data = os.pread(fd, n_bytes, info.offset + offset)
        if len(data) != n_bytes:
            path = self._plan.file.parts[info.part]
            raise ModelError(f"{path}: the file has become shorter while it was in use")
        with self._lock:
            self._bytes_read += n_bytes
        return data

    def _refusal(self, piece: _Piece, kind: GGMLType, index: int, value: float) -> ModelError:
        info = piece.info
        row, column = divmod(index, info.n_cols)
        expert, row = divmod(piece.first + row, info.n_rows)
        at = f"row {row}, column {column}" + (f" of expert {expert}" if info.n_expert > 1 else "")
        expected = f"a number that {kind.name} can hold"
        if math.isfinite(value):
            expected += "; choose another type for it with --tensor-type, such as BF16"
        return ModelError.at(
            self._plan.file.parts[info.part],
            f"tensor {quoted(info.name)}, {at}",
            f"{value:.9g}",
            expected,
        )


def _quantize_values(
    kernel: Any, kind: GGMLType, values: npt.NDArray[np.float32], packed: npt.NDArray[np.uint8]
) -> npt.NDArray[np.float64] | int:
    """Fill `packed`; sums of squares and of squared errors, or the index of a value that cannot be."""
    from strata_jit.kernels.quantizers import WORK_BYTES

    work = np.zeros(WORK_BYTES // 8)
    n_blocks = values.size // kind.block_size
    bad = kernel(values.ctypes.data, n_blocks, packed.ctypes.data, work.ctypes.data)
    return work[:2].copy() if bad < 0 else int(bad)
