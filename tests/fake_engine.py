"""An engine without a model: what `strata-jit decode` calls, with the answers in a script.

`install(script, assign)` puts it in place of the real one. Run as a program, it is the command with the
script in the environment variable FAKE_ENGINE, so that signals and pipes can be tried on a real process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import strata_jit
import strata_jit.engine.prompt
import strata_jit.gguf.reader
import strata_jit.gguf.tokenizer
from strata_jit.engine.results import GenerationResult, KernelUse, ModelInfo, NodeInfo
from strata_jit.errors import NodeDied

PROMPT_IDS = [5, 6, 7]
N_CTX_TRAIN = 64
CHAT_TEMPLATE = "{{ messages }}"


@dataclass
class Script:
    """What happens. `pieces` are text; "!interrupt", "!signal", "!die", "!wait" and "!oserror" are events."""

    pieces: list[str] = field(default_factory=lambda: ["Hel", "lo", " you"])
    load: str = ""
    """"interrupt" raises in load; "progress" reports both stages."""
    warnings: list[str] = field(default_factory=list)
    pinned: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of the file, beside what a context needs."""
    calls: list[tuple[str, Any]] = field(default_factory=list)


class FakeGeneration:
    """Yields the script's pieces, one token each; `result` as the engine's generation has it."""

    def __init__(self, script: Script, n_prompt: int) -> None:
        self._script, self._n_prompt = script, n_prompt
        self._texts: list[str] = []
        self._done = False
        self._steps = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._steps

    def _run(self) -> Iterator[str]:
        for piece in self._script.pieces:
            if piece.startswith("!"):
                _event(piece[1:])
            else:
                self._texts.append(piece)
                yield piece
        self._done = True

    def close(self) -> None:
        self._script.calls.append(("close_generation", None))

    @property
    def result(self) -> GenerationResult:
        ids = tuple(range(100, 100 + len(self._texts)))
        return GenerationResult(
            text="".join(self._texts),
            prompt_tokens=self._n_prompt,
            generated_tokens=len(ids),
            token_ids=ids,
            stop_reason="eos" if self._done else "interrupted",
            prompt_tok_s=123.4,
            decode_tok_s=45.6 if len(ids) > 1 else None,
            ttft_s=0.25,
            wait_us_per_token=7.5,
        )


def _event(name: str) -> None:
    if name == "interrupt":
        raise KeyboardInterrupt
    if name == "signal":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    if name == "die":
        raise NodeDied(1, "SIGKILL")
    if name == "wait":
        time.sleep(30)
    if name == "oserror":
        raise OSError(5, "Input/output error", "part-2.gguf")


class FakeModel:
    """A model that is loaded at once; every call is noted in the script."""

    def __init__(self, script: Script, path: str) -> None:
        self._script, self._path = script, path
        self._asked = 0

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._script.calls.append(("close_model", None))

    @property
    def info(self) -> ModelInfo:
        cpus = ((0, 1), (4,)) if self._script.pinned else ((), ())
        return ModelInfo(
            path=self._path,
            arch="llama",
            types={"IQ4_XS": 10, "F32": 3},
            load_s=1.5,
            compile_s=0.5,
            weight_bytes_per_token=2_000_000_000,
            workers=2,
            threads=3,
            split_on=True,
            split_reason="test",
            nodes=(
                NodeInfo(0, 1, cpus[0], 3 << 30, None, "unknown"),
                NodeInfo(1, 1, cpus[1], 1 << 30, 1.0, "all"),
            ),
            kernels=(KernelUse("attention", "avx2"), KernelUse("head Q6_K", "portable")),
            warnings=tuple(self._script.warnings),
        )

    def experts_skipped(self) -> int:
        return 12

    def op_seconds(self) -> dict[str, float]:
        """Of two calls the second is later by 0.25 and 2.5 s."""
        self._asked += 1
        return {"attention": 0.25 * self._asked, "linear": 2.5 * self._asked}

    def generate(self, ids: list[int], **given: Any) -> FakeGeneration:
        self._script.calls.append(("generate", {"ids": ids, **given}))
        return FakeGeneration(self._script, len(ids))


class _Tokenizer:
    forced: str | None = None
    force = False


TOKENIZER = _Tokenizer()
"""The one that the command must build once and pass on."""


class FakeTokenizer:
    """Builds it."""

    @staticmethod
    def from_gguf(gguf: object, force: bool) -> object:
        TOKENIZER.force = force
        return TOKENIZER


@dataclass(frozen=True)
class FakeGGUF:
    """A model file, as far as it is read."""

    path: str
    metadata: dict[str, Any]
    tensors: tuple[str, ...] = ("token_embd.weight",)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        known = {
            "general.architecture": "llama",
            "llama.context_length": N_CTX_TRAIN,
            "tokenizer.chat_template": CHAT_TEMPLATE,
        }
        return (known | self.metadata).get(key, default)


def install(script: Script, assign: Callable[[Any, str, Any], None]) -> None:
    """Replace what the command calls, by `assign(module, name, value)`."""

    def load(
        path: str, *, on_progress: Callable[[str, int, int], None], tokenizer: object, **given: Any
    ) -> FakeModel:
        assert tokenizer in (TOKENIZER, None)
        script.calls.append(("load", {"path": path, **given}))
        if script.load == "interrupt":
            raise KeyboardInterrupt
        if script.load == "progress":
            for stage, total in (("compile", 12), ("load", 5 << 30)):
                for step in range(4):
                    on_progress(stage, step * total // 3, total)
                    time.sleep(0.15)
        return FakeModel(script, path)

    def encode_prompt(
        gguf: FakeGGUF, text: str, system: str | None, raw: bool, tokenizer: object, think: bool | None
    ) -> list[int]:
        assert tokenizer is TOKENIZER
        given = {"path": gguf.path, "text": text, "system": system, "raw": raw, "think": think}
        script.calls.append(("encode", given))
        return list(PROMPT_IDS)

    assign(strata_jit, "load", load)
    assign(strata_jit.engine.prompt, "encode_prompt", encode_prompt)
    assign(strata_jit.gguf.reader, "open_gguf", lambda path: FakeGGUF(path, script.metadata))
    assign(strata_jit.gguf.tokenizer, "Tokenizer", FakeTokenizer)


if __name__ == "__main__":
    from strata_jit.cli import main

    known = {one.name for one in dataclasses.fields(Script)}
    scripted = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
    assert set(scripted) <= known
    install(Script(**scripted), setattr)
    main(prog_name="strata-jit")
