"""Which CPUs a thread may run on: reading the mask, binding a thread to one CPU.

Owns `os.sched_*`. What to bind where is decided elsewhere. A mask is inherited by threads and processes that
are started later.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress

from strata_jit.errors import TopologyError
from strata_jit.topology.syscalls import current_cpu

THREADS_DIR = "/proc/self/task"


def allowed_cpus() -> frozenset[int]:
    """CPUs that the calling thread may run on."""
    return frozenset(os.sched_getaffinity(0))


def move_thread(cpu: int) -> None:
    """Continue the calling thread on `cpu`, if it may run there, without binding it: its mask stays the same.

    A thread that sleeps next is woken where it slept, unless an idle CPU is at hand.
    """
    if current_cpu() == cpu:
        return
    mask = os.sched_getaffinity(0)
    if cpu in mask:
        try:
            os.sched_setaffinity(0, {cpu})
        finally:
            os.sched_setaffinity(0, mask)


def confine_thread(cpus: Collection[int]) -> None:
    """Let the calling thread run on these CPUs only. TopologyError if the kernel refuses."""
    _set_mask(0, cpus)


def confine_threads(cpus: Collection[int], *, but_this: bool = False) -> None:
    """Let every thread that this process has now run on these CPUs only, or all but the calling one.

    TopologyError if the kernel refuses.
    """
    own = threading.get_native_id()
    for name in os.listdir(THREADS_DIR):
        if not (but_this and int(name) == own):
            with suppress(ProcessLookupError):  # ended since
                _set_mask(int(name), cpus)


def _set_mask(thread_id: int, cpus: Collection[int]) -> None:
    try:
        os.sched_setaffinity(thread_id, cpus)
    except ProcessLookupError:
        raise
    except (OSError, ValueError, OverflowError) as fault:
        raise TopologyError(f"cannot keep a thread on CPUs {sorted(cpus)}: {fault}") from fault


def pin_thread(cpu: int) -> None:
    """Bind the calling thread to one CPU and read the mask back.

    Other threads, and those that this one has already started, keep theirs. TopologyError if the kernel
    refuses or binds to something else.
    """
    try:
        os.sched_setaffinity(0, {cpu})
    except (OSError, ValueError, OverflowError) as fault:
        raise TopologyError(f"cannot pin a thread to CPU {cpu}: {fault}") from fault
    found = allowed_cpus()
    if found != {cpu}:
        raise TopologyError(f"pinned a thread to CPU {cpu}, but its mask is {sorted(found)}")
