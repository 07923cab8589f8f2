"""Compares strata-jit with llama.cpp on one GGUF file: a prompt and decode, equal threads, interleaved.

Owns: the order of the measurements, the statistics and the report (sides.py runs the two programs). For
each number of threads our model is loaded once in a process of its own, which sleeps while llama.cpp is
measured; llama.cpp's side is one `llama-bench` run a sample (it loads by mmap from a warm page cache and
warms up by itself before its timed run). Each round measures

    llama.cpp prompt, strata-jit prompt, llama.cpp decode, strata-jit decode

so that a slow spell of the machine meets both sides. Rates are tokens/s; both sides exclude loading and
compiling. Decode starts after a prompt of `--depth` tokens; llama-bench feeds random tokens and does not
sample, ours samples greedily and feeds its own tokens. Nothing is asserted about speed: the numbers are
printed, with all samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llama_cpp import Build, BuildError, add_build_options, ensure_build
from machine import Watch, machine
from sides import BenchError, Ours, Plan, llama_command, measure_llama

SIDES = ("llama.cpp", "strata-jit")


@dataclass(slots=True)
class Cell:
    """Samples (tokens/s) of one test at one number of threads, by side, in the order measured.

    `strangers`: CPUs that other processes used during each sample; beyond some hundredths it is spoilt.
    """

    threads: int
    test: str
    samples: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    strangers: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})

    def summary(self, side: str) -> str:
        rates = self.samples[side]
        return f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})" if rates else "-"

    def ratio(self) -> float | None:
        """Median of ours over median of llama.cpp's."""
        theirs, ours = (self.samples[side] for side in SIDES)
        return statistics.median(ours) / statistics.median(theirs) if ours and theirs else None

    def paired(self) -> str:
        """Range of the ratios of neighbouring samples: how far the machine's noise moves the ratio."""
        theirs, ours = (self.samples[side] for side in SIDES)
        ratios = [o / t for o, t in zip(ours, theirs, strict=False)]
        return f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-"


