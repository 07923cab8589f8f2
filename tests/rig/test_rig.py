"""The topology command on real kernels with several nodes, booted by the rig, against what the rig was asked.

Every boot is slow (with emulated CPUs a command takes twenty seconds), so each machine is booted once and
asked all its questions in turn; a test then looks at one answer. All of them take about five minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import strata_jit
from strata_jit.units import MIB

GUEST = Path(__file__).with_name("guest.py")
ROOT = Path(strata_jit.__file__).parent.parent
BOOT_SECONDS, QUESTION_SECONDS = 90, 60
ONE_NODE = "the pool's CPUs span 1 node"
TWO_NODES = "the pool's CPUs span 2 nodes"

Answer = dict[str, Any]
Ask = Callable[["Rig", str], Answer]


@dataclass(frozen=True)
class Question:
    """What is asked in a guest, and what must come out.

    `workers` are (cpu, node), `plan_nodes` the nodes that get a process.
    """

    reason: str
    host: int
    workers: Sequence[tuple[int, int]]
    plan_nodes: Sequence[int]
    split: bool = False
    allowed: Sequence[int] | None = None
    """None: all CPUs."""
    limits: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Name of a limit -> its value and a part of its source."""
    warning: str = ""
    """Words of one of the warnings."""
    command: Sequence[str] = ()
    mask: Sequence[int] = ()
    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[Mapping[str, str]] = ()

    def asked(self) -> dict[str, Any]:
        return {
            "command": list(self.command),
            "mask": list(self.mask),
            "options": list(self.options),
            "env": dict(self.env),
            "groups": [dict(files) for files in self.groups],
        }


@dataclass(frozen=True)
class Rig:
    """A guest: the rig's options, what it must then be, and the questions.

    `memory` is in MiB. A node is given a size that no other has, so that none can pass for another.
    """

    name: str
    options: Sequence[str]
    nodes: Sequence[Sequence[int]]
    memory: Sequence[int]
    packages: Sequence[Sequence[int]]
    questions: Mapping[str, Question]
    cores: Sequence[Sequence[int]] = ()
    """Siblings of each core; left out, every CPU is one."""
    distances: Sequence[Sequence[int]] = ((10, 21), (21, 10))

    @property
    def cpus(self) -> list[int]:
        return sorted(cpu for node in self.nodes for cpu in node)

    @property
    def siblings(self) -> list[list[int]]:
        return [list(core) for core in self.cores] or [[cpu] for cpu in self.cpus]


