"""The interpreter that every team thread lives in, and what op kernels share: claiming work, the barrier.

`run_team` takes the address of a thread context, waits for steps, runs the ops of each in lock-step with
all other threads of all nodes, and returns only when the stop word is set. A step is a range of the program
table. All threads pass the last barrier of a step before its number appears in the done word, so the host may
then write the next step block. Knows no op and no model; all addresses come with the context (`abi`,
`sync_abi`).

Ordering. An op's results are visible to everybody after its barrier: arriving at a node releases them
(acq_rel counter), the last arriver acquires them all and releases them to the other nodes (its flag) and to
its own threads (the release word). A wait sleeps by counting itself in, seq_cst, and checking once more; a
publisher stores, seq_cst, and then looks at the count: one of the two sees the other, so no wake-up is lost,
and nobody enters the kernel while nobody sleeps. Phases are compared for equality only, so they may wrap.
"""

from numba import njit

from strata_jit.kernels import abi
from strata_jit.kernels import sync_abi as sync
from strata_jit.kernels._jit import inline_kernel
from strata_jit.kernels.atomics import (
    ALL_WAITERS,
    call3,
    clock_ns,
    fetch_add,
    fetch_add_seq,
    field,
    futex_wait,
    futex_wake,
    load64,
    load_acquire,
    load_futex,
    load_futex_seq,
    pause,
    publish_futex,
    sched_yield,
    store64,
    store_release,
)

STOPPED = -1
"""Returned instead of a time by every wait that gave up because the stop word is set."""
SPIN_BATCH = 64
"""Pauses between two looks at the clock and the stop word."""
YIELDS = 16
"""Yields before sleeping in a team that may not spin: whoever is awaited may be runnable on this CPU."""
SLEEP_NS = 100_000_000
"""Longest sleep before the stop word is looked at again."""
WORD_32 = 0xFFFFFFFF


@inline_kernel
def add_private(thread, word, amount):
    """Add to a word of the thread context that only this thread writes."""
    store64(field(thread, word), load64(field(thread, word)) + amount)


@inline_kernel
def publish(word, value):
    """Store a futex word and wake its sleepers, if there are any."""
    publish_futex(word, value)
    if load_futex_seq(word + sync.SYNC_SLEEPERS) != 0:
        futex_wake(word, ALL_WAITERS)


@inline_kernel
def _spin(word, old, stop, until):
    """Spin until the word changes (True), or the clock reaches `until` or the stop word is set (False)."""
    while True:
        for _ in range(SPIN_BATCH):
            if load_futex(word) != old:
                return True
            pause()
        if load_acquire(stop) != 0 or clock_ns() >= until:
            return False


@inline_kernel
def _sleep(word, old, stop):
    """Sleep until the word changes or the stop word is set."""
    sleepers = word + sync.SYNC_SLEEPERS
    while load_futex(word) == old and load_acquire(stop) == 0:
        fetch_add_seq(sleepers, 1)
        if load_futex_seq(word) == old:
            futex_wait(word, old, SLEEP_NS)
        fetch_add_seq(sleepers, -1)


@inline_kernel
def wait_while(word, old, thread, start, spin_ns):
    """Wait while the futex word is `old`: spin, then sleep. Returns the time afterwards, or STOPPED.

    `start` is the time of the call.
    """
    stop = load64(field(thread, sync.PRIVATE_STOP))
    if spin_ns > 0:
        changed = _spin(word, old, stop, start + spin_ns)
    else:
        for _ in range(YIELDS):
            if load_futex(word) != old:
                break
            sched_yield()
        changed = load_futex(word) != old
    if not changed:
        add_private(thread, sync.PRIVATE_SLEEPS, 1)
        _sleep(word, old, stop)
        if load_futex(word) == old:
            return STOPPED
    return clock_ns()


@inline_kernel
def _wait_at_barrier(word, old, thread, now):
    """`wait_while` with its time booked as lost; returns at once with `now` where none is due."""
    if load_futex(word) != old:
        return now
    if now == 0:
        now = clock_ns()
    store64(field(thread, sync.PRIVATE_STATE), sync.STATE_WAITING)
    after = wait_while(word, old, thread, now, load64(field(thread, sync.PRIVATE_SPIN_NS)))
    if after != STOPPED:
        add_private(thread, sync.PRIVATE_WAIT_NS, after - now)
    return after


@inline_kernel
def _meet_nodes(block, phase, thread, now):
    """The last arriver of a node announces it and waits for the other nodes."""
    base = load64(field(thread, sync.PRIVATE_SYNC))
    stride = load64(field(thread, sync.PRIVATE_SYNC_STRIDE))
    publish(block + sync.SYNC_FLAG, (phase + 1) & WORD_32)
    for node in range(load64(field(thread, abi.THREAD_N_NODES))):
        other = base + node * stride
        if other != block:
            now = _wait_at_barrier(other + sync.SYNC_FLAG, phase, thread, now)
            if now == STOPPED:
                return STOPPED
    return now


@inline_kernel
def node_block(thread, node):
    """Address of the synchronisation block of a node."""
    stride = load64(field(thread, sync.PRIVATE_SYNC_STRIDE))
    return load64(field(thread, sync.PRIVATE_SYNC)) + node * stride


