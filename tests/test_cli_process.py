"""The command as a real process: signals, pipes whose reader leaves, a full disk, a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
DECODE = ("decode", "--model", "some.gguf")
EXIT_INTERRUPTED = 130
PROCESS_TIMEOUT_S = 60


def _command(*args: str) -> list[str]:
    return [sys.executable, str(FAKE_ENGINE), *DECODE, "-p", "hi", *args]


def _environment(**script: Any) -> dict[str, str]:
    paths = [str(FAKE_ENGINE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "FAKE_ENGINE": json.dumps(script)}
    return {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")} | ours


def test_process_interrupt() -> None:
    environment = _environment(pieces=["half", "!wait"])
    with subprocess.Popen(
        _command(), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(4) == "half"  # streamed: it has not ended yet
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PROCESS_TIMEOUT_S)
        assert time.monotonic() - started < 2
    assert (process.returncode, stdout) == (EXIT_INTERRUPTED, "\n")
    assert "Traceback" not in stderr


def test_process_reader_that_leaves() -> None:
    environment = _environment(pieces=["line\n"] * 5_000)
    command = f"{' '.join(_command())} | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "line\n", "")


def test_process_full_disk() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            _command(),
            env=_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PROCESS_TIMEOUT_S,
        )
    assert (result.returncode, result.stderr) == (1, "error: No space left on device\n")


def _on_terminal(*args: str, **script: Any) -> str:
    """Everything that the command writes when stdout and stderr are one terminal."""
    host, terminal = pty.openpty()
    environment = _environment(**script) | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(_command(*args), env=environment, stdout=terminal, stderr=terminal)
    os.close(terminal)
    chunks = []
    with open(host, "rb", buffering=0) as screen:
        while True:
            try:
                chunks.append(screen.read(65536))
            except OSError:  # Linux: the terminal's last writer has closed it
                break
    assert process.wait(PROCESS_TIMEOUT_S) == 0
    return b"".join(chunks).decode()


def test_terminal_shows_control_characters_as_symbols() -> None:
    written = _on_terminal("--json", "-n", "5")
    assert json.loads(written)["text"] == "Hello you"
    written = _on_terminal(pieces=["\x1b]0;title\x07", "a\tb\r\nc\x9b2J"])
    assert "\u241b]0;title\u2407a\tb\r\nc\ufffd2J\r\n" in written  # the terminal's own \n -> \r\n


def test_terminal_shows_progress() -> None:
    written = _on_terminal(load="progress")
    assert "compiling kernels" in written
    assert "12/12" in written
    assert "5.00 GiB of 5.00 GiB" in written
    assert "GB/s" in written
    assert written.index("compiling kernels") < written.index("loading") < written.index("Hello you")
