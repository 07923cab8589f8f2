"""The whole program with a real model: odd starts, good endings, and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import strata_jit

PACKAGE = Path(strata_jit.__file__).parent
MODEL = Path(__file__).parent / "data" / "golden" / "qwen3moe-nl" / "model.gguf"
END_S = 2.0
"""An ending may take so long."""
COMPILE_S = 600
"""A cold start on a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def warm_cache():
    """Compile before any test that is timed."""
    with strata_jit.load(MODEL, workers=1, ctx=16) as model:
        model.logits([1, 2])


def command(*args, tokens=4000):
    options = ["--model", str(MODEL), "-p", "The river", "--raw", "-n", str(tokens)]
    return [sys.executable, "-m", "strata_jit", "decode", *options, *args]


def environment(**changes):
    """The test's environment with changes; None removes a variable."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("STRATA_")}
    own["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    own |= {k: str(v) for k, v in changes.items() if v is not None}
    return {k: v for k, v in own.items() if changes.get(k, "") is not None}


def run(*args, tokens=8, timeout=COMPILE_S, **changes):
    return subprocess.run(
        command(*args, tokens=tokens),
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Decoding:
    """A decode run that has begun to write its answer."""

    def __init__(self, *args):
        self.process = subprocess.Popen(
            command(*args), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.first = self.process.stdout.read(1)
        assert self.first, self.process.stderr.read()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.communicate()

    @property
    def nodes(self):
        """Pids of the node processes."""
        pid = self.process.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def end(self):
        """(exit code, stdout, stderr, seconds until the end)."""
        begin = time.monotonic()
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, self.first + out, err, time.monotonic() - begin


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_gone(pids):
    deadline = time.monotonic() + END_S
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pids)


def test_interrupt_keeps_the_text():
    with Decoding() as decoding:
        nodes = decoding.nodes
        time.sleep(0.2)
        decoding.process.send_signal(signal.SIGINT)
        code, out, err, seconds = decoding.end()
        assert code == 130
        assert len(out) > 1
        assert "Traceback" not in err
        assert seconds < END_S
        wait_gone(nodes)


def test_interrupt_with_json_still_gives_the_document():
    process = subprocess.Popen(
        command("--json"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, "Traceback" in err) == (130, False)
    assert json.loads(out)["stop_reason"] == "interrupted"


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_node_ends_the_run(victim):
    with Decoding("--test-slices", "2") as decoding:
        nodes = decoding.nodes
        os.kill(nodes[victim], signal.SIGKILL)
        code, _, err, seconds = decoding.end()
        assert code == 1
        errors = [line for line in err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1
        assert f"node process {victim}" in errors[0]
        assert "SIGKILL" in errors[0]
        assert "Traceback" not in err
        assert seconds < END_S
        wait_gone(nodes)


def test_killed_parent_leaves_nothing():
    with Decoding("--test-slices", "2") as decoding:
        nodes = decoding.nodes
        assert len(nodes) == 2
        decoding.process.kill()
        decoding.process.wait()
        wait_gone(nodes)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_twenty_loads_leave_memory_and_descriptors_as_they_were():
    def load_once():
        with strata_jit.load(MODEL, workers=1, ctx=64) as model:
            model.logits([1, 2, 3])

    for _ in range(3):
        load_once()
    descriptors, memory = len(os.listdir("/proc/self/fd")), resident_bytes()
    for _ in range(20):
        load_once()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert resident_bytes() < memory + 8 * 2**20
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not children


def test_five_workers_on_few_cpus_run_with_a_warning():
    usable = len(os.sched_getaffinity(0))
    found = run("--pool-workers", str(usable + 3), "--json")
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["threads"] == usable + 4
    assert all(not node["cpus"] for node in document["nodes"])
    assert "not pinned" in found.stderr
    assert document["output_sha256"] == json.loads(run("--json").stdout)["output_sha256"]


def files_below(directory):
    return {p for p in directory.rglob("*") if "__pycache__" not in p.parts or p.suffix != ".pyc"}


def test_home_that_cannot_be_found_and_cache_that_cannot_be_written(tmp_path):
    """Also: nothing is written beside the package, and the temporary cache is gone at the end."""
    before = files_below(PACKAGE)
    found = run(HOME=None, XDG_CACHE_HOME="/proc/no-cache", TMPDIR=tmp_path)
    assert found.returncode == 0, found.stderr
    assert list(tmp_path.iterdir()) == []
    assert files_below(PACKAGE) == before


def test_home_that_is_not_set():
    found = run(HOME=None, XDG_CACHE_HOME=None)
    assert found.returncode == 0, found.stderr


@pytest.fixture(scope="module")
def cold_started(tmp_path_factory):
    """(cache directory, the outcomes) of eight cold starts at once."""
    directory = tmp_path_factory.mktemp("cache")
    starts = [
        subprocess.Popen(
            command("--pool-workers", "0", tokens=8),
            env=environment(XDG_CACHE_HOME=directory),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    outcomes = [start.communicate(timeout=COMPILE_S) for start in starts]
    return directory, [(start.returncode, *outcome) for start, outcome in zip(starts, outcomes, strict=True)]


def test_eight_cold_starts_at_once(cold_started):
    _, outcomes = cold_started
    assert [code for code, _, _ in outcomes] == [0] * 8, outcomes
    assert len({out for _, out, _ in outcomes}) == 1


@pytest.mark.parametrize("keep", [0.0, 0.6])
def test_truncated_cache_is_compiled_anew(cold_started, tmp_path, keep):
    directory, outcomes = cold_started
    shutil.copytree(directory, tmp_path / "cache")
    cached = [p for p in (tmp_path / "cache").rglob("*") if p.suffix in (".nbi", ".nbc")]
    assert cached
    for path in cached:
        os.truncate(path, int(keep * path.stat().st_size))
    found = run("--pool-workers", "0", XDG_CACHE_HOME=tmp_path / "cache")
    assert found.returncode == 0, found.stderr
    assert found.stdout == outcomes[0][1]
