"""Which CPUs a thread may run on: reading the mask, binding a thread to one CPU.

Owns `os.sched_*`. Only acts on the calling thread; what to bind where is decided elsewhere.
"""

from __future__ import annotations

import os

from strata_jit.errors import TopologyError
from strata_jit.topology.syscalls import current_cpu


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
