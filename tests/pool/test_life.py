"""Start and end of a pool: deaths, interrupts, leftovers, faults at the start."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from programs import make_op, make_spec

from strata_jit.errors import ModelError, NodeDied, PoolError, TopologyError, UsageError
from strata_jit.pool.host import Pool

FOREVER_NS = 60_000_000_000
HERE = Path(__file__).parent
SCRIPT = """
import os, sys, time
sys.path[:0] = [{here!r}, {root!r}]
from programs import make_op, make_spec
from strata_jit.pool.host import Pool

def main():
    ops = [make_op("delay_one", ("i", 0), ("i", {ns}))]
    pool = Pool(make_spec(ops, (), {threads}, spin_us=50))
    print(*(node.pid for node in pool.nodes), flush=True)
    try:
        pool.run(0, 1, 1, 0)
        print("finished", flush=True)
    except KeyboardInterrupt:
        begin = time.monotonic()
        pool.close()
        pool.close()
        print("interrupted", time.monotonic() - begin, flush=True)

main()
"""


def run_script(threads, ns=FOREVER_NS):
    """A host process in the middle of a long step, and the pids of its nodes."""
    text = SCRIPT.format(here=str(HERE), root=str(HERE.parents[1]), threads=threads, ns=ns)
    host = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in host.stdout.readline().split()]
    return host, pids


def wait_until(condition, timeout_s):
    """Seconds until the condition holds; fails after the timeout."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s
        time.sleep(0.01)
    return time.monotonic() - begin


def gone(pids):
    """Whether no process is left, orphans that nobody has reaped counting as gone."""
    return not any(_is_alive(pid) for pid in pids)


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def long_step(threads, **options):
    return make_spec([make_op("delay_one", ("i", 0), ("i", FOREVER_NS))], (), threads, **options)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_node_ends_the_step(victim):
    with Pool(long_step((1, 1))) as pool:
        pids = [node.pid for node in pool.nodes]
        pool.submit(0, 1, 1, 0)
        timer = threading.Timer(0.2, os.kill, (pids[victim], signal.SIGKILL))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(NodeDied, match=f"node process {victim} died: killed by SIGKILL") as caught:
            pool.wait()
        assert time.monotonic() - begin < 2
        assert caught.value.node == victim
        timer.join()
        assert gone(pids)
        with pytest.raises(PoolError, match="closed"):
            pool.submit(0, 1, 1, 0)


def test_a_node_killed_between_steps_is_noticed_by_the_next():
    with Pool(make_spec([make_op("nothing")], (), (1,))) as pool:
        pool.run(0, 1, 1, 0)
        os.kill(pool.nodes[0].pid, signal.SIGTERM)
        with pytest.raises(NodeDied, match="SIGTERM"):
            pool.run(0, 1, 1, 0)


def test_a_killed_host_leaves_nothing():
    host, pids = run_script((2, 1))
    with host:
        assert len(pids) == 2 and not gone(pids)
        host.kill()
        host.wait()
        wait_until(lambda: gone(pids), 2)


def test_a_host_killed_while_it_starts_leaves_nothing():
    text = SCRIPT.format(here=str(HERE), root=str(HERE.parents[1]), threads=(1, 1), ns=0)
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.DEVNULL) as host:
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 2, 20)
        pids = [int(pid) for pid in children.read_text().split()]
        host.kill()
        host.wait()
        wait_until(lambda: gone(pids), 2)


def test_an_interrupt_ends_the_wait_and_the_pool_closes():
    host, pids = run_script((2,))
    with host:
        time.sleep(0.2)
        begin = time.monotonic()
        host.send_signal(signal.SIGINT)
        word, seconds = host.stdout.readline().split()
        assert time.monotonic() - begin < 2
        assert word == "interrupted" and float(seconds) < 1.9
        assert host.wait(2) == 0
        assert gone(pids)


def test_an_interrupt_of_the_nodes_is_ignored():
    with Pool(make_spec([make_op("nothing")], (), (1,))) as pool:
        os.kill(pool.nodes[0].pid, signal.SIGINT)
        time.sleep(0.05)
        pool.run(0, 1, 1, 0)


