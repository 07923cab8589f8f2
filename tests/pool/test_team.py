"""The team in lock-step: every unit once, every step seen by all, no wake-up lost."""

import random
import time

import numpy as np
import pytest
from programs import make_op, make_spec

from strata_jit.pool.host import Pool

UNITS = 37
TEAMS = [(1,), (2,), (4,), (1, 1), (2, 1), (1, 2, 1)]
SLOW_STEP_S = 0.095
"""A lost wake-up shows as a sleep that only its timeout of 0.1 s ends."""


def counting_program(n_pairs):
    """Pairs of ops: count every unit, then check in every thread that all counts are equal."""
    count = make_op("count_units", ("b", 0), ("i", UNITS), many="count_units_many", kind="count")
    check = make_op("check_units", ("b", 0), ("i", UNITS), ("b", 1), kind="check")
    return [count, check] * n_pairs


def counting_spec(threads, n_pairs=50, **options):
    buffers = (8 * UNITS * len(threads), 8)
    shares = sum(threads) > 2
    options = {"spin_us": 0 if shares else 200, "pinned": not shares, **options}
    return make_spec(counting_program(n_pairs), buffers, threads, **options)


@pytest.mark.parametrize("threads", TEAMS, ids=str)
def test_every_unit_is_claimed_exactly_once(threads):
    expected = 0
    with Pool(counting_spec(threads)) as pool:
        for step in range(40):
            n_rows = 1 + step % 3
            pool.run(0, 100, n_rows, 0)
            expected += 50 * n_rows
        assert pool.buffer(0, np.int64).tolist() == [expected] * (UNITS * len(threads))
        assert pool.buffer(1, np.int64).tolist() == [0]


@pytest.mark.parametrize("threads", [(3,), (2, 1)], ids=str)
def test_claim_log_covers_each_unit_of_each_node_once(threads):
    steps, pairs = 5, 4
    with Pool(counting_spec(threads, pairs, claim_log=4096)) as pool:
        for _ in range(steps):
            pool.run(0, 2 * pairs, 1, 0)
        for node, n_threads in enumerate(threads):
            claims = np.concatenate([pool.claims(node, thread) for thread in range(n_threads)])
            for serial in np.unique(claims[:, 0]):
                units = np.sort(claims[claims[:, 0] == serial, 1])
                # beyond the last unit, each thread learns once that there is nothing left
                assert units.tolist() == list(range(UNITS + n_threads))
            assert len(np.unique(claims[:, 0])) == steps * pairs


def test_ops_without_rows_are_skipped_and_a_step_may_be_empty():
    def tally(buffer, **options):
        return make_op("count_threads", ("b", buffer), **options)

    ops = [tally(0), tally(1, count="out", barrier=False), tally(2, barrier=False)]
    with Pool(make_spec(ops, (16, 16, 16), (2,), pinned=True)) as pool:
        for n_rows, n_out in [(1, 0), (3, 2), (0, 0), (2, 1), (0, 0)] * 20:
            pool.run(0, 3, n_rows, n_out)
        pool.run(1, 0, 1, 1)
        counts = [pool.buffer(i, np.int64).tolist() for i in range(3)]
    assert counts == [[60, 60], [40, 40], [60, 60]]


@pytest.mark.parametrize(("threads", "spin_us"), [((2,), 20), ((3,), 0), ((1, 1), 20)], ids=str)
def test_no_wake_up_is_lost_with_pauses_past_the_spin_limit(threads, spin_us):
    rng = random.Random(7)
    pauses = [0, 1_000, 20_000, 60_000]  # nanoseconds
    n_ops = 64
    ops = [make_op("delay_one", ("i", rng.randrange(6)), ("i", rng.choice(pauses))) for _ in range(n_ops)]
    slow = 0
    with Pool(make_spec(ops, (), threads, spin_us=spin_us)) as pool:
        for _ in range(2500):
            first = rng.randrange(n_ops)
            begin = time.monotonic()
            pool.run(first, rng.randrange(min(6, n_ops - first + 1)), 1, 0)
            slow += time.monotonic() - begin > SLOW_STEP_S
            if rng.random() < 0.3:
                time.sleep(rng.choice([0, 20e-6, 200e-6, 1e-3]))
        sleeps = [thread.sleeps for thread in pool.stats().threads]
    assert slow == 0
    assert min(sleeps) > 100


def test_waiting_is_booked_on_those_who_wait():
    ops = [make_op("delay_one", ("i", 0), ("i", 20_000_000), kind="slow"), make_op("nothing", kind="fast")]
    with Pool(make_spec(ops, (), (2,), pinned=True)) as pool:
        for _ in range(5):
            pool.run(0, 2, 1, 0)
        stats = pool.stats()
    first, second = stats.wait_ns
    assert second > 80e6 > first
    assert stats.kind_ns[0]["slow"] >= 100e6 > stats.kind_ns[0]["fast"]


def test_more_threads_than_cpus_are_not_slower_than_a_third():
    def best(threads, **options):
        ops = [make_op("work", ("i", 64), ("i", 40_000), ("b", 0))] * 20
        with Pool(make_spec(ops, (512,), threads, **options)) as pool:
            times = []
            for _ in range(60):
                begin = time.monotonic()
                pool.run(0, 20, 1, 0)
                times.append(time.monotonic() - begin)
        return min(times)

    assert best((6,), spin_us=0) < 3 * best((2,), pinned=True)
