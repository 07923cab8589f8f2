"""The host's side of a pool: start the node processes, give the team steps, notice deaths, end everything.

Owns the order of the start and the end, and the step block. Never imports Numba. Knows no model: what the
rows and buffers mean is between the program's builder and its ops.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from strata_jit import errors
from strata_jit.errors import PoolError, TopologyError
from strata_jit.kernels import abi, sync_abi
from strata_jit.kernels.cache import KernelCache, open_cache
from strata_jit.pool import control
from strata_jit.pool.arena import settle_store_types
from strata_jit.pool.channel import Message
from strata_jit.pool.control import Int64Array, Memory, plan_control
from strata_jit.pool.files import drop_pages
from strata_jit.pool.process import NodeProcess, first_dead, wait_readable
from strata_jit.pool.program import PoolSpec
from strata_jit.pool.reports import (
    KernelVariant,
    NodeReport,
    PoolStats,
    loaded_bytes,
    read_claims,
    read_stats,
)
from strata_jit.topology.affinity import move_thread
from strata_jit.topology.syscalls import futex_bump, futex_supported, futex_wait, futex_wake

POLL_S = 0.03
"""A waiting host looks for dead nodes and at the progress of loading so often."""
STOP_S = 1.0
"""Node processes that have not ended so long after they were told to are killed."""
WORD_32 = 0xFFFFFFFF

Progress = Callable[[str, int, int], None]
Scalar = TypeVar("Scalar", bound=np.generic)


class Pool:
    """A running team. A context manager; `close` ends it.

    spec         what to run; see `pool.program`
    on_progress  called as (stage, done, total) with stage "compile" (kernels) or "load" (bytes)

    rows         int64[max_rows, 4]: token, position, sequence, want_logits of the next step's rows
    out_rows     int64[max_rows]: rows whose logits are wanted, ascending
    kv_table     int64[n_seq, kv_blocks]: KV slot of (sequence, block)
    compile_s, load_s  seconds
    nodes        a `NodeReport` for each node process
    kernels      a `KernelVariant` for each op kernel and each type of matrix
    isa          instruction set of the dot kernels

    Raises `NodeDied` when a node process ends, and `PoolError` at every later use; `ModelError` if a file
    cannot be read as described; whatever `StrataError` a node process raises while it starts.
    """

    def __init__(self, spec: PoolSpec, on_progress: Progress | None = None) -> None:
        if not futex_supported():
            raise TopologyError("this machine has no futex call that is known here, expected 64-bit Linux")
        self._progress: Progress = on_progress or (lambda stage, done, total: None)
        self._owner = os.getpid()
        self._processes: list[NodeProcess] = []
        self._answers: dict[tuple[int, str], Message] = {}
        self._cache: KernelCache | None = None
        self._memory: Memory | None = None
        self._control_fd = -1
        self._step = 0
        self._pending = False
        try:
            self._start(spec)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # a pool that nobody closed; a start that failed has closed itself
        if getattr(self, "_processes", None):
            self.close()

    # --- use --------------------------------------------------------------------------------------------

    def buffer(self, id_: int, dtype: np.dtype[Scalar]) -> npt.NDArray[Scalar]:
        """A shared buffer as a flat array of `dtype`; as many whole elements as fit."""
        spec = self.spec.program.buffers[id_]
        count = spec.nbytes // np.dtype(dtype).itemsize
        view: npt.NDArray[Scalar] = self._open_memory().view(self._layout.buffers[id_], count, dtype)
        return view

    def submit(self, first_op: int, n_ops: int, n_rows: int, n_out: int) -> None:
        """Start a step: ops [first_op, first_op + n_ops) on `n_rows` rows, `n_out` of them with logits.

        Rows, output rows, KV table and buffers belong to the team until `wait` returns.
        """
        self._open_memory()
        if self._pending:
            raise PoolError("a step is running already: wait for it before the next one")
        if not 0 <= first_op <= first_op + n_ops <= len(self.spec.program.ops):
            raise PoolError(f"ops {first_op}:{first_op + n_ops} of {len(self.spec.program.ops)} do not exist")
        if not 0 <= n_out <= n_rows <= self.spec.max_rows:
            raise PoolError(
                f"found {n_rows} rows, {n_out} outputs; expected at most {self.spec.max_rows} rows"
            )
        block = self._block
        block[abi.STEP_FIRST_OP] = first_op
        block[abi.STEP_N_OPS] = n_ops
        block[abi.STEP_N_ROWS] = n_rows
        block[abi.STEP_N_OUT] = n_out
        self._step = (self._step + 1) & WORD_32
        self._pending = True
        self._publish()

    def wait(self) -> None:
        """Wait for the submitted step; an interrupt leaves it running, and `wait` may be called again."""
        memory = self._open_memory()
        if not self._pending:
            raise PoolError("no step is running: submit one first")
        before = (self._step - 1) & WORD_32
        cpus = self.spec.nodes[0].cpus
        if cpus is not None:
            move_thread(cpus[0])  # elsewhere the host would have to wait until a team thread stops spinning
        while True:
            # always through the kernel: its barrier also orders our reads after the team's writes
            futex_wait(memory.address + control.DONE, before, POLL_S)
            if self._done[0] == self._step:
                break
            self._check_alive()
            self._publish()  # an interrupt may have come between two nodes
        self._pending = False

    def drain(self) -> None:
        """Wait for the step that an interrupted `wait` has left running, if there is one."""
        if self._pending:
            self.wait()

    def run(self, first_op: int, n_ops: int, n_rows: int, n_out: int) -> None:
        """`submit` and `wait`."""
        self.submit(first_op, n_ops, n_rows, n_out)
        self.wait()

    def stats(self) -> PoolStats:
        """Figures since the start; may be asked for while a step runs."""
        return read_stats(self._open_memory(), self._layout, self.spec)

    def claims(self, node: int, thread: int) -> Int64Array:
        """int64[n, 2]: (serial of the op, unit) of a thread's claims, if the spec asked for a log."""
        if not self.spec.claim_log:
            raise PoolError("this pool keeps no claim log")
        return read_claims(self._open_memory(), self._layout, node, thread)

    def close(self) -> None:
        """End the node processes and give all memory back; idempotent, and bounded in time.

        In a process forked from the one that made the pool only the copies here are given back.
        """
        if os.getpid() != self._owner:
            self._processes = []
            self._release()
            return
        try:
            self._ask_to_stop()
            deadline = time.monotonic() + STOP_S
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.wait(STOP_S)
                process.close()
            self._processes = []
            self._release()

    # --- start ------------------------------------------------------------------------------------------

    def _start(self, spec: PoolSpec) -> None:
        self._cache = open_cache()
        program = settle_store_types(spec.program, spec.files, reference=spec.reference)
        self.spec = replace(spec, program=program)
        self._create_memory()
        plain = self.spec.to_json()
        for node in self.spec.nodes:
            self._processes.append(NodeProcess(node.node, self._control_fd, str(self._cache.path)))
        for process in self._processes:
            init = {"type": "init", "node": process.node, "spec": plain, "cache": str(self._cache.path)}
            self._send(process, init)
        compiled = self._gather("compiled")
        self.kernels = tuple(KernelVariant(*item) for item in compiled[0]["variants"].items())
        self.isa: str = compiled[0]["isa"]
        loading = time.monotonic()
        self.compile_s = max(float(message["seconds"]) for message in compiled)
        self._load()
        self.load_s = time.monotonic() - loading
        self._broadcast("run")
        self._gather("ready")

    def _create_memory(self) -> None:
        self._layout = layout = plan_control(self.spec)
        self._control_fd = control.create_memfd("strata-control", layout.nbytes)
        self._memory = memory = Memory(layout.nbytes, self._control_fd)
        self._stop: Int64Array = memory.view(control.STOP, 1)
        self._done: Int64Array = memory.view(control.DONE, 1)
        self._block: Int64Array = memory.view(control.STEP, abi.STEP_WORDS)
        words = [layout.node(node.node) + sync_abi.SYNC_EPOCH for node in self.spec.nodes]
        self._epochs: list[tuple[int, Int64Array]]
        self._epochs = [(memory.address + word, memory.view(word, 1)) for word in words]
        self.rows: Int64Array = memory.view(layout.rows, (self.spec.max_rows, abi.ROW_WORDS))
        self.out_rows: Int64Array = memory.view(layout.out_rows, self.spec.max_rows)
        self.kv_table: Int64Array = memory.view(layout.kv_table, (self.spec.n_seq, self.spec.kv_blocks))
        self._block[abi.STEP_ROWS] = layout.rows - control.STEP
        self._block[abi.STEP_OUT_ROWS] = layout.out_rows - control.STEP
        self._block[abi.STEP_KV_TABLE] = layout.kv_table - control.STEP
        self._block[abi.STEP_KV_TABLE_STRIDE] = self.spec.kv_blocks
        self._block[abi.STEP_TASKS] = self.spec.tasks

    def _load(self) -> None:
        """The page cache gives way before the nodes fill their memory, and once more behind them."""
        drop_pages(self.spec.files)
        self._broadcast("load")
        total = sum(message["bytes"] for message in self._gather("loading"))
        self._progress("load", 0, total)
        memory = self._open_memory()

        def report() -> None:
            self._progress("load", loaded_bytes(memory, self._layout, self.spec), total)

        loaded = self._gather("loaded", report)
        self._progress("load", total, total)
        drop_pages(self.spec.files)
        self.nodes = tuple(
            NodeReport.from_message(process.node, process.pid, message["report"])
            for process, message in zip(self._processes, loaded, strict=True)
        )

    def _broadcast(self, kind: str) -> None:
        for process in self._processes:
            self._send(process, {"type": kind})

    def _send(self, process: NodeProcess, message: Message) -> None:
        try:
            process.channel.send(message)
        except OSError:
            raise process.death() from None

    def _gather(self, kind: str, on_poll: Callable[[], None] = lambda: None) -> list[Message]:
        """Wait, for as long as it takes, until every node has sent a message of this kind."""
        wanted = [(process.node, kind) for process in self._processes]
        while not all(key in self._answers for key in wanted):
            for process in wait_readable(self._processes, POLL_S):
                messages = process.channel.receive_ready()
                if messages is None:
                    raise process.death()
                for message in messages:
                    self._handle(process, message)
            on_poll()
        return [self._answers[key] for key in wanted]

    def _handle(self, process: NodeProcess, message: Message) -> None:
        if message["type"] == "error":
            raise _node_error(process.node, message)
        if message["type"] == "progress":
            self._progress("compile", message["done"], message["total"])
        else:
            self._answers[process.node, message["type"]] = message  # a node may be a stage ahead of another

    # --- end --------------------------------------------------------------------------------------------

    def _open_memory(self) -> Memory:
        if self._memory is None:
            raise PoolError("the pool is closed")
        return self._memory

    def _publish(self) -> None:
        """Give the step to every node that does not have it yet."""
        for address, epoch in self._epochs:
            if epoch[0] != self._step:
                futex_bump(address)

    def _check_alive(self) -> None:
        dead = first_dead(self._processes)
        if dead is not None:
            death = dead.death()
            self.close()
            raise death

    def _ask_to_stop(self) -> None:
        """Threads leave the interpreter at their next wait; the end of its stream ends each process."""
        if self._memory is not None and self._processes:
            self._stop[0] = 1
            for process in self._processes:
                block = self._memory.address + self._layout.node(process.node)
                for word in (sync_abi.SYNC_EPOCH, sync_abi.SYNC_RELEASE, sync_abi.SYNC_FLAG):
                    futex_wake(block + word)
        for process in self._processes:
            process.channel.close()

    def _release(self) -> None:
        if self._memory is not None:
            for view in ("_stop", "_done", "_block", "_epochs", "rows", "out_rows", "kv_table"):
                self.__dict__.pop(view, None)  # a view would keep the memory
            self._memory.close()
            self._memory = None
        if self._control_fd >= 0:
            os.close(self._control_fd)
            self._control_fd = -1
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _node_error(node: int, message: Message) -> errors.StrataError:
    """The node's error as the same kind of error here."""
    kind = getattr(errors, message["kind"], PoolError)
    if kind is PoolError or not issubclass(kind, errors.StrataError):
        return PoolError(f"node process {node}: {message['message']}")
    error: errors.StrataError = kind(message["message"])
    return error
