"""One node process as the host sees it: start, messages, death, end.

Owns the child process and its descriptors. Knows no layout and no step.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping

from strata_jit.errors import NodeDied, PoolError
from strata_jit.pool.channel import Channel

DEATH_GRACE_S = 1.0
"""A node whose stream has ended is given so long to turn up as dead."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
"""Libraries in a node process start no threads: they would run on the team's CPUs."""


class NodeProcess:
    """A fresh interpreter that runs `strata_jit.pool.node`.

    It gets a session of its own: Ctrl-C at the terminal reaches the host alone, and from the child's first
    instruction on, when it could not yet have ignored the signal. That the host is gone it sees by the end of
    the stream, however the host went.
    """

    def __init__(self, node: int, control_fd: int, cache_path: str) -> None:
        self.node = node
        if not sys.executable:
            raise PoolError(
                "sys.executable is empty, expected the path of a Python interpreter to start nodes"
            )
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            with theirs:
                self._process = _start_interpreter((control_fd, theirs.fileno()), cache_path)
        except OSError as fault:
            self.channel.close()
            raise PoolError(f"cannot start {sys.executable} as node process {node}: {fault}") from fault
        self.pid = self._process.pid
        self._pidfd = _pidfd(self.pid)

    @property
    def death_fd(self) -> int:
        """Descriptor that becomes readable when the process ends; -1 where the kernel has none."""
        return self._pidfd

    def is_dead(self) -> bool:
        """Whether the process has ended."""
        if self._pidfd < 0:
            return self._process.poll() is not None
        return bool(_poll([self._pidfd], 0))

    def death(self) -> NodeDied:
        """The error that says how the process ended; call it once `is_dead`, or the stream has ended."""
        try:
            status = self._process.wait(DEATH_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return NodeDied(self.node, status)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; False if it has not."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End the process at once; harmless if it has ended."""
        self._process.kill()

    def close(self) -> None:
        """Release the descriptors; idempotent."""
        self.channel.close()
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)


def first_dead(processes: Iterable[NodeProcess]) -> NodeProcess | None:
    """A process that has ended, if any."""
    return next((process for process in processes if process.is_dead()), None)


def wait_readable(processes: Iterable[NodeProcess], timeout_s: float) -> list[NodeProcess]:
    """Processes with something to receive, or whose end shows; may be empty after the timeout."""
    owners = {process.channel.fileno(): process for process in processes}
    owners |= {process.death_fd: process for process in owners.values() if process.death_fd >= 0}
    return list(dict.fromkeys(owners[fd] for fd in _poll(owners, timeout_s)))


def _poll(fds: Iterable[int], timeout_s: float) -> list[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_s * 1000)]


def _start_interpreter(fds: tuple[int, int], cache_path: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "strata_jit.pool.node", *map(str, fds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # the host's output is its own
        pass_fds=fds,
        env=_environment(os.environ, cache_path),
        start_new_session=True,
    )


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:  # kernels before 5.3, some sandboxes: the slower way of `is_dead` serves
        return -1


def _environment(base: Mapping[str, str], cache_path: str) -> dict[str, str]:
    """The child imports from where the host does, and finds its kernels in the cache."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    own = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "NUMBA_CACHE_DIR": cache_path, "NUMBA_DISABLE_JIT": "0"}
    return {**base, **dict.fromkeys(ONE_THREAD, "1"), **own}
