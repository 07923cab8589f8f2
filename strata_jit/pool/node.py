"""A node process: compile, load, run the team, end with the host.

Owns what happens in a node process, from the first message to the end. The main thread only watches the
stream from the host: when that ends it ends the process, at once, whatever the other threads are doing. A
second thread answers the messages; the team's threads are pinned before they touch memory and then stay in
nopython code (`kernels.team`). Kernels, and with them Numba, are imported inside functions, so here only.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strata_jit.errors import StrataError, UsageError
from strata_jit.kernels import abi, sync_abi
from strata_jit.pool import control
from strata_jit.pool.arena import conversion_of, plan_arena
from strata_jit.pool.channel import Channel, Message
from strata_jit.pool.control import Int64Array, Memory, plan_control
from strata_jit.pool.files import open_part
from strata_jit.pool.program import NodeSpec, PoolSpec
from strata_jit.pool.tables import ProgramTable, address_of, tensor_table
from strata_jit.topology.affinity import (
    allowed_cpus,
    confine_thread,
    confine_threads,
    pin_thread,
)

if TYPE_CHECKING:
    from strata_jit.kernels.compile import Kernels

STACK_BYTES = 16 << 20
"""Compiling recurses deeply, and the system's default for threads can be as low as 2 MiB."""
HOST_CHECK_S = 1.0
"""The host's end may have been inherited by a process that it forked: its pid is looked at so often too."""


def main() -> None:
    """`python -m strata_jit.pool.node CONTROL_FD SOCKET_FD`, started by `pool.process`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's to handle
    threading.stack_size(STACK_BYTES)
    host = os.getppid()
    control_fd, socket_fd = (int(argument) for argument in sys.argv[1:])
    channel = Channel(socket.socket(fileno=socket_fd))
    requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(channel, requests, control_fd), daemon=True).start()
    _watch(channel, requests, host)


def _watch(channel: Channel, requests: queue.SimpleQueue[Message], host: int) -> None:
    """Pass messages on until the host is gone, then end the process."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while os.getppid() == host:
        if not poll.poll(HOST_CHECK_S * 1000):
            continue
        messages = channel.receive_ready()
        if messages is None:
            break
        for message in messages:
            requests.put(message)
    os._exit(0)  # not sys.exit: the team's threads would have to agree


def _serve(channel: Channel, requests: queue.SimpleQueue[Message], control_fd: int) -> None:
    """Answer the host's messages; any fault goes to the host as one message."""
    try:
        init = requests.get()
        spec = PoolSpec.from_json(init["spec"])
        node = Node(spec, spec.nodes[init["node"]], control_fd, channel)
        node.compile(Path(init["cache"]))
        requests.get()
        node.load()
        requests.get()
        node.run()
    except StrataError as fault:
        _report(channel, type(fault).__name__, str(fault))
    except BaseException as fault:  # noqa: BLE001  whatever it is, the host waits for an answer
        _report(channel, "PoolError", f"{type(fault).__name__}: {fault}")


def _report(channel: Channel, kind: str, text: str) -> None:
    with suppress(OSError):  # the host is gone, and so will this process be
        channel.send({"type": "error", "kind": kind, "message": text})


