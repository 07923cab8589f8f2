"""Binding threads, and futexes between threads."""

import os
import threading
import time

import numpy as np
import pytest

from strata_jit.errors import TopologyError
from strata_jit.topology.affinity import allowed_cpus, move_thread, pin_thread
from strata_jit.topology.syscalls import current_cpu, futex_bump, futex_wait, futex_wake


def in_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_pin_thread_binds_only_the_caller():
    before = allowed_cpus()
    cpu = max(before)

    def pinned():
        pin_thread(cpu)
        return allowed_cpus(), current_cpu()

    assert in_thread(pinned) == ({cpu}, cpu)
    assert allowed_cpus() == before


def test_pin_thread_raises_on_a_cpu_that_is_not_there():
    before = allowed_cpus()
    for cpu in (4095, -1, 2**40):
        with pytest.raises(TopologyError, match="cannot pin"):
            pin_thread(cpu)
    assert allowed_cpus() == before


def test_move_thread_keeps_the_mask():
    before = allowed_cpus()

    def moved():
        found = []
        for cpu in sorted(before):
            move_thread(cpu)
            found.append(allowed_cpus())
        move_thread(4095)
        return found

    assert in_thread(moved) == [before] * len(before)


@pytest.fixture
def word():
    memory = np.zeros(8, np.int64)
    return memory, memory.__array_interface__["data"][0]


def test_futex_wait_returns_on_another_value_and_after_its_timeout(word):
    memory, address = word
    memory[0] = 5
    begin = time.monotonic()
    futex_wait(address, 4, 10)
    futex_wait(address, 5, 0.02)
    assert 0.015 < time.monotonic() - begin < 5


def test_futex_bump_adds_and_wakes(word):
    memory, address = word
    memory[0] = 2**32 - 1
    woken = threading.Event()

    def sleeper():
        futex_wait(address, 2**32 - 1, 20)
        woken.set()

    thread = threading.Thread(target=sleeper)
    thread.start()
    time.sleep(0.05)
    assert futex_bump(address) == 1
    assert woken.wait(5)
    thread.join()
    assert memory[0] == 0  # 32 bits wrap
    assert futex_wake(address) == 0


def test_allowed_cpus_is_the_kernels_answer():
    assert allowed_cpus() == os.sched_getaffinity(0)
