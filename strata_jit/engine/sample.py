"""From logits to the next token.

Owns the choice alone; knows no model and keeps no history. The steps and their order are llama.cpp's default
chain without its rarer members (llama-sampler.cpp): repeat penalty, top-k, top-p, min-p, temperature, draw.
So top-p and min-p judge the model's own probabilities, before the temperature.

A draw is reproducible: `numpy.random.PCG64` seeded with `seed`, one `random()` a token, looked up in the
running sum in float64 over the candidates in a fixed order. NumPy's `exp` may differ in its last bit from CPU
to CPU, which can change a draw only where it falls within some 1e-16 of a boundary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_jit.errors import StrataError, UsageError

_MAX_SEED = 2**64 - 1
_FIRST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    `temp` 0 takes the best token; `top_k` the k best (0: all); `top_p` the best that together reach this
    probability (1: all); `min_p` those at least this fraction as probable as the best (0: all).
    `repeat_penalty` p divides positive logits of tokens among the last `repeat_last_n` (-1: all there are) by
    p and multiplies negative ones (1: none). `seed` None draws one at random. Raises `UsageError` for a value
    out of range.
    """

    temp: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temp, "0 or more", self.temp >= 0 and math.isfinite(self.temp))
        _check("top-k", self.top_k, "0 or more", self.top_k >= 0)
        _check("top-p", self.top_p, "from 0 to 1", 0 <= self.top_p <= 1)
        _check("min-p", self.min_p, "from 0 to 1", 0 <= self.min_p <= 1)
        penalty = self.repeat_penalty
        _check("repeat penalty", penalty, "above 0", penalty > 0 and math.isfinite(penalty))
        _check("repeat-last-n", self.repeat_last_n, "-1 or more", self.repeat_last_n >= -1)
        valid_seed = self.seed is None or 0 <= self.seed <= _MAX_SEED
        _check("seed", self.seed, f"from 0 to {_MAX_SEED}", valid_seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temp == 0


class Sampler:
    """Chooses the tokens of one generation. `seed` is the one in use, also where it was drawn at random."""

    __slots__ = ("_rng", "_sampling", "seed")

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        if sampling.seed is None:
            self.seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        else:
            self.seed = sampling.seed
        self._rng = np.random.Generator(np.random.PCG64(self.seed))

    def next(self, logits: NDArray[np.float32], history: Sequence[int] = ()) -> int:
        """The next token's id.

        `logits`: float32[n_vocab], left as they are; minus infinity excludes a token. `history`: the ids so
        far, prompt included, for the repeat penalty. Of equal logits the lowest id wins. Raises `StrataError`
        where no logit is finite or one is NaN.
        """
        sampling = self._sampling
        logits = _penalised(logits, history, sampling.repeat_penalty, sampling.repeat_last_n)
        best = int(np.argmax(logits))  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise StrataError(f"the model's output is not a number: logit {logits[best]} for token {best}")
        if sampling.is_greedy:
            return best
        ids = _candidates(logits, best, sampling)
        sums = _weights(logits if ids is None else logits[ids], logits[best], sampling.temp).cumsum()
        place = int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))
        place = min(place, len(sums) - 1)
        return place if ids is None else int(ids[place])


def _candidates(logits: NDArray[np.float32], best: int, sampling: Sampling) -> NDArray[np.int64] | None:
    """Ids of the tokens to draw from, in a fixed order; None for all."""
    top = logits[best]
    ids: NDArray[np.int64] | None = None
    if 0 < sampling.top_k < len(logits):
        ids = _best(logits, sampling.top_k)
    if sampling.top_p < 1:
        ids = _nucleus(logits, ids, top, sampling.top_p)
    if sampling.min_p > 0:
        bound = np.float32(top + math.log(sampling.min_p))
        ids = np.flatnonzero(logits >= bound) if ids is None else ids[logits[ids] >= bound]
    return ids


def _weights(logits: NDArray[np.float32], top: np.float32, temp: float = 1.0) -> NDArray[np.float64]:
    """exp((logits - top) / temp), in float64 and in one buffer."""
    weights = logits.astype(np.float64)
    weights -= top
    if temp != 1:
        weights /= temp
    return np.exp(weights, out=weights)


def _best(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` highest logits, best first, lower ids first among equals."""
    bound = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > bound)
    equal = np.flatnonzero(logits == bound)[: count - len(above)]
    ids = np.concatenate((above, equal))
    return ids[np.lexsort((ids, -logits[ids]))]


def _nucleus(
    logits: NDArray[np.float32], ids: NDArray[np.int64] | None, top: np.float32, top_p: float
) -> NDArray[np.int64]:
    """The fewest best tokens, at least one, whose probabilities reach `top_p` of those in `ids` (None: all).

    Instead of all tokens only a head is sorted, which grows until it is enough.
    """
    if ids is not None:
        weights = _weights(logits[ids], top)
        return ids[: _reaching(weights, top_p * weights.sum())]
    wanted = top_p * _weights(logits, top).sum()
    count = _FIRST_HEAD
    while True:
        head = _best(logits, min(count, len(logits)))
        kept = _reaching(_weights(logits[head], top), wanted)
        if kept < len(head) or len(head) == len(logits):
            return head[:kept]
        count *= 8


def _reaching(weights: NDArray[np.float64], wanted: float) -> int:
    """How many of the first weights together are at least `wanted`; all, where they do not reach it."""
    return min(int(np.searchsorted(np.cumsum(weights), wanted, side="left")) + 1, len(weights))


def _penalised(
    logits: NDArray[np.float32], history: Sequence[int], penalty: float, last_n: int
) -> NDArray[np.float32]:
    """The logits with tokens of the recent history made less likely; the same array where nothing changes."""
    if penalty == 1 or last_n == 0 or not len(history):
        return logits
    recent = history if last_n < 0 else history[-last_n:]
    ids = np.unique(np.asarray(recent, dtype=np.int64))
    logits = logits.copy()
    values = logits[ids]
    logits[ids] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
    return logits


def _check(name: str, value: object, expected: str, valid: bool) -> None:
    if not valid:
        raise UsageError(f"{name} is {value}, expected {expected}")