def warm(path: Path) -> None:
    """Reads the file once, so that no sample waits for the disk."""
    buffer = bytearray(16 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sample(cell: Cell, side: str, ours: Ours | None, run: Callable[[], float], pause: float) -> None:
    """Takes one sample and notes what may have spoilt it."""
    time.sleep(pause)  # the other side's threads spin a moment before they sleep
    watch = Watch(ours.process.pid if ours else None)
    cell.samples[side].append(run())
    mine, strangers = watch.shares()
    cell.strangers[side].append(round(strangers, 3))
    if strangers > 0.05:
        note(f"warning: other processes used {strangers:.2f} CPUs while {side} was measured")
    if side == "llama.cpp" and mine > 0.02:
        note(f"warning: strata-jit used {mine:.2f} CPUs while llama.cpp was measured")


def measure_threads(
    build: Build | None, ours: Ours | None, plan: Plan, threads: int, args: argparse.Namespace
) -> list[Cell]:
    """All rounds at one number of threads; a cell a test."""
    cells = {test: Cell(threads, name) for test, name in plan.tests.items()}
    for i in range(args.samples):
        for test, cell in cells.items():
            if build:
                run = partial(measure_llama, build, plan, threads, test)
                sample(cell, "llama.cpp", ours, run, args.pause)
            if ours:
                sample(cell, "strata-jit", ours, partial(ours.measure, test), args.pause)
            last = ", ".join(f"{side} {rates[-1]:.2f}" for side, rates in cell.samples.items() if rates)
            note(f"threads {threads}, round {i + 1} of {args.samples}, {cell.test}: {last} tok/s")
    return list(cells.values())


def rows(cells: list[Cell]) -> list[list[str]]:
    head = ["threads", "test", *(f"{side} tok/s" for side in SIDES), "ratio", "pairs"]
    body = []
    for cell in cells:
        ratio = cell.ratio()
        shown = f"{ratio:.2f}" if ratio else "-"
        body.append([str(cell.threads), cell.test, *map(cell.summary, SIDES), shown, cell.paired()])
    return [head, *body]


def text_table(cells: list[Cell]) -> str:
    table = rows(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def markdown(cells: list[Cell], facts: dict[str, Any], samples: int) -> str:
    """The same table and its circumstances, for docs/performance.md."""
    head, *body = rows(cells)
    where, build, model = facts["machine"], facts["llama_cpp"] or {}, facts["model"]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
    versions = ", ".join(f"{name} {found}" for name, found in where["versions"].items())
    load = f"load average {where['load_before']:.2f} before the start"
    about = [
        f"Medians of {samples} (lowest-highest). Ratio: medians, strata-jit over llama.cpp. Pairs: the range",
        "of the ratios of neighbouring samples.",
        "",
        f"- {where['date']}, {where['cpu']}, {where['cpus']} CPUs, Linux {where['kernel']}, {load}",
        f"- {model['name']}, {model['bytes'] / 1e9:.2f} GB",
        f"- {versions}, Python {where['python']}",
        f"- llama.cpp {str(build.get('commit'))[:9]} ({build.get('sdist')}), {build.get('compiler')}",
        "",
        "```sh",
        facts["command"],
        *(f"# runs: {line}" for line in build.get("commands", [])),
        "```",
    ]
    return "\n".join([*lines, "", *about])


def command(args: argparse.Namespace, plan: Plan) -> str:
    """The command that takes these measurements, without paths."""
    threads = ",".join(map(str, args.threads))
    options = {"threads": threads, "samples": args.samples} | {
        name: getattr(plan, name) for name in ("prompt", "tokens", "depth")
    }
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    return f"python bench/{Path(__file__).name} {plan.model.name} {words}"


def llama_text(build: Build, plan: Plan, test: str) -> str:
    """llama-bench's command line, with T for the number of threads and without paths."""
    words = llama_command(build, plan, 0, test)
    words[words.index("-t") + 1] = "T"
    return " ".join(Path(word).name for word in words)


def compare(args: argparse.Namespace, plan: Plan) -> None:
    facts: dict[str, Any] = {
        "command": command(args, plan),
        "machine": machine(),
        "model": {"name": plan.model.name, "bytes": plan.model.stat().st_size},
        "llama_cpp": None,
        "strata_jit": {},
    }
    if facts["machine"]["load_before"] > 0.3:
        note(f"warning: the machine is busy (load average {facts['machine']['load_before']:.2f})")
    build = None
    if args.only != "strata-jit":
        build = ensure_build(args.cache, args.jobs, args.llama_version)
        facts["llama_cpp"] = asdict(build) | {"bench": Path(build.bench).name}
        facts["llama_cpp"]["commands"] = [llama_text(build, plan, test) for test in plan.tests]
    warm(plan.model)
    cells: list[Cell] = []
    for threads in args.threads:
        if args.only == "llama.cpp":
            cells += measure_threads(build, None, plan, threads, args)
            continue
        with Ours(plan, threads) as ours:
            facts["strata_jit"][str(threads)] = ours.info | {"path": plan.model.name}
            cells += measure_threads(build, ours, plan, threads, args)
    print(markdown(cells, facts, args.samples) if args.markdown else text_table(cells))
    print(json.dumps(facts | {"results": [asdict(cell) | {"ratio": cell.ratio()} for cell in cells]}))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="GGUF file that both sides read")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="e.g. 1,2 (default)")
    parser.add_argument("--samples", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens (default: 128)")
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens (default: 32)")
    parser.add_argument("--depth", type=int, default=8, help="tokens before decode (default: 8)")
    parser.add_argument(
        "--pause", type=float, default=1.0, help="seconds of rest before a sample (default: 1)"
    )
    parser.add_argument("--only", choices=SIDES, help="measure one side")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    add_build_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    try:
        compare(args, Plan(args.model.resolve(), args.prompt, args.tokens, args.depth))
    except (BenchError, BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
