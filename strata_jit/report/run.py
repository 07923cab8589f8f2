"""What people and programs see of a run: progress bars, the closing tables, the JSON document, safe text.

Owns all output forms of a run; knows neither options nor how anything was measured. Progress,
tables and messages go to stderr, results to stdout.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.progress import TimeRemainingColumn as EtaColumn
from rich.table import Table
from rich.text import Text

from strata_jit import __version__
from strata_jit.engine.results import GenerationResult, ModelInfo, NodeInfo
from strata_jit.errors import one_line
from strata_jit.units import format_bytes, format_rate, format_seconds, format_tok_per_s

# fmt: off
JSON_KEYS = (
    "text", "prompt_tokens", "generated_tokens", "token_ids", "stop_reason",
    "prompt_tok_s", "decode_tok_s", "ttft_s", "load_s", "compile_s", "wait_us_per_token",
    "weight_bytes_per_token", "workers", "threads", "split", "nodes", "kernels", "output_sha256",
    "model", "versions", "seed",
)
# fmt: on
_DEPENDENCIES = ("numba", "llvmlite", "numpy", "tokenizers", "jinja2")
_COMPILE = "compile"
# Wide enough that no CPU list wraps in a file; a terminal gives its own width.
_PLAIN_WIDTH = 120


class OutputClosed(Exception):
    """The reader of stdout has gone, as `head` does: nothing more to say, and nothing to complain of."""


# --- stdout ------------------------------------------------------------------------------------------------


class TextOutput:
    """Model text on stdout, each piece as it comes.

    To a file or pipe the text goes unchanged, in UTF-8. On a terminal, control characters other than newline
    and tab are shown as symbols (ESC as U+241B), since what a model writes must not move the cursor, set the
    title or paste: carriage returns are left out.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._terminal = file.isatty()
        self._at_line_start = True
        if isinstance(file, io.TextIOWrapper):
            # A terminal keeps its encoding, and must not fail over a character that it lacks.
            file.reconfigure(encoding=file.encoding if self._terminal else "utf-8", errors="replace")

    def write(self, piece: str) -> None:
        """Write and flush. Raises OutputClosed if nobody reads any more, OSError on any other failure."""
        self.write_own(terminal_text(piece) if self._terminal else piece)

    def write_own(self, text: str) -> None:
        """`write` without a look at control characters: for text that this program styled itself."""
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        try:
            self._file.write(text)
            self._file.flush()
        except BrokenPipeError:
            abandon(self._file)
            raise OutputClosed from None
        except OSError:
            abandon(self._file)
            raise

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None if it is none."""
        return shutil.get_terminal_size().columns if self._terminal else None

    def end_line(self) -> None:
        """A newline, unless the text so far is empty or ends with one."""
        if not self._at_line_start:
            self.write("\n")


def terminal_text(text: str) -> str:
    """`text` without any character that a terminal would obey, newline and tab excepted."""
    return text.translate(_TERMINAL)


def _terminal_table() -> dict[int, int | None]:
    table: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20)}
    table.update(dict.fromkeys(range(0x80, 0xA0), 0xFFFD))
    table[0x7F] = 0x2421
    table[ord("\r")] = None
    del table[ord("\n")], table[ord("\t")]
    return table


_TERMINAL = _terminal_table()


def abandon(file: TextIO) -> None:
    """Point a stream that failed at nothing, so that the interpreter's flush at exit cannot fail again."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor is not flushed to one
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file.fileno())
        os.close(null)


# --- stderr ------------------------------------------------------------------------------------------------


def print_message(kind: str, text: str) -> None:
    """One line on stderr: `kind: text`, whatever characters a file's names brought into it."""
    if sys.stderr is not None:
        sys.stderr.write(f"{kind}: {one_line(text)}\n")
        sys.stderr.flush()


def print_warnings(info: ModelInfo) -> None:
    """A line on stderr for each of the model's warnings."""
    print_messages("warning", info.warnings)


def print_messages(kind: str, texts: Sequence[str]) -> None:
    """A line on stderr for each text."""
    for text in texts:
        print_message(kind, text)


def print_skipped(rank: int, count: int) -> None:
    """A line on stderr: how much of the model a lossy run left out."""
    print_message("lossy", f"{count} choices of experts at rank {rank} or later were left out of this run")


def print_timing(
    before: Mapping[str, float], after: Mapping[str, float], result: GenerationResult | None
) -> None:
    """A line on stderr: where the time of a run went, by kind of operation, longest first."""
    spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()}
    kinds = sorted(spent, key=lambda kind: -spent[kind])
    parts = [f"{kind} {format_seconds(spent[kind])}" for kind in kinds]
    if result is not None:
        parts.insert(0, f"{result.prompt_tokens} + {result.generated_tokens} tokens")
    print_message("timing", ", ".join(parts))


def _console() -> Console:
    file = sys.stderr if sys.stderr is not None else io.StringIO()
    terminal = file.isatty()
    width = None if terminal else _PLAIN_WIDTH
    return Console(file=file, force_terminal=terminal, width=width, highlight=False)


class _SizeColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{format_bytes(task.completed)} of {format_bytes(task.total or 0)}")


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(format_rate(task.speed or 0.0))


