"""One generation: an iterator of text pieces that knows, at its end, how it went."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence

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
        self._started = self._first_at = self._last_at = self._prompt_s = 0.0
        self._waited = 0.0
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
        self._started = self._first_at = self._last_at = time.perf_counter()
        reason: StopReason = "length"
        if self._max_tokens > 0:
            logits = self._stepper.prompt(self._prompt)
            self._prompt_s = time.perf_counter() - self._started
            before = self._wait_ns()
        while len(self._ids) < self._max_tokens:
            token = self._sampler.next(logits, self._history)
            if token in self._tokenizer.eog_ids:
                reason = "eos"
                break
            self._ids.append(token)
            self._history.append(token)
            self._last_at = time.perf_counter()
            if len(self._ids) == 1:
                self._first_at = self._last_at
            yield decoder.push(token)
            position = len(self._prompt) + len(self._ids) - 1
            if len(self._ids) == self._max_tokens:
                break
            if position >= self._n_ctx:
                reason = "context"
                break
            logits = self._stepper.step([token], position, [0])[0]
            self._waited = self._wait_ns() - before
        yield decoder.flush()
        self._finish(reason)

    def _finish(self, reason: StopReason) -> None:
        if self.result is not None:
            return
        n = len(self._ids)
        decode_s = self._last_at - self._first_at
        steps = max(n - 1, 0)
        self.result = GenerationResult(
            text="".join(self._text),
            prompt_tokens=len(self._prompt),
            generated_tokens=n,
            token_ids=tuple(self._ids),
            stop_reason=reason,
            prompt_tok_s=len(self._prompt) / self._prompt_s if self._prompt_s else None,
            decode_tok_s=steps / decode_s if steps and decode_s else None,
            ttft_s=self._first_at - self._started if n else None,
            wait_us_per_token=self._waited / 1e3 / steps if steps else None,
        )