@inline_kernel
def barrier(thread, now):
    """Meet all threads of all nodes; the claim word of the node starts anew.

    `now` is the time if the caller knows it, else 0. Returns the time after the wait, or `now` unchanged if
    there was none, or STOPPED.
    """
    block = node_block(thread, load64(field(thread, abi.THREAD_NODE)))
    n_threads = load64(field(thread, abi.THREAD_N_THREADS))
    phase = load64(field(thread, sync.PRIVATE_PHASE))
    store64(field(thread, sync.PRIVATE_PHASE), (phase + 1) & WORD_32)
    if n_threads > 1 and fetch_add(block + sync.SYNC_ARRIVE, 1) != n_threads - 1:
        return _wait_at_barrier(block + sync.SYNC_RELEASE, phase, thread, now)
    # the last arriver: nobody touches these words before the release below
    store64(block + sync.SYNC_ARRIVE, 0)
    store64(block + sync.SYNC_CLAIM, 0)
    if load64(field(thread, abi.THREAD_N_NODES)) > 1:
        now = _meet_nodes(block, phase, thread, now)
        if now == STOPPED:
            return STOPPED
    if n_threads > 1:
        publish(block + sync.SYNC_RELEASE, (phase + 1) & WORD_32)
    elif load_acquire(load64(field(thread, sync.PRIVATE_STOP))) != 0:
        return STOPPED  # a team of one waits nowhere else
    return now


@inline_kernel
def _log_claim(thread, unit):
    log = load64(field(thread, abi.THREAD_CLAIM_LOG))
    count = load64(field(log, sync.CLAIM_LOG_COUNT))
    if count < load64(field(log, sync.CLAIM_LOG_CAPACITY)):
        entry = sync.CLAIM_LOG_ENTRIES + 2 * count
        store64(field(log, entry), load64(field(thread, sync.PRIVATE_SERIAL)))
        store64(field(log, entry + 1), unit)
    store64(field(log, sync.CLAIM_LOG_COUNT), count + 1)


@inline_kernel
def first_unit(thread):
    """The unit of work that is this thread's in every op without asking: its index in the node."""
    unit = load64(field(thread, abi.THREAD_INDEX))
    if load64(field(thread, abi.THREAD_CLAIM_LOG)) != 0:
        _log_claim(thread, unit)
    return unit


@inline_kernel
def claim(thread):
    """The next unit of work of the current op; every unit from n_threads on goes to exactly one thread.

    Units are the node's own: `unit = first_unit(thread)`, then `while unit < n: ...; unit = claim(thread)`.
    An op that claims needs a barrier behind it, since only a barrier starts the claim word anew.
    """
    word = load64(field(thread, abi.THREAD_CLAIM))
    unit = load64(field(thread, abi.THREAD_N_THREADS)) + fetch_add(word, 1)
    if load64(field(thread, abi.THREAD_CLAIM_LOG)) != 0:
        _log_claim(thread, unit)
    return unit


@inline_kernel
def _run_op(row, op_address, control, thread, now):
    """Call one op. On the node's first thread `now` is when it starts; returns when it ended, elsewhere 0."""
    add_private(thread, sync.PRIVATE_SERIAL, 1)
    store64(field(thread, sync.PRIVATE_STATE), sync.STATE_WORKING)
    call3(op_address, control, load64(field(row, abi.OP_ARGS)), thread)
    kind_ns = load64(field(thread, sync.PRIVATE_KIND_NS))
    if kind_ns == 0:
        return 0
    end = clock_ns()
    add_private(kind_ns, load64(field(row, abi.OP_KIND)), end - now)
    return end


@inline_kernel
def _run_step(control, thread):
    """Run the ops of the step block; False if stopped. All threads leave after a common barrier.

    The row counts are read once, here: a thread that is late out of the last barrier may find the block of
    the next step in their place.
    """
    n_rows = load64(field(control, abi.STEP_N_ROWS))
    n_out = load64(field(control, abi.STEP_N_OUT))
    first = load64(field(control, abi.STEP_FIRST_OP))
    program = load64(field(thread, sync.PRIVATE_PROGRAM))
    now = clock_ns()
    apart = True  # whether threads may have left the last common barrier behind
    for op in range(first, first + load64(field(control, abi.STEP_N_OPS))):
        row = program + op * (abi.OP_WORDS * abi.WORD_BYTES)
        n = n_rows if load64(field(row, abi.OP_COUNT_FIELD)) == abi.STEP_N_ROWS else n_out
        if n == 0:
            continue
        variant = abi.OP_ADDR_ONE if n == 1 else abi.OP_ADDR_MANY
        op_address = load64(field(row, variant))
        if op_address != 0:
            store64(field(thread, sync.PRIVATE_OP), op)
            now = _run_op(row, op_address, control, thread, now)
            apart = True
        if load64(field(row, variant + 1)) != 0:
            now = barrier(thread, now)
            if now == STOPPED:
                return False
            apart = False
    return not apart or barrier(thread, now) != STOPPED


@njit("void(int64)", nogil=True, cache=True, error_model="numpy")
def run_team(thread):
    """Run steps until the stop word is set. `thread` is the address of this thread's context."""
    control = load64(field(thread, sync.PRIVATE_CONTROL))
    done = load64(field(thread, sync.PRIVATE_DONE))
    epoch = node_block(thread, load64(field(thread, abi.THREAD_NODE))) + sync.SYNC_EPOCH
    idle_spin_ns = load64(field(thread, sync.PRIVATE_IDLE_SPIN_NS))
    is_first = load64(field(thread, abi.THREAD_TEAM_INDEX)) == 0
    step = load64(field(thread, sync.PRIVATE_STEP))
    while True:
        store_release(field(thread, sync.PRIVATE_STATE), sync.STATE_IDLE)
        if wait_while(epoch, step, thread, clock_ns(), idle_spin_ns) == STOPPED:
            break
        step = (step + 1) & WORD_32
        store64(field(thread, sync.PRIVATE_STEP), step)
        if not _run_step(control, thread):
            break
        if is_first:
            publish_futex(done, step)
            futex_wake(done, ALL_WAITERS)  # the host cannot count itself in atomically: wake without asking
    store_release(field(thread, sync.PRIVATE_STATE), sync.STATE_STOPPED)