RIGS = [
    Rig(
        "two nodes",
        ["--cpus-per-node", "2", "--mem-per-node", "1G,1536M"],
        nodes=[[0, 1], [2, 3]],
        memory=[1024, 1536],
        packages=[[0, 1], [2, 3]],
        questions={
            "as it is": Question(
                TWO_NODES, 0, [(1, 0), (2, 1)], [0, 1], split=True, warning="numa_balancing"
            ),
            "numactl --cpunodebind": Question(
                ONE_NODE, 2, [(3, 1)], [1], allowed=[2, 3], command=["numactl", "--cpunodebind=1"]
            ),
            "numactl --physcpubind": Question(
                TWO_NODES,
                1,
                [(2, 1)],
                [0, 1],
                split=True,
                allowed=[1, 2],
                command=["numactl", "--physcpubind=1,2"],
            ),
            "taskset": Question(ONE_NODE, 3, [], [1], allowed=[3], command=["taskset", "-c", "3"]),
            "quota of 2.5 CPUs": Question(
                TWO_NODES,
                0,
                [(2, 1)],
                [0, 1],
                split=True,
                limits={"cpu_quota": (2, "/cpu.max")},
                warning="the CPU quota allows 2 CPUs",
                groups=[{"cpu.max": "250000 100000"}],
            ),
            "quota of 1.5 CPUs in the group above": Question(
                ONE_NODE,
                0,
                [],
                [0],
                limits={"cpu_quota": (1, "-0/cpu.max")},
                groups=[{"cpu.max": "150000 100000"}, {"cpu.max": "300000 100000"}],
            ),
            "cpuset without node 1's memory and CPU 0": Question(
                ONE_NODE,
                1,
                [],
                [0],
                allowed=[1, 2, 3],
                limits={
                    "cpuset_cpus": ([1, 2, 3], "/cpuset.cpus.effective"),
                    "mems_allowed": ([0], "/proc/self/status"),
                },
                warning="no memory on node 1 (cpuset.mems)",
                groups=[{"cpuset.cpus": "1-3", "cpuset.mems": "0"}],
            ),
        },
    ),
    Rig(
        "four nodes in two packages",
        [
            *("--nodes", "4", "--cpus-per-node", "1", "--mem-per-node", "512M,640M,768M,896M"),
            *("--nodes-per-socket", "2", "--distance", "10,12,31,32/12,10,33,34/31,33,10,12/32,34,12,10"),
        ],
        nodes=[[0], [1], [2], [3]],
        memory=[512, 640, 768, 896],
        packages=[[0, 1], [2, 3]],
        distances=[[10, 12, 31, 32], [12, 10, 33, 34], [31, 33, 10, 12], [32, 34, 12, 10]],
        questions={
            "as it is": Question(
                "the pool's CPUs span 4 nodes", 0, [(1, 1), (2, 2), (3, 3)], [0, 1, 2, 3], split=True
            ),
        },
    ),
    Rig(
        "3 and 1 CPUs",
        ["--cpus-per-node", "3,1", "--mem-per-node", "1G,768M"],
        nodes=[[0, 1, 2], [3]],
        memory=[1024, 768],
        packages=[[0, 1, 2], [3]],
        questions={
            "as it is": Question(
                "lopsided: node 0 would have 3 threads, node 1 would have 1 thread",
                0,
                [(1, 0), (2, 0)],
                [0],
            ),
            "one worker": Question(
                TWO_NODES, 0, [(3, 1)], [0, 1], split=True, options=["--pool-workers", "1"]
            ),
            "switched off, with three workers": Question(
                "switched off",
                0,
                [(1, 0), (2, 0), (3, 1)],
                [0],
                options=["--pool-workers", "3"],
                env={"STRATA_NUMA_POOL": "0"},
            ),
        },
    ),
    Rig(
        "SMT",
        ["--smt", "--cpus-per-node", "4", "--mem-per-node", "1G,768M"],
        nodes=[[0, 1, 2, 3], [4, 5, 6, 7]],
        memory=[1024, 768],
        packages=[[0, 1, 2, 3], [4, 5, 6, 7]],
        cores=[[0, 1], [2, 3], [4, 5], [6, 7]],
        questions={
            "as it is": Question(TWO_NODES, 0, [(2, 0), (4, 1)], [0, 1], split=True),
            "second siblings only": Question(
                TWO_NODES,
                1,
                [(3, 0), (5, 1)],
                [0, 1],
                split=True,
                allowed=[1, 3, 5, 7],
                mask=[1, 3, 5, 7],
            ),
        },
    ),
    Rig(
        "a node without memory",
        ["--cpus-per-node", "2", "--mem-per-node", "1G,0"],
        nodes=[[0, 1], [2, 3]],
        memory=[1024, 0],
        packages=[[0, 1], [2, 3]],
        questions={
            "as it is": Question(ONE_NODE, 0, [(1, 0)], [0]),
            "three workers": Question(
                ONE_NODE, 0, [(1, 0), (2, 1), (3, 1)], [0], options=["--pool-workers", "3"]
            ),
        },
    ),
    Rig(
        "a node without CPUs",
        ["--cpus-per-node", "2,0", "--mem-per-node", "1G,768M"],
        nodes=[[0, 1], []],
        memory=[1024, 768],
        packages=[[0, 1]],
        questions={"as it is": Question(ONE_NODE, 0, [(1, 0)], [0])},
    ),
    Rig(
        "interleaved CPU numbers",
        ["--interleave", "--cpus-per-node", "2", "--mem-per-node", "1G,768M"],
        nodes=[[0, 2], [1, 3]],
        memory=[1024, 768],
        packages=[[0, 1, 2, 3]],
        questions={"as it is": Question(TWO_NODES, 0, [(2, 0), (1, 1)], [0, 1], split=True)},
    ),
]
CASES = [(rig, name) for rig in RIGS for name in rig.questions]


