"""Atomics on raw memory, futexes by both ways into the kernel, the clock."""

import threading
import time

import numpy as np
import pytest
from numba import njit

from strata_jit.kernels import atomics

N_ADDS = 200_000


@pytest.fixture
def word():
    """(int64[8], address) of a cache line."""
    memory = np.zeros(8, np.int64)
    return memory, memory.__array_interface__["data"][0]


@njit(nogil=True)
def add_many(address, n):
    for _ in range(n):
        atomics.fetch_add(address, 1)


@njit(nogil=True)
def add_many_by_cas(address, n):
    for _ in range(n):
        old = atomics.load_acquire(address)
        while True:
            found = atomics.compare_exchange(address, old, old + 1)
            if found == old:
                break
            old = found
            atomics.pause()


@njit
def one_of_each(address):
    atomics.store_release(address, 7)
    old = atomics.exchange(address, 2**40)
    added = atomics.fetch_add_seq(address, -1)
    kept = atomics.compare_exchange(address, 5, 6)
    atomics.sched_yield()
    return old, added, kept, atomics.load64(address)


@njit
def publish(address, value):
    atomics.publish_futex(address, value)
    return atomics.load_futex(address), atomics.load_futex_seq(address)


WAITS = {"inline": atomics.futex_wait, "libc": atomics.futex_wait_libc}
WAKES = {"inline": atomics.futex_wake, "libc": atomics.futex_wake_libc}


def waiter(way):
    wait = WAITS[way]
    return njit(nogil=True)(lambda address, expected, timeout_ns: wait(address, expected, timeout_ns))


def waker(way):
    wake = WAKES[way]
    return njit(nogil=True)(lambda address, n: wake(address, n))


@pytest.mark.parametrize("adder", [add_many, add_many_by_cas])
def test_concurrent_adds_are_exact(word, adder):
    memory, address = word
    adder(address, 0)
    threads = [threading.Thread(target=adder, args=(address, N_ADDS)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory[0] == 3 * N_ADDS


def test_each_operation_returns_what_was_there(word):
    memory, address = word
    assert one_of_each(address) == (7, 2**40, 2**40 - 1, 2**40 - 1)
    assert memory[1:].tolist() == [0] * 7


def test_futex_words_are_the_low_half(word):
    memory, address = word
    memory[0] = 9 << 32
    assert publish(address, 2**32 - 1) == (2**32 - 1, 2**32 - 1)
    assert memory[0] == (9 << 32) + 2**32 - 1


@pytest.mark.parametrize("way", WAITS)
def test_futex_wait_ends_by_value_timeout_and_wake(word, way):
    _, address = word
    wait, wake = waiter(way), waker(way)
    begin = time.monotonic()
    assert wait(address, 1, 10**10) < 0  # another value: at once
    assert wait(address, 0, 30_000_000) < 0  # timeout
    assert 0.02 < time.monotonic() - begin < 5
    thread = threading.Thread(target=wait, args=(address, 0, 2 * 10**10))
    thread.start()
    deadline = time.monotonic() + 10
    while (woken := wake(address, 5)) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    thread.join()
    assert woken == 1


def test_clock_is_pythons_monotonic_clock():
    now = njit(lambda: atomics.clock_ns())
    before = time.monotonic_ns()
    between = now()
    assert before <= between <= time.monotonic_ns()
