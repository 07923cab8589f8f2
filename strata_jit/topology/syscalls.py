"""System calls that Python does not offer: futexes of the host process, the CPU that a thread is on.

Owns ctypes. Knows no layout: callers pass addresses of futex words, the low half of an aligned int64 in
memory that processes share. Every call releases the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

from strata_jit.errors import TopologyError
from strata_jit.kernels.sync_abi import FUTEX_SYSCALL, FUTEX_WAIT, FUTEX_WAKE, FUTEX_WAKE_OP

ALL_WAITERS = 2**31 - 1
FUTEX_SHIFT = 0 if sys.byteorder == "little" else 4
_ADD_ONE = (1 << 28) | (1 << 12)
"""FUTEX_WAKE_OP's operation `word += 1`; its comparison (word == 0) would decide on further wakes."""
_MAY_RETURN = {errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR}


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_int64), ("tv_nsec", ctypes.c_int64)]


_NUMBER = FUTEX_SYSCALL.get(platform.machine(), -1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [
    ctypes.c_long,  # number of the call
    ctypes.c_void_p,  # futex word
    ctypes.c_int,  # command
    ctypes.c_uint32,  # value
    ctypes.c_void_p,  # timeout, or how many to wake at the second word
    ctypes.c_void_p,  # second word
    ctypes.c_uint32,  # value 3
]


def current_cpu() -> int:
    """CPU that the calling thread is running on; -1 where the system does not say."""
    return int(_libc.sched_getcpu())


def futex_supported() -> bool:
    """Whether this machine's futex call is known: 64-bit Linux on a common architecture."""
    return sys.platform == "linux" and _NUMBER >= 0 and sys.maxsize > 2**32


def _futex(address: int, command: int, value: int, arg4: int, address2: int, value3: int) -> int:
    word = address + FUTEX_SHIFT
    result: int = _libc.syscall(_NUMBER, word, command, value, arg4, address2, value3)
    if result < 0:
        code = ctypes.get_errno()
        if code not in _MAY_RETURN:
            raise TopologyError(f"futex command {command} failed: {os.strerror(code)}")
    return result


def futex_wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the futex word holds `expected`, at most `timeout_s`; may return early.

    A signal ends the sleep too, so that Python can run its handler.
    """
    nanoseconds = int(timeout_s * 1e9)
    timeout = _Timespec(nanoseconds // 10**9, nanoseconds % 10**9)
    _futex(address, FUTEX_WAIT, expected & 0xFFFFFFFF, ctypes.addressof(timeout), 0, 0)


def futex_wake(address: int) -> int:
    """Wake every sleeper of the futex word; returns how many there were."""
    return _futex(address, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)


def futex_bump(address: int) -> int:
    """Add one to the futex word and wake its sleepers; returns how many there were.

    The kernel adds atomically, after everything that this thread has stored: Python itself has no such store.
    """
    return _futex(address, FUTEX_WAKE_OP, ALL_WAITERS, 0, address + FUTEX_SHIFT, _ADD_ONE)