class Node:
    """The state of one node process, in the order of its life: compile, load, run."""

    def __init__(self, spec: PoolSpec, own: NodeSpec, control_fd: int, channel: Channel) -> None:
        self.spec = spec
        self.own = own
        self.channel = channel
        self.layout = plan_control(spec)
        self.control = Memory(self.layout.nbytes, control_fd)
        os.close(control_fd)
        self.arena = plan_arena(spec.program, own.row_ranges)
        self.allowed = allowed_cpus()
        self._gate = threading.Event()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def compile(self, cache_path: Path) -> None:
        """Compile or load every kernel, while no thread is pinned yet; answers "compiled"."""
        begin = time.monotonic()
        self.kernels = _load_kernels(self, cache_path)
        self.channel.send(
            {
                "type": "compiled",
                "seconds": time.monotonic() - begin,
                "isa": self.kernels.isa,
                "variants": dict(self.kernels.variants),
            }
        )

    def load(self) -> None:
        """Start the team's threads and let them fill the arena; answers "loading", then "loaded"."""
        from strata_jit.pool.loader import ChunkQueue, file_bytes

        self.memory = control.allocate(self.arena.nbytes, self.spec.arena, f"strata-arena-{self.own.node}")
        program, arena = self.spec.program, self.spec.arena
        self.kv = control.allocate(program.kv_bytes, arena, f"strata-kv-{self.own.node}")
        self.state = control.allocate(program.state_bytes, arena, f"strata-state-{self.own.node}")
        self.tensors = tensor_table(self.arena, self.memory.address, self.kernels.dots)
        self.program = ProgramTable(
            self.spec.program, self.kernels.ops, self._buffer_addresses(), address_of(self.tensors)
        )
        self.files = [open_part(path) for path in self.spec.files]
        self.chunks = ChunkQueue(self.arena)
        if self.spec.helper_cpus is not None:
            confine_threads(self.spec.helper_cpus)
        threads = [_TeamThread(self, i) for i in range(self.own.n_threads)]
        for thread in threads:
            thread.start()
        self._await_team()
        self.channel.send({"type": "loading", "bytes": file_bytes(self.arena)})
        self._await_team()
        for fd in self.files:
            os.close(fd)
        self.channel.send({"type": "loaded", "report": self._node_report(threads)})

    def run(self) -> None:
        """Let the team into the interpreter; answers "ready"."""
        self._gate.set()
        self._await_team()
        self.channel.send({"type": "ready"})

    def announce(self, fault: BaseException | None = None) -> None:
        """Called by each team thread after each stage of its life."""
        self._events.put(fault)

    def wait_for_run(self) -> None:
        """Called by team threads that have loaded."""
        self._gate.wait()

    def _buffer_addresses(self) -> list[int]:
        return [self.control.address + offset for offset in self.layout.buffers]

    def _await_team(self) -> None:
        for _ in range(self.own.n_threads):
            fault = self._events.get()
            if fault is not None:
                raise fault

    def _node_report(self, threads: list[_TeamThread]) -> dict[str, Any]:
        return {
            "cpus": [thread.cpus for thread in threads],
            "bytes": self.arena.nbytes,
            "kv_bytes": self.spec.program.kv_bytes,
            "pages": -(-self.arena.nbytes // control.PAGE),
        }


_Event = BaseException | None


class _TeamThread(threading.Thread):
    """One thread of the team."""

    def __init__(self, node: Node, index: int) -> None:
        super().__init__(daemon=True, name=f"team-{node.own.node}.{index}")
        self.node = node
        self.index = index
        self.cpus: list[int] = []

    def run(self) -> None:
        try:
            self._live()
        except BaseException as fault:  # noqa: BLE001  raised again by the thread that awaits the team
            self.node.announce(fault)

    def _live(self) -> None:
        from strata_jit.kernels.team import run_team
        from strata_jit.pool.loader import Loader

        node = self.node
        if node.own.cpus is not None:
            pin_thread(node.own.cpus[self.index])
        elif node.spec.helper_cpus is not None:
            confine_thread(node.allowed)  # the mask that it was born with is the helpers'
        self.cpus = sorted(allowed_cpus())
        scratch = Memory(max(node.spec.program.scratch_bytes, control.PAGE))
        scratch.view(0, scratch.nbytes, np.uint8)[:] = 0  # first touch
        context = self._fill_context(scratch.address)
        node.announce()
        loader = Loader(node.arena, node.memory, node.files, node.spec.files)
        loader.load(node.chunks, lambda n: _add(context, sync_abi.PRIVATE_LOADED_BYTES, n))
        loader.close()
        node.announce()
        node.wait_for_run()
        node.announce()
        run_team(node.control.address + node.layout.thread(node.own.node, self.index))

    def _fill_context(self, scratch: int) -> Int64Array:
        node, layout = self.node, self.node.layout
        base, own = node.control.address, node.own.node
        words: Int64Array = node.control.view(layout.thread(own, self.index), abi.THREAD_WORDS)
        before = sum(other.n_threads for other in node.spec.nodes[:own])
        words[:] = 0
        words[abi.THREAD_INDEX] = self.index
        words[abi.THREAD_N_THREADS] = node.own.n_threads
        words[abi.THREAD_NODE] = own
        words[abi.THREAD_N_NODES] = len(node.spec.nodes)
        words[abi.THREAD_TEAM_INDEX] = before + self.index
        words[abi.THREAD_TEAM_SIZE] = node.spec.team_size
        words[abi.THREAD_SCRATCH] = scratch
        words[abi.THREAD_CLAIM] = base + layout.node(own) + sync_abi.SYNC_CLAIM
        words[abi.THREAD_KV] = node.kv.address
        words[abi.THREAD_STATE] = node.state.address
        words[abi.THREAD_CLAIM_LOG] = self._claim_log()
        words[sync_abi.PRIVATE_CONTROL] = base + control.STEP
        words[sync_abi.PRIVATE_STOP] = base + control.STOP
        words[sync_abi.PRIVATE_DONE] = base + control.DONE
        words[sync_abi.PRIVATE_SYNC] = base + layout.node(0)
        words[sync_abi.PRIVATE_SYNC_STRIDE] = layout.node_stride
        words[sync_abi.PRIVATE_PROGRAM] = address_of(node.program.rows)
        words[sync_abi.PRIVATE_SPIN_NS] = node.spec.spin_us * 1000
        is_first = words[abi.THREAD_TEAM_INDEX] == 0
        words[sync_abi.PRIVATE_IDLE_SPIN_NS] = 0 if is_first else node.spec.spin_us * 1000
        words[sync_abi.PRIVATE_NATIVE_ID] = threading.get_native_id()
        if self.index == 0:
            words[sync_abi.PRIVATE_KIND_NS] = base + layout.node(own) + layout.kind_ns
        return words

    def _claim_log(self) -> int:
        node = self.node
        if not node.spec.claim_log:
            return 0
        offset = node.layout.claim_log(node.own.node, self.index)
        node.control.view(offset, 1)[sync_abi.CLAIM_LOG_CAPACITY] = node.spec.claim_log
        return node.control.address + offset


def _add(words: Int64Array, word: int, amount: int) -> None:
    words[word] += amount


def _load_kernels(node: Node, cache_path: Path) -> Kernels:
    """Everything that this node calls; ends with the interpreter itself."""
    from strata_jit.kernels import isa
    from strata_jit.kernels.compile import load_kernels

    matrices = [t for t in node.spec.program.tensors if t.role == "matrix"]
    types = sorted({t.store_type for t in matrices})
    conversions = sorted({conversion_of(t)[0] for t in matrices})

    def on_progress(done: int, total: int, name: str) -> None:
        with suppress(OSError):  # no fault of compiling
            node.channel.send({"type": "progress", "done": done, "total": total, "name": name})

    try:
        isa_name = isa.choose(node.spec.isa or "auto")
    except ValueError as fault:
        raise UsageError(str(fault)) from fault
    op_refs = node.spec.program.op_refs
    kernels = load_kernels(op_refs, types, conversions, isa_name, cache_path, on_progress)
    import strata_jit.kernels.team  # noqa: F401  compiled by the import, so not in a pinned thread

    return kernels


if __name__ == "__main__":
    main()
