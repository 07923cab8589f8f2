"""How each side of the comparison is run: llama-bench, and a process that serves measurements of strata-jit.

Owns: the two commands, their protocols, and what counts as one sample. Knows nothing about rounds or
reports.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from llama_cpp import Build

ROOT = Path(__file__).resolve().parents[1]
TRIES = 5  # a greedy continuation of random tokens may end early; another prompt is tried then


class BenchError(Exception):
    """A side could not be measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `prompt` tokens at once; `tokens` single steps after `depth` tokens."""

    model: Path
    prompt: int
    tokens: int
    depth: int

    @property
    def context(self) -> int:
        return max(self.prompt, self.depth + self.tokens) + 8

    @property
    def tests(self) -> dict[str, str]:
        return {"pp": f"prompt {self.prompt}", "tg": f"decode {self.tokens}"}


def llama_command(build: Build, plan: Plan, threads: int, test: str) -> list[str]:
    """One llama-bench run of one repetition; all that is not named is llama-bench's default."""
    sizes = ["-p", str(plan.prompt), "-n", "0"]
    if test == "tg":
        sizes = ["-p", "0", "-n", str(plan.tokens), "-d", str(plan.depth)]
    fixed = ["-r", "1", "-t", str(threads), "-lm", "mmap", "-ngl", "0", "-o", "json"]
    return [build.bench, "-m", str(plan.model), *fixed, *sizes]


def measure_llama(build: Build, plan: Plan, threads: int, test: str) -> float:
    command = llama_command(build, plan, threads, test)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise BenchError(f"exit status {done.returncode} of {shlex.join(command)}: {last}")
    (result,) = json.loads(done.stdout)
    return float(result["samples_ts"][0])


def random_ids(model: Any, rng: random.Random, n: int) -> list[int]:
    """`n` random ordinary tokens."""
    tokenizer = model.tokenizer
    ids: list[int] = []
    while len(ids) < n:
        token = rng.randrange(tokenizer.n_vocab)
        if not tokenizer.is_control(token):
            ids.append(token)
    return ids


def measure_one(model: Any, rng: random.Random, n_prompt: int, n_decode: int) -> Any:
    """Result of generating 1 + `n_decode` tokens (the first one ends the prompt, the others are steps)."""
    for _ in range(TRIES):
        generation = model.generate(random_ids(model, rng, n_prompt), max_tokens=1 + n_decode)
        for _piece in generation:
            pass
        if generation.result.generated_tokens == 1 + n_decode:
            return generation.result
    raise BenchError(f"{TRIES} continuations of random tokens all ended before {1 + n_decode} tokens")


def plain(value: Any) -> Any:
    """What JSON has no form for: records and read-only mappings as objects, the rest as text."""
    if is_dataclass(value):
        return {entry.name: getattr(value, entry.name) for entry in fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


def serve(plan: Plan, threads: int) -> None:
    """Loads the model, answers each line "pp" or "tg" on stdin with a JSON line, ends with stdin."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints must not mix with the replies

    import strata_jit

    rng = random.Random(threads)
    with strata_jit.load(plan.model, workers=threads - 1, ctx=plan.context) as model:
        print(json.dumps(model.info, default=plain), file=replies)
        measure_one(model, rng, plan.prompt, 1)  # as llama-bench does: an untimed run first
        measure_one(model, rng, plan.depth, 1)
        for line in sys.stdin:
            if line.strip() == "pp":
                rate = measure_one(model, rng, plan.prompt, 0).prompt_tok_s
            else:
                rate = measure_one(model, rng, plan.depth, plan.tokens).decode_tok_s
            print(json.dumps(rate), file=replies)


class Ours:
    """The serving process of one number of threads. A context manager: the process ends with it."""

    def __init__(self, plan: Plan, threads: int) -> None:
        numbers = (threads, plan.prompt, plan.tokens, plan.depth)
        command = [sys.executable, __file__, str(plan.model), *map(str, numbers)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.info: dict[str, Any] = self.reply()
        if self.info.get("threads") != threads:
            self.close()
            raise BenchError(f"strata-jit runs {self.info.get('threads')} threads, {threads} were asked for")

    def reply(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchError(f"strata-jit's process ended with exit status {self.process.wait()}")
        return json.loads(line)

    def measure(self, test: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(test + "\n")
        self.process.stdin.flush()
        return float(self.reply())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


if __name__ == "__main__":  # how Ours starts it
    model, threads, *sizes = sys.argv[1:]
    serve(Plan(Path(model), *map(int, sizes)), int(threads))
