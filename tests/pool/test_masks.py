"""Which CPUs every thread of a pool may run on: one for those of the team, never one for any other."""

import os
import threading
import time
from pathlib import Path

import pytest
from programs import make_op, make_spec

from strata_jit.pool.host import Pool
from strata_jit.topology.affinity import allowed_cpus, confine_threads
from strata_jit.topology.cpulist import parse_cpulist

ALLOWED = sorted(allowed_cpus())
needs_two_cpus = pytest.mark.skipif(len(ALLOWED) < 2, reason="this process may use one CPU only")


def masks(pid):
    """Mask of every thread of a process."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        lines = (thread / "status").read_text().splitlines()
        (cpus,) = [line.split(":")[1] for line in lines if line.startswith("Cpus_allowed_list")]
        found.append(sorted(parse_cpulist(cpus)))
    return sorted(found)


def settled(pid, is_right):
    """Masks once `is_right`, or after 5 s: a thread may be seen in the moment before it is bound."""
    deadline = time.monotonic() + 5
    while not is_right(found := masks(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def spec(cpus, **options):
    counts = (len(cpus),) if isinstance(cpus, tuple) else (cpus,)
    lists = [cpus] if isinstance(cpus, tuple) else None
    return make_spec([make_op(None)], (), counts, cpus=lists, spin_us=0, **options)


@needs_two_cpus
@pytest.mark.parametrize("n_threads", [1, 2])
def test_only_pinned_threads_have_one_cpu(n_threads):
    pinned = tuple(ALLOWED[:n_threads])
    with Pool(spec(pinned)) as pool:
        pool.run(0, 1, 1, 0)  # the host moves to the first CPU, and must not stay bound there
        own = masks(pool.nodes[0].pid)
        host = masks(os.getpid())
    assert [mask for mask in own if len(mask) == 1] == [[cpu] for cpu in pinned]
    assert [mask for mask in own if len(mask) > 1] == [ALLOWED] * (len(own) - n_threads)
    assert len(own) > n_threads
    assert all(len(mask) > 1 for mask in host)


@needs_two_cpus
def test_helpers_stay_where_they_were_put():
    helper = ALLOWED[-1]
    with Pool(spec((ALLOWED[0],), helper_cpus=(helper,))) as pool:
        pool.run(0, 1, 1, 0)
        own = settled(pool.nodes[0].pid, lambda own: own.count([ALLOWED[0]]) == 1)
    assert own.count([ALLOWED[0]]) == 1
    assert own.count([helper]) == len(own) - 1 > 0


@needs_two_cpus
def test_team_that_is_not_pinned_is_not_confined_with_helpers():
    with Pool(spec(2, helper_cpus=(ALLOWED[0],))) as pool:
        pool.run(0, 1, 1, 0)
        own = settled(pool.nodes[0].pid, lambda own: own.count(ALLOWED) == 2)
    assert own.count(ALLOWED) == 2
    assert own.count([ALLOWED[0]]) == len(own) - 2 > 0


@needs_two_cpus
def test_confine_threads_spares_the_caller():
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        confine_threads(ALLOWED[-1:], but_this=True)
        assert os.sched_getaffinity(other.native_id) == {ALLOWED[-1]}
        assert allowed_cpus() == set(ALLOWED)
    finally:
        confine_threads(ALLOWED, but_this=True)
        end.set()
        other.join()
