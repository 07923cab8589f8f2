"""Word offsets that the interpreter, the barrier and the host's side of both agree on.

Owns the private half of the thread context, the synchronisation block of a node, and the futex numbers. Like
`abi` it imports no Numba, so that the host process can share it. Offsets of the thread context count int64
words; offsets of a node's synchronisation block count bytes.
"""

from strata_jit.kernels.abi import THREAD_PRIVATE

# --- thread context, private half -------------------------------------------------------------------------
# Written by the node process before the thread enters the interpreter:
PRIVATE_CONTROL = THREAD_PRIVATE + 0
"""Address of the step block."""
PRIVATE_STOP = THREAD_PRIVATE + 1
"""Address of the stop word; once nonzero every wait gives up and the interpreter returns."""
PRIVATE_DONE = THREAD_PRIVATE + 2
"""Address of the done word: the number of the last step that the whole team has finished."""
PRIVATE_SYNC = THREAD_PRIVATE + 3
"""Address of node 0's synchronisation block."""
PRIVATE_SYNC_STRIDE = THREAD_PRIVATE + 4
"""Bytes from one node's synchronisation block to the next node's."""
PRIVATE_PROGRAM = THREAD_PRIVATE + 5
"""Address of the program table."""
PRIVATE_SPIN_NS = THREAD_PRIVATE + 6
"""Nanoseconds of spinning at a barrier before sleeping; 0 means that threads share CPUs and never spin."""
PRIVATE_KIND_NS = THREAD_PRIVATE + 7
"""Address of int64[n_kinds] nanoseconds per op kind on the node's first thread, 0 on the others."""
PRIVATE_IDLE_SPIN_NS = THREAD_PRIVATE + 8
"""As PRIVATE_SPIN_NS, between steps; 0 for the team's first thread, which leaves its CPU to the host."""

# Written by the thread itself, on lines of their own; the host reads them:
PRIVATE_PHASE = THREAD_PRIVATE + 16
"""Barriers passed, modulo 2**32."""
PRIVATE_STEP = THREAD_PRIVATE + 17
"""Number of the last step started, modulo 2**32."""
PRIVATE_STATE = THREAD_PRIVATE + 18
"""One of the STATE_ values, for a report on a team that makes no progress."""
PRIVATE_OP = THREAD_PRIVATE + 19
"""Row of the program table that the thread executes or executed last."""
PRIVATE_SERIAL = THREAD_PRIVATE + 20
"""Ops executed since the start; equal on all threads for the same op of the same step."""
PRIVATE_WAIT_NS = THREAD_PRIVATE + 21
"""Nanoseconds lost in barriers."""
PRIVATE_SLEEPS = THREAD_PRIVATE + 22
"""Futex sleeps, between steps included."""
PRIVATE_LOADED_BYTES = THREAD_PRIVATE + 23
"""File bytes that the thread has loaded."""
PRIVATE_NATIVE_ID = THREAD_PRIVATE + 24
"""Kernel id of the thread, for whoever inspects its CPU mask."""

STATE_STARTING = 0
STATE_IDLE = 1
"""Waits for a step."""
STATE_WORKING = 2
"""Inside an op."""
STATE_WAITING = 3
"""At a barrier."""
STATE_STOPPED = 4
STATE_NAMES = ("starting", "idle", "working", "waiting", "stopped")

# --- synchronisation block of a node ----------------------------------------------------------------------
# One word per pair of cache lines, since CPUs fetch lines in pairs. A futex word is followed by the count of
# its sleepers, on the same line: whoever publishes the word owns the line already.
SYNC_EPOCH = 0
"""Futex. Number of the step to run, bumped by the host."""
SYNC_RELEASE = 128
"""Futex. Phase that the node's threads may enter, published by the last arriver."""
SYNC_FLAG = 256
"""Futex. Phase that the node as a whole has reached, read by the other nodes' last arrivers."""
SYNC_ARRIVE = 384
"""Threads of the node that have arrived in this phase."""
SYNC_CLAIM = 512
"""The claim word: units claimed in this phase beyond the first of each thread."""
SYNC_BYTES = 640
SYNC_SLEEPERS = 8
"""Byte offset from a futex word to its count of sleepers."""

# --- claim log --------------------------------------------------------------------------------------------
CLAIM_LOG_CAPACITY = 0
"""Entries that fit."""
CLAIM_LOG_COUNT = 1
"""Entries that were offered; those past the capacity are lost."""
CLAIM_LOG_ENTRIES = 2
"""First of the entries, two words each: serial of the op, unit."""

# --- futex ------------------------------------------------------------------------------------------------
FUTEX_WAIT = 0
FUTEX_WAKE = 1
FUTEX_WAKE_OP = 5
FUTEX_SYSCALL = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "loongarch64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
"""Number of the futex call by `platform.machine()`, all of them 64-bit Linux."""
