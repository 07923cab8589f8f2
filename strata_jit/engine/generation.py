"""One generation: an iterator of text pieces that knows, at its end, how it went."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from strata_jit.engine.results import GenerationResult, StopReason
from strata_jit.engine.sample import Sampler, Sampling
from strata_jit.engine.steps import Stepper
from strata_jit.gguf.stream import StreamDecoder
from strata_jit.gguf.tokenizer import Tokenizer


class Generation(Iterator[str]):
    """Text as the model writes it, in pieces of whole characters.

    `result` is there once the iterator has ended, was closed or was interrupted: an interrupt is raised on to
    the caller, and what was written until then stays in `result`.
    """

    def __init__(
        self,
        stepper: Stepper,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        max_tokens: int,
        n_ctx: int,
        sampling: Sampling,
        wait_ns: Callable[[], float],
    ) -> None:
        self._stepper, self._tokenizer = stepper, tokenizer
        self._prompt = list(prompt)
        self._history = list(prompt)
        self._max_tokens = max_tokens
        self._n_ctx = n_ctx
        self._sampler = Sampler(sampling)
        self._wait_ns = wait_ns
        self._ids: list[int] = []
        self._text: list[str] = []
        self._sampling = sampling
        self._prompt_s = self._decode_s = self._ttft_s = self._waited_ns = 0.0
        self._steps = 0
        self._pieces = self._run()
        self.result: GenerationResult | None = None

    def __next__(self) -> str:
        try:
            for piece in self._pieces:
                if piece:
                    self._text.append(piece)
                    return piece
        except BaseException:
            self._finish("interrupted")
            raise
        raise StopIteration

    def close(self) -> None:
        """End early; `result` says "interrupted" unless the generation had ended before."""
        self._pieces.close()
        self._finish("interrupted")

    def _run(self) -> Generator[str, None, None]:
        """Pieces; the decode loop."""
        decoder = StreamDecoder(self._tokenizer)
        reason: StopReason = "length"
        if self._max_tokens > 0:
            self._stepper.begin(self)
            begin = time.perf_counter()
            logits = self._stepper.prompt(self._prompt)
            self._prompt_s = time.perf_counter() - begin
        while len(self._ids) < self._max_tokens:
            begin = time.perf_counter()
            token = self._sampler.next(logits, self._history)
            self._account(begin)
            if token in self._tokenizer.eog_ids:
                reason = "eos"
                break
            self._ids.append(token)
            self._history.append(token)
            yield decoder.push(token)
            position = len(self._prompt) + len(self._ids) - 1
            if len(self._ids) == self._max_tokens:
                break
            if position >= self._n_ctx:
                reason = "context"
                break
            logits = self._decode(token, position)
        yield decoder.flush()
        self._finish(reason)

    def _account(self, begin: float) -> None:
        """Book the time since `begin`: the first token belongs to the prompt, later ones to decoding."""
        elapsed = time.perf_counter() - begin
        if self._ids:
            self._decode_s += elapsed
        else:
            self._ttft_s = self._prompt_s + elapsed

    def _decode(self, token: int, position: int) -> NDArray[np.float32]:
        """One decoding step. Time that the caller takes between two pieces is not counted."""
        self._stepper.check(self)
        begin, waited = time.perf_counter(), self._wait_ns()
        logits: NDArray[np.float32] = self._stepper.step([token], position, [0])[0]
        self._waited_ns += self._wait_ns() - waited
        self._steps += 1
        self._account(begin)
        return logits

    def _finish(self, reason: StopReason) -> None:
        if self.result is not None:
            return
        self.result = GenerationResult(
            text="".join(self._text),
            prompt_tokens=len(self._prompt),
            generated_tokens=len(self._ids),
            token_ids=tuple(self._ids),
            stop_reason=reason,
            prompt_tok_s=len(self._prompt) / self._prompt_s if self._prompt_s else None,
            decode_tok_s=self._steps / self._decode_s if self._steps else None,
            ttft_s=self._ttft_s if self._ids else None,
            wait_us_per_token=self._waited_ns / 1e3 / self._steps if self._steps else None,
            seed=self._sampler.seed if self._sampling.temp > 0 else None,
        )