def test_an_idle_pool_costs_no_cpu():
    def cpu_s():
        fields = Path(f"/proc/{pool.nodes[0].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with Pool(make_spec([make_op("nothing")], (), (2,), pinned=True)) as pool:
        pool.run(0, 1, 1, 0)
        time.sleep(0.1)
        before = cpu_s()
        time.sleep(2)
        assert cpu_s() - before <= 0.04  # under 2 % of a CPU, for both threads and the supervisor


@pytest.mark.slow
def test_twenty_pools_leave_nothing_behind():
    def resources():
        status = Path("/proc/self/status").read_text()
        rss_kib = int(status.partition("VmRSS:")[2].split()[0])
        maps = Path("/proc/self/maps").read_text().count("strata-")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps, rss_kib

    spec = make_spec([make_op("nothing")], (1 << 20,), (1,))

    def cycle():
        with Pool(spec) as pool:
            pool.buffer(0, "i8")[:] = 1
            pool.run(0, 1, 1, 0)
            return pool.nodes[0].pid

    cycle()
    *before, rss_before = resources()
    pids = [cycle() for _ in range(20)]
    *after, rss_after = resources()
    assert after == before
    assert rss_after - rss_before < 4096
    assert gone(pids)


def test_closing_is_idempotent_and_keeps_views_valid():
    pool = Pool(make_spec([make_op("nothing")], (64,), (1,)))
    view = pool.buffer(0, "i8")
    pool.close()
    pool.close()
    view[:] = 3
    assert view.sum() == 24
    with pytest.raises(PoolError, match="closed"):
        pool.wait()


def test_threads_are_pinned_where_the_spec_says():
    def masks():
        for tid in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError):  # the thread that answered the start's messages may just end
                text = Path(f"/proc/{pid}/task/{tid}/status").read_text()
                yield text.partition("Cpus_allowed_list:")[2].split()[0]

    with Pool(make_spec([make_op("nothing")], (), (2,), pinned=True)) as pool:
        pid = pool.nodes[0].pid
        assert pool.nodes[0].cpus == ((0,), (1,))
        found = sorted(masks())
    assert [mask for mask in found if mask in ("0", "1")] == ["0", "1"]


def test_a_fault_while_compiling_is_one_message(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # such a fault may cost the kernel cache
    with pytest.raises(PoolError, match=r"node process 0: .*has no attribute 'no_such_op'"):
        Pool(make_spec([make_op("no_such_op")], (), (1,)))


def test_a_fault_at_the_start_keeps_its_kind():
    with pytest.raises(UsageError, match="unknown instruction set 'no-such-isa'"):
        Pool(make_spec([make_op("nothing")], (), (1, 1), isa="no-such-isa"))
    with pytest.raises(TopologyError, match="cannot pin a thread to CPU 4000"):
        Pool(make_spec([make_op("nothing")], (), (1,), cpus=[(4000,)]))
    with pytest.raises(ModelError, match="no/such/file: No such file"):
        Pool(make_spec([make_op("nothing")], (), (1,), files=["no/such/file"]))


def test_steps_out_of_range_are_refused():
    with Pool(make_spec([make_op("nothing")], (), (1,))) as pool:
        for step in [(0, 2, 1, 0), (-1, 1, 1, 0), (0, 1, 9, 0), (0, 1, 1, 2), (0, 1, -1, -1)]:
            with pytest.raises(PoolError, match=r"expected at most 8 rows|do not exist"):
                pool.submit(*step)
        with pytest.raises(PoolError, match="no step is running"):
            pool.wait()
        pool.submit(0, 1, 1, 0)
        with pytest.raises(PoolError, match="running already"):
            pool.submit(0, 1, 1, 0)
        pool.wait()


def test_progress_reports_compiling():
    stages = []
    with Pool(make_spec([make_op("nothing")], (), (1,)), lambda *report: stages.append(report)):
        pass
    assert ("compile", 1, 1) in stages
    assert stages[-1][0] == "load"
