"""Runs inside the rig's guest: asks the topology command questions and prints the answers as one JSON list.

The argument is a JSON list of questions:

    command  what stands before the interpreter, such as ["taskset", "-c", "1"]. Starting one takes twenty
             seconds where CPUs are emulated: without this, a fork of a process that has loaded the command
             answers
    mask     CPUs that the process is bound to before it asks, unless there is a `command`
    options  options of `strata-jit topology`
    env      environment variables on top of the guest's
    groups   control groups, each below the one before: a mapping of its files to what is written there. The
             command runs in the last one

An answer has `status`, `stdout` and `stderr` of the command. The first element of the printed list is no
answer but the cores of the whole guest as lists of siblings, which the command does not tell.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata_jit.cli import main as strata_jit
from strata_jit.topology.machine import read_machine

CGROUPS = Path("/sys/fs/cgroup")
COMMAND = ["topology", "--json"]
CONTROLLERS = "+cpu +cpuset"


def make_group(name: str, levels: list[dict[str, str]]) -> Path:
    """The lowest of new control groups below the root, made with what each level's files are to say."""
    if not (CGROUPS / "cgroup.controllers").exists():
        subprocess.run(["mount", "-t", "cgroup2", "none", str(CGROUPS)], check=True)
    group = CGROUPS
    for i, files in enumerate(levels):
        (group / "cgroup.subtree_control").write_text(CONTROLLERS)
        group = group / f"{name}-{i}"
        group.mkdir()
        for file, text in files.items():
            (group / file).write_text(text)
    return group


def ask(number: int, question: dict[str, Any]) -> dict[str, Any]:
    groups = question["groups"]
    group = make_group(f"rig{number}", groups) if groups else None

    def enter() -> None:
        os.environ.update(question["env"])
        if question["mask"]:
            os.sched_setaffinity(0, question["mask"])
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    options = [*COMMAND, *question["options"]]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if question["command"]:
            command = [*question["command"], sys.executable, "-m", "strata_jit", *options]
            status = subprocess.run(command, stdout=out, stderr=err, preexec_fn=enter).returncode
        else:
            status = fork(options, enter, out.fileno(), err.fileno())
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"status": status, "stdout": texts[0], "stderr": texts[1]}


def fork(options: list[str], enter: Callable[[], None], out: int, err: int) -> int:
    """Exit status of the command in a child whose output goes to these files."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        enter()
        strata_jit(options)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:  # noqa: BLE001  printed here, as the child must not run its parent's handlers
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def load() -> None:
    """Run the command once for what it imports."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        strata_jit(COMMAND)


def main() -> None:
    load()
    siblings = [list(core.siblings) for core in read_machine().all_cores]
    answers = [ask(number, question) for number, question in enumerate(json.loads(sys.argv[1]))]
    json.dump([siblings, *answers], sys.stdout)


if __name__ == "__main__":
    main()