@pytest.fixture(scope="module")
def ask(rig_path: Path) -> Ask:
    """Answer of a guest to a question; each guest is booted at the first one."""
    answers: dict[str, dict[str, Answer] | str] = {}

    def answer(rig: Rig, name: str) -> Answer:
        needed = {question.command[0] for question in rig.questions.values() if question.command}
        missing = sorted(tool for tool in needed if shutil.which(tool) is None)
        packages = {"taskset": "util-linux"}
        if tool := next((tool for tool in missing if tool in rig.questions[name].command), None):
            pytest.skip(f"no {tool} on this machine: apt-get install {packages.get(tool, tool)}")
        if rig.name not in answers:
            answers[rig.name] = _boot(rig_path, rig, missing)
        found = answers[rig.name]
        if isinstance(found, str):
            pytest.fail(found)
        return found[name]

    return answer


def _boot(rig_path: Path, rig: Rig, missing: Sequence[str]) -> dict[str, Answer] | str:
    """Answers to all questions whose tools are there, or what went wrong."""
    questions = {
        name: question
        for name, question in rig.questions.items()
        if not set(missing).intersection(question.command)
    }
    asked = json.dumps([question.asked() for question in questions.values()])
    seconds = BOOT_SECONDS + QUESTION_SECONDS * len(questions)
    boot = [str(rig_path), *rig.options, "--timeout", str(seconds), "--"]
    done = subprocess.run(
        [*boot, sys.executable, str(GUEST), asked],
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * seconds,
    )
    try:
        siblings, *found = json.loads(done.stdout)
    except ValueError:
        return f"{rig.name}: status {done.returncode}, found {done.stdout[-500:]!r}: {done.stderr[-2000:]}"
    return {name: {"siblings": siblings, **each} for name, each in zip(questions, found, strict=True)}


def _environment() -> dict[str, str]:
    """This process's, without what would change a plan, and with the package under test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    path = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.parametrize(("rig", "name"), CASES, ids=[f"{rig.name}: {name}" for rig, name in CASES])
def test_rig(ask: Ask, rig: Rig, name: str) -> None:
    answer, question = ask(rig, name), rig.questions[name]
    assert answer["status"] == 0, answer["stderr"]
    found = json.loads(answer["stdout"])
    check_machine(rig, found["machine"], answer["siblings"])
    check_limits(rig, question, found)
    check_plan(question, found["plan"])
    assert question.warning in "\n".join(found["warnings"])


def check_machine(rig: Rig, machine: Answer, siblings: list[list[int]]) -> None:
    nodes = machine["nodes"]
    assert [node["id"] for node in nodes] == list(range(len(rig.nodes)))
    assert [node["cpus"] for node in nodes] == [list(cpus) for cpus in rig.nodes]
    assert [node["distances"] for node in nodes] == [list(row) for row in rig.distances]
    for node, asked in zip(nodes, rig.memory, strict=True):
        least = asked - reserved(asked)
        assert least * MIB <= node["memory_bytes"] <= asked * MIB, node
        assert 0 <= node["free_bytes"] <= node["memory_bytes"], node
    assert [package["cpus"] for package in machine["packages"]] == [list(cpus) for cpus in rig.packages]
    assert sum(package["cores"] for package in machine["packages"]) == len(rig.siblings)
    assert machine["cores"] == len(rig.siblings)
    assert siblings == rig.siblings
    assert machine["cpus_online"] == rig.cpus
    assert machine["cpus_offline"] == []
    assert machine["nodes_offline"] == []


def reserved(asked: int) -> int:
    """MiB that a kernel may keep from what it counts: its image, initial files and descriptions of pages."""
    return asked // 16 + 64 if asked else 0


def check_limits(rig: Rig, question: Question, found: Answer) -> None:
    allowed = rig.cpus if question.allowed is None else list(question.allowed)
    assert found["machine"]["cpus_allowed"] == allowed
    limits = {limit["name"]: (limit["value"], limit["source"]) for limit in found["limits"]}
    if question.command or question.mask:  # a cpuset narrows the mask too
        assert limits["affinity"] == (allowed, "sched_getaffinity")
    assert "cpu_quota" in question.limits or limits.get("cpu_quota", (None,))[0] is None
    for name, (value, source) in question.limits.items():
        assert limits[name][0] == value
        assert limits[name][1].endswith(source)


def check_plan(question: Question, plan: Answer) -> None:
    assert (plan["split"]["on"], plan["split"]["reason"]) == (question.split, question.reason)
    assert plan["host_cpu"] == question.host
    assert [(worker["cpu"], worker["node"]) for worker in plan["workers"]] == list(question.workers)
    assert [node["node"] for node in plan["nodes"]] == list(question.plan_nodes)
    assert all(node["room_bytes"] > 0 for node in plan["nodes"])