class LoadProgress:
    """Bars for compiling and loading; call it as `progress(stage, done, total)`. Silent without a terminal.

    stage "compile" counts kernels, other stages bytes. Use as a context manager: leaving it clears the bar.
    """

    def __init__(self) -> None:
        self._console = _console()
        self._stage: str | None = None
        self._bars: Progress | None = None

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._console.is_terminal:
            return
        if stage != self._stage or self._bars is None:
            self._stop()
            self._stage, self._bars = stage, self._start(stage)
        self._bars.update(self._bars.task_ids[0], completed=done, total=total)

    def _start(self, stage: str) -> Progress:
        compiling = stage == _COMPILE
        figures: list[ProgressColumn] = (
            [MofNCompleteColumn()] if compiling else [_SizeColumn(), _RateColumn(), EtaColumn()]
        )
        label = "compiling kernels" if compiling else "loading" if stage == "load" else stage
        bars = Progress(
            TextColumn("{task.description}"), BarColumn(), *figures, console=self._console, transient=True
        )
        bars.add_task(label, total=None)
        bars.start()
        return bars

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = None


def print_summary(info: ModelInfo, result: GenerationResult) -> None:
    """The closing tables on stderr: nodes, then the figures of the run."""
    console = _console()
    nodes = Table("node", "workers", "CPUs", "weights")
    for node in info.nodes:
        nodes.add_row(str(node.node), str(node.workers), _cpus_text(node), format_bytes(node.bytes))
    figures = Table(show_header=False)
    for label, value in _figures(info, result):
        figures.add_row(label, Text(value))
    console.print(Text(f"{info.arch} on {_split_text(info)}"), nodes, figures)


def _split_text(info: ModelInfo) -> str:
    count = f"{len(info.nodes)} node{'' if len(info.nodes) == 1 else 's'}"
    threads = f"{info.threads} thread{'' if info.threads == 1 else 's'}"
    return f"{count}, {threads} (split {'on' if info.split_on else 'off'}: {one_line(info.split_reason)})"


def _cpus_text(node: NodeInfo) -> str:
    return cpulist(node.cpus) if node.cpus else "not pinned"


def cpulist(cpus: tuple[int, ...]) -> str:
    """CPU numbers in Linux's form, such as "0-7,16"."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _figures(info: ModelInfo, result: GenerationResult) -> list[tuple[str, str]]:
    weights_rate = None
    if result.decode_tok_s is not None:
        weights_rate = result.decode_tok_s * info.weight_bytes_per_token
    wait_us = result.wait_us_per_token
    return [
        ("compile", format_seconds(info.compile_s)),
        ("load", format_seconds(info.load_s)),
        ("prompt", f"{result.prompt_tokens} tokens, {_shown(result.prompt_tok_s, format_tok_per_s)}"),
        ("decode", f"{result.generated_tokens} tokens, {_shown(result.decode_tok_s, format_tok_per_s)}"),
        ("weights read", _shown(weights_rate, format_rate)),
        ("time to first token", _shown(result.ttft_s, format_seconds)),
        ("lost in waiting", "not measured" if wait_us is None else f"{wait_us:.1f} us/token"),
        ("stopped by", result.stop_reason),
    ]


def _shown(figure: float | None, form: Any) -> str:
    return "not measured" if figure is None else str(form(figure))


# --- JSON --------------------------------------------------------------------------------------------------


def json_document(path: str, info: ModelInfo | None, result: GenerationResult | None) -> str:
    """The run as one line of JSON with the keys `JSON_KEYS`, always all of them.

    An interrupt may come before there is a model or a result: then what is not known is null.
    """
    values: dict[str, Any] = dict.fromkeys(JSON_KEYS)
    values["stop_reason"] = "interrupted"
    values["model"] = {"path": path, "arch": None, "types": None}
    values["versions"] = versions()
    if info is not None:
        values.update(info_values(info))
    if result is not None:
        values.update(_result_values(result))
    return json.dumps(values, allow_nan=False) + "\n"


def token_ids_sha256(token_ids: tuple[int, ...]) -> str:
    """SHA-256, in hex, of the ids as little-endian int32."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).hexdigest()


def _result_values(result: GenerationResult) -> dict[str, Any]:
    return asdict(result) | {"output_sha256": token_ids_sha256(result.token_ids)}


def kernel_listing(info: ModelInfo, as_json: bool) -> str:
    """The kernels as a JSON document, or as a line for each operation, its variant after a tab."""
    if as_json:
        return json.dumps({"kernels": [asdict(use) for use in info.kernels]}) + "\n"
    return "".join(f"{use.op}\t{use.variant}\n" for use in info.kernels)


def info_values(info: ModelInfo) -> dict[str, Any]:
    """The keys of a document that tell of the loaded model."""
    return {
        "load_s": info.load_s,
        "compile_s": info.compile_s,
        "weight_bytes_per_token": info.weight_bytes_per_token,
        "workers": info.workers,
        "threads": info.threads,
        "split": {"on": info.split_on, "reason": info.split_reason},
        "nodes": [asdict(node) for node in info.nodes],
        "kernels": [asdict(use) for use in info.kernels],
        "model": {"path": info.path, "arch": info.arch, "types": dict(info.types)},
    }


def versions() -> dict[str, str]:
    """Of the package, Python and what it computes with."""
    own = {"strata_jit": __version__, "python": platform.python_version()}
    return own | {name: metadata.version(name) for name in _DEPENDENCIES}
