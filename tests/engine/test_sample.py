"""Choosing tokens: every option at its edges, reproducible draws, the right distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_jit.engine.sample import Sampler, Sampling
from strata_jit.errors import StrataError, UsageError

Logits = NDArray[np.float32]


def logits(*values: float) -> Logits:
    return np.array(values, np.float32)


def of_probabilities(*values: float) -> Logits:
    return np.log(np.array(values)).astype(np.float32)


def drawn(values: Logits, n: int = 300, history: tuple[int, ...] = (), **options: Any) -> set[int]:
    sampler = Sampler(Sampling(**{"temp": 1.0, "seed": 7, **options}))
    return {sampler.next(values, history) for _ in range(n)}


P = of_probabilities(0.1, 0.4, 0.05, 0.3, 0.15)


def test_greedy_takes_best_and_lowest_id_of_equals() -> None:
    sampler = Sampler(Sampling())
    assert sampler.next(logits(1, 3, 2)) == 1
    assert sampler.next(logits(1, 3, 3, 3)) == 1
    assert sampler.next(logits(-math.inf, -5)) == 1
    assert Sampling().is_greedy and not Sampling(temp=0.1).is_greedy


def test_logits_are_left_as_they_are() -> None:
    values = P.copy()
    Sampler(Sampling(temp=0.5, top_k=3, top_p=0.9, min_p=0.01, repeat_penalty=2, seed=1)).next(values, [1, 2])
    np.testing.assert_array_equal(values, P)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.0}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"min_p": 0.76}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.5}, {1, 3}),  # 0.4 / 0.85 < 0.5
        ({"top_k": 2, "top_p": 0.5}, {1}),  # 0.4 / 0.7 > 0.5
        ({"top_k": 4, "min_p": 0.3}, {1, 3, 4}),
        ({"top_p": 0.9, "min_p": 0.5}, {1, 3}),
        ({"temp": 1e-6}, {1}),
        ({"temp": 1e-300}, {1}),
        ({"temp": 100.0, "top_k": 2}, {1, 3}),
        ({"temp": 100.0, "top_p": 0.69}, {1, 3}),  # judged before the temperature
        ({"temp": 0.3, "min_p": 0.7, "top_k": 5}, {1, 3}),
    ],
)
def test_candidates(options: dict[str, Any], expected: set[int]) -> None:
    assert drawn(P, **options) == expected


def test_ties_at_the_bound_of_top_k_go_to_low_ids() -> None:
    assert drawn(logits(1, 2, 1, 1), top_k=2) == {0, 1}
    assert drawn(logits(1, 1, 1, 1), top_k=3) == {0, 1, 2}
    assert drawn(logits(1, 1, 1, 1), top_p=0.5) == {0, 1}


def test_excluded_tokens_are_never_drawn() -> None:
    values = logits(-math.inf, 0, -math.inf, 0)
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}):
        assert drawn(values, **options) == {1, 3}


def test_one_token() -> None:
    assert drawn(logits(-3), top_k=1, top_p=0.5, min_p=0.5) == {0}


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.97}, {"min_p": 0.02}])
def test_distribution(options: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(temp=0.7, seed=11, **options))
    n = 20_000
    counts = np.bincount([sampler.next(P) for _ in range(n)], minlength=5)
    kept = np.ones(5) if options != {"top_k": 4} else np.array([1, 1, 0, 1, 1])
    weights = np.exp(P.astype(np.float64) / 0.7) * kept
    expected = weights / weights.sum()
    np.testing.assert_allclose(counts / n, expected, atol=4 * math.sqrt(0.25 / n))


def test_seed_makes_draws_reproducible() -> None:
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    first, second, other = (Sampler(Sampling(temp=1.0, seed=seed)) for seed in (5, 5, 6))
    runs = [[sampler.next(values) for _ in range(50)] for sampler in (first, second, other)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_seed_drawn_at_random_is_told() -> None:
    sampler = Sampler(Sampling(temp=1.0))
    assert sampler.seed != Sampler(Sampling(temp=1.0)).seed
    again = Sampler(Sampling(temp=1.0, seed=sampler.seed))
    values = np.zeros(1000, np.float32)
    assert [sampler.next(values) for _ in range(9)] == [again.next(values) for _ in range(9)]


def test_draw_is_the_documented_one() -> None:
    values = np.random.default_rng(4).standard_normal(500).astype(np.float32)
    rng = np.random.Generator(np.random.PCG64(9))
    sums = np.cumsum(np.exp((values.astype(np.float64) - values.max()) / 0.9))
    expected = [int(np.searchsorted(sums, rng.random() * sums[-1], side="right")) for _ in range(20)]
    sampler = Sampler(Sampling(temp=0.9, seed=9))
    assert [sampler.next(values) for _ in range(20)] == expected


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_nucleus_of_large_vocabulary_matches_full_sort(top_p: float, scale: float) -> None:
    values = (np.random.default_rng(5).standard_normal(5000) * scale).astype(np.float32)
    order = np.lexsort((np.arange(5000), -values))
    probabilities = np.exp(values[order].astype(np.float64) - values.max())
    sums = np.cumsum(probabilities) / probabilities.sum()
    kept = set(order[: int(np.searchsorted(sums, top_p)) + 1].tolist())
    found = drawn(values, n=200, top_p=top_p, temp=100.0)
    assert found <= kept
    if len(kept) < 20:
        assert found == kept


@pytest.mark.parametrize(
    ("options", "history", "expected"),
    [
        ({"repeat_penalty": 1.0}, (0,), 0),
        ({"repeat_penalty": 2.0}, (), 0),
        ({"repeat_penalty": 2.0}, (0,), 1),  # 4 / 2 < 3
        ({"repeat_penalty": 2.0}, (0, 0, 0), 1),  # once, however often it came
        ({"repeat_penalty": 1.3}, (0, 0, 0), 0),
        ({"repeat_penalty": 0.5}, (1,), 1),  # 3 / 0.5 > 4
        ({"repeat_penalty": 2.0, "repeat_last_n": 0}, (0,), 0),
        ({"repeat_penalty": 2.0, "repeat_last_n": 1}, (0, 2), 0),
        ({"repeat_penalty": 2.0, "repeat_last_n": 2}, (0, 2), 1),
        ({"repeat_penalty": 2.0, "repeat_last_n": -1}, (0, *[2] * 500), 1),
        ({"repeat_penalty": 2.0}, (0, *[2] * 64), 0),
    ],
)
def test_repeat_penalty(options: dict[str, Any], history: tuple[int, ...], expected: int) -> None:
    assert Sampler(Sampling(**options)).next(logits(4, 3, -2), history) == expected


def test_repeat_penalty_of_negative_logits() -> None:
    assert Sampler(Sampling(repeat_penalty=3.0)).next(logits(-1, -2), [0]) == 1


@pytest.mark.parametrize("values", [(math.nan, 1), (1, math.nan), (math.inf, 1), (-math.inf, -math.inf)])
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_raises_on_output_that_is_no_number(values: tuple[float, ...], temp: float) -> None:
    with pytest.raises(StrataError, match="not a number"):
        Sampler(Sampling(temp=temp)).next(logits(*values))


@pytest.mark.parametrize(
    "options",
    [
        {"temp": -0.1},
        {"temp": math.nan},
        {"temp": math.inf},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repeat_penalty": 0.0},
        {"repeat_penalty": -1.0},
        {"repeat_penalty": math.inf},
        {"repeat_last_n": -2},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_raises_on_option_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        Sampling(**options)


def test_largest_seed() -> None:
    assert Sampler(Sampling(temp=1.0, seed=2**64 - 1)).next(logits(0, 1)) in (0, 1)
