"""How well a model predicts a text, and how far its predictions are from a base model's.

Owns the cut of the text into windows, what is scored, and the figures; runs no step. All is as in llama.cpp's
tools/perplexity/perplexity.cpp, so that figures can be compared. The text, its control tokens taken as text,
is cut into windows of n_ctx tokens; what is left over is not used. Each window starts from an empty context,
with the begin-of-text token in place of its first one where the model's prompts begin with that. The tokens
of its second half are scored, from place n_ctx // 2 + 1 on.

Distributions are computed in float64. NumPy's `exp` may differ in its last bit from CPU to CPU.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_jit.engine.kl_file import BaseHeader, BaseReader, BaseWriter, Kept, keep
from strata_jit.errors import StrataError, UsageError
from strata_jit.gguf.tokenizer import Tokenizer

DEFAULT_WINDOW = 512
_MIN_WINDOW = 4
_MIN_P = 1e-300

OnWindow = Callable[[int, int, float], None]
"""Called as on_window(done, total, perplexity so far) after each window."""
WindowLogits = Callable[[Sequence[int], int], Iterable[NDArray[np.float32]]]
"""(tokens, first) -> logits after tokens[first], tokens[first + 1], ..., float32[m, n_vocab] at a time."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """From a base model's distributions (P) to this model's (Q), over the scored positions; in nats."""

    kl: NDArray[np.float64]
    """KL(P || Q) at each position, float64[n_scored]; see `kl_file` for its precision."""
    same_top: float
    """Share of the positions where both find the same token the likeliest."""
    base_nll: float
    """The base model's mean negative log-likelihood of the same tokens."""

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def mean_stderr(self) -> float:
        return _standard_error(self.kl)

    @property
    def median(self) -> float:
        return float(np.median(self.kl))

    @property
    def max(self) -> float:
        return float(self.kl.max())


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """How well a model predicted a text."""

    n_tokens: int
    """Of the whole text."""
    n_ctx: int
    n_windows: int
    token_ids: NDArray[np.int32]
    """The scored tokens, int32[n_scored]."""
    positions: NDArray[np.int64]
    """Their places in the text, from 0; int64[n_scored]."""
    token_nll: NDArray[np.float64]
    """Negative log-likelihood of each, in nats; float64[n_scored]."""
    divergence: Divergence | None
    """None where no base was given."""

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood, nats a token."""
        return float(self.token_nll.mean())

    @property
    def nll_stderr(self) -> float:
        """Its standard error."""
        return _standard_error(self.token_nll)

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return _exp(self.nll)

    @property
    def perplexity_stderr(self) -> float:
        """perplexity * nll_stderr, to first order."""
        return self.perplexity * self.nll_stderr


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text that is to be scored: the names of control tokens are text like any other."""
    return tokenizer.encode(text, special=False, bos=tokenizer.add_bos)


def windows_of(ids: Sequence[int], n_ctx: int) -> NDArray[np.int32]:
    """The windows of a text, int32[n_windows, n_ctx]. UsageError if there is none."""
    if n_ctx < _MIN_WINDOW:
        raise UsageError(f"ctx: found {n_ctx}, expected a window of {_MIN_WINDOW} or more tokens")
    n_windows = len(ids) // n_ctx
    if not n_windows:
        raise UsageError(
            f"the text has {len(ids)} tokens, a window {n_ctx}: give a longer text or a smaller --ctx"
        )
    return np.array(ids[: n_windows * n_ctx], np.int32).reshape(n_windows, n_ctx)


def base_header(tokenizer: Tokenizer, windows: NDArray[np.int32]) -> BaseHeader:
    """What distributions over these windows are about."""
    return BaseHeader(tokenizer.n_vocab, tokenizer.vocabulary_sha256(), windows)


def measure(
    logits_of: WindowLogits,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    n_ctx: int,
    *,
    kl_base: str | os.PathLike[str] | None = None,
    kl: str | os.PathLike[str] | None = None,
    on_window: OnWindow | None = None,
) -> PerplexityResult:
    """Score a text's tokens, window by window; see `Model.perplexity`."""
    windows = windows_of(ids, n_ctx)
    first, header = n_ctx // 2, base_header(tokenizer, windows)
    scores = _Scores()
    with contextlib.ExitStack() as stack:
        reader = None if kl is None else stack.enter_context(BaseReader(kl))
        if reader is not None:
            reader.header.check(header, reader.path)
        writer = None if kl_base is None else stack.enter_context(BaseWriter(kl_base, header))
        for i, window in enumerate(windows):
            tokens = window[:-1].tolist()
            if tokenizer.add_bos and tokenizer.bos_id is not None:
                tokens[0] = tokenizer.bos_id
            rows = (row for part in logits_of(tokens, first) for row in part)
            for row, following in zip(rows, window[first + 1 :].tolist(), strict=True):
                log_p = log_softmax(row[: tokenizer.n_vocab])
                scores.add(log_p, following, None if reader is None else reader.read())
                if writer is not None:
                    writer.write(keep(log_p, following))
            if on_window is not None:
                on_window(i + 1, len(windows), scores.perplexity())
    places = np.arange(len(windows) * n_ctx).reshape(windows.shape)[:, first + 1 :]
    return PerplexityResult(
        n_tokens=len(ids),
        n_ctx=n_ctx,
        n_windows=len(windows),
        token_ids=windows[:, first + 1 :].reshape(-1),
        positions=places.reshape(-1),
        token_nll=np.array(scores.nll),
        divergence=None if reader is None else scores.divergence(),
    )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities, float64[n_vocab]."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= math.log(np.exp(wide).sum())
    return wide


def divergence_from(base: Kept, log_p: NDArray[np.float64]) -> float:
    """KL(base || model) in nats; the tokens that the base's record does not name count as one."""
    log_base = base.log_p.astype(np.float64)
    kl = float((np.exp(log_base) * (log_base - log_p[base.ids])).sum())
    if base.log_rest > -math.inf:
        others = np.ones(len(log_p), bool)
        others[base.ids] = False
        rest = max(float(np.exp(log_p[others]).sum()), _MIN_P)
        kl += math.exp(base.log_rest) * (base.log_rest - math.log(rest))
    return max(kl, 0.0)  # rounding may take equal distributions below 0


class _Scores:
    """What has been scored so far."""

    def __init__(self) -> None:
        self.nll: list[float] = []
        self._sum = 0.0
        self._kl: list[float] = []
        self._base_nll: list[float] = []
        self._n_same = 0

    def add(self, log_p: NDArray[np.float64], following: int, base: Kept | None) -> None:
        nll = -float(log_p[following])
        if not math.isfinite(nll):
            raise StrataError(f"the model's output is not a number: NLL {nll} for token {following}")
        self.nll.append(nll)
        self._sum += nll
        if base is not None:
            self._kl.append(divergence_from(base, log_p))
            self._base_nll.append(-base.log_next)
            self._n_same += int(base.ids[0]) == int(log_p.argmax())

    def perplexity(self) -> float:
        return _exp(self._sum / len(self.nll))

    def divergence(self) -> Divergence:
        return Divergence(np.array(self._kl), self._n_same / len(self._kl), float(np.mean(self._base_nll)))


def _standard_error(values: NDArray[np.float64]) -> float:
    """Of their mean, as if they were independent: the root of the variance over n - 1."""
    return math.sqrt(float(values.var()) / (len(values) - 1)) if len(values) > 1 else 0.0


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf
