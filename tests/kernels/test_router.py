"""The router against its twin, bit for bit; one row against many."""

import numpy as np
import pytest

from strata_jit.kernels.ref.router import route
from strata_jit.kernels.registry import (
    ROUTE_GIVEN,
    ROUTE_SIGMOID,
    ROUTE_SOFTMAX,
    ROUTE_TOP_SOFTMAX,
)
from strata_jit.kernels.scratch import probabilities_offset, route_scratch_bytes
from tests.kernels.harness import Step, Team, Vector, aligned, floats

ROUTE_SCRATCH = 64
MODES = [ROUTE_SOFTMAX, ROUTE_SIGMOID, ROUTE_TOP_SOFTMAX]


def run(logits, n_used, norm_w=True, w_scale=1.0, mode=ROUTE_SOFTMAX, bias=None, n_group=1, n_group_used=1,
        threads=(2,), given=None):  # fmt: skip
    """(ids, weights) of all rows; of every thread where there is one row, which must agree."""
    n_rows, n_expert = logits.shape
    padded = floats(n_rows, (n_expert + 7) // 8 * 8)
    padded[:, :n_expert] = logits
    ids = aligned(8 * n_rows * n_used, fill=0xFF).view(np.int64).reshape(n_rows, n_used)
    weights = floats(n_rows, n_used)
    if given is not None:
        ids[:], weights[:] = given
    end = ROUTE_SCRATCH + route_scratch_bytes(n_expert, n_used)
    team = Team(threads, scratch_bytes=end + 64)
    team.run(
        "route", Step(n_rows),
        logits=padded, logits_stride=padded.strides[0], n_expert=n_expert, n_used=n_used,
        mode=mode if given is None else ROUTE_GIVEN, bias=0 if bias is None else Vector(bias),
        n_group=n_group, n_group_used=n_group_used, norm_w=norm_w, w_scale=w_scale,
        route_scratch=ROUTE_SCRATCH, ids=ids, weights=weights,
    )  # fmt: skip
    for scratch in team.scratch:
        assert (scratch[:ROUTE_SCRATCH] == 0xFF).all() and (scratch[end:] == 0xFF).all(), "left its scratch"
    if n_rows > 1:
        return ids, weights
    results = []
    for scratch in team.scratch:
        result = scratch[ROUTE_SCRATCH : ROUTE_SCRATCH + 12 * n_used]
        results.append((result[: 8 * n_used].view(np.int64), result[8 * n_used :].view(np.float32)))
    for other in results[1:]:
        np.testing.assert_array_equal(other[0], results[0][0])
        np.testing.assert_array_equal(other[1], results[0][1])
    return results[0][0][None], results[0][1][None]


def check(logits, n_used, *options, threads=(1, 2), **named):
    """All rows at once and each by itself, against the twin."""
    ids, weights = run(logits, n_used, *options, threads=threads, **named)
    for row in range(len(logits)):
        expected = route(logits[row], n_used, *(options or (True, 1.0)), **named)
        one = run(logits[row : row + 1], n_used, *options, threads=threads, **named)
        for found in ((ids[row], weights[row]), (one[0][0], one[1][0])):
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_array_equal(found[1], expected[1])
    return ids, weights


def random_logits(n_rows, n_expert, seed=0):
    return (4 * np.random.default_rng(seed).standard_normal((n_rows, n_expert))).astype(np.float32)


SIZES = [(1, 1), (2, 1), (7, 2), (8, 8), (9, 3), (64, 8), (97, 10), (128, 128), (257, 257), (512, 10)]


@pytest.mark.parametrize(("n_expert", "n_used"), SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_route_matches_ref(n_expert, n_used, mode, has_bias):
    logits = random_logits(4, n_expert)
    bias = np.random.default_rng(1).standard_normal(n_expert).astype(np.float32) if has_bias else None
    for norm_w in (False, True):
        check(logits, n_used, norm_w, 2.5, mode=mode, bias=bias)


GROUPS = [(16, 4, 2), (24, 3, 3), (14, 7, 1), (256, 8, 4), (90, 9, 8), (64, 32, 11)]


@pytest.mark.parametrize(("n_expert", "n_group", "n_group_used"), GROUPS)
@pytest.mark.parametrize("mode", MODES)
def test_route_within_the_best_groups(n_expert, n_group, n_group_used, mode):
    logits, size = random_logits(5, n_expert, 2), n_expert // n_group
    bias = np.random.default_rng(3).standard_normal(n_expert).astype(np.float32)
    groups = {"n_group": n_group, "n_group_used": n_group_used}
    for n_used in (1, size * n_group_used):
        ids, _ = check(logits, n_used, True, 1.0, mode=mode, bias=bias, **groups)
        assert all(len(set(row // size)) <= n_group_used for row in ids)


def test_route_scores_a_group_by_its_two_best():
    logits = np.array([[5, 0, 0, 0, 3, 3, 1, 1, 4, 1, 4, 1]], np.float32)
    ids, _ = check(logits, 3, False, 1.0, mode=ROUTE_TOP_SOFTMAX, n_group=3, n_group_used=1)
    np.testing.assert_array_equal(ids[0], [8, 10, 9])
    ids, _ = check(logits, 4, False, 1.0, mode=ROUTE_TOP_SOFTMAX, n_group=3, n_group_used=2)
    np.testing.assert_array_equal(ids[0], [8, 10, 4, 5])


def test_route_ties_of_groups_take_the_lower():
    logits = np.ones((1, 12), np.float32)
    ids, _ = check(logits, 6, True, 1.0, mode=ROUTE_SIGMOID, n_group=4, n_group_used=2)
    np.testing.assert_array_equal(ids[0], range(6))


def test_route_bias_moves_the_choice_and_not_the_weights():
    logits = np.array([[1, 3, 2, 0]], np.float32)
    bias = np.array([5, 0, 0, 2], np.float32)
    ids, weights = check(logits, 2, False, 1.0, mode=ROUTE_SIGMOID, bias=bias)
    np.testing.assert_array_equal(ids[0], [0, 3])
    np.testing.assert_allclose(weights[0], 1 / (1 + np.exp([-1, 0])), rtol=1e-6)


def test_route_top_softmax_sums_to_one():
    _, weights = check(random_logits(3, 40), 4, False, 1.0, mode=ROUTE_TOP_SOFTMAX)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


def test_route_ties_take_the_lower_id():
    logits = np.array([[1, 3, 3, 0, 3, 1, 1, 1, 3, 0, 3]], np.float32)
    for mode in MODES:
        ids, weights = check(logits, 7, True, 1.0, mode=mode)
        np.testing.assert_array_equal(ids[0], [1, 2, 4, 8, 10, 0, 5])
        assert len(set(weights[0, :5])) == 1 and len(set(weights[0, 5:])) == 1


def test_route_probabilities_that_underflow_are_ties():
    logits = np.array([[-300, 0, -200, -250, -201, -1, -400, -150, -120]], np.float32)
    ids, _ = check(logits, 5, True, 1.0)
    np.testing.assert_array_equal(ids[0], [1, 5, 0, 2, 3])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("share", ["one", "all"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "n_group_used": 3}])
def test_route_never_gives_an_invalid_id(bad, share, mode, groups):
    logits = np.arange(12, dtype=np.float32)[None].repeat(2, axis=0)
    logits[0, slice(3, 4) if share == "one" else slice(None)] = bad
    ids, weights = check(logits, 9, True, 1.0, mode=mode, **groups)
    for row in ids:
        assert len(set(row)) == 9 and row.min() >= 0 and row.max() < 12
    assert np.isfinite(weights[1]).all()
    if np.isnan(bad) and share == "all":
        assert np.isnan(weights[0]).all(), "hides the fault"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", MODES)
def test_route_with_a_bias_that_is_no_number(bad, mode):
    bias = np.zeros(10, np.float32)
    bias[[2, 7]] = bad
    for n_used in (4, 10):
        ids, _ = check(random_logits(2, 10), n_used, False, 1.0, mode=mode, bias=bias)
        assert all(len(set(row)) == n_used for row in ids)


@pytest.mark.parametrize("mode", MODES)
def test_route_at_the_ends_of_the_range(mode):
    logits = np.array([[3.4e38, -3.4e38, 0, 1e-45, -1e-45, 89, -104, -0.0, 88.8]], np.float32)
    check(logits, 9, True, 1.0, mode=mode)
    check(logits, 9, False, 1.0, mode=mode, n_group=3, n_group_used=3)


@pytest.mark.parametrize("threads", [(1,), (3, 1)])
def test_route_many_rows(threads):
    ids, weights = run(random_logits(70, 33), 10, threads=threads)
    for row, logits in enumerate(random_logits(70, 33)):
        expected = route(logits, 10, True, 1.0)
        np.testing.assert_array_equal(ids[row], expected[0])
        np.testing.assert_array_equal(weights[row], expected[1])


def test_route_normalises_by_no_less_than_the_bound():
    logits = np.full((1, 97), -12, np.float32)
    _, weights = check(logits, 2, True, 1.0, mode=ROUTE_SIGMOID)
    assert weights.sum() < 0.9


@pytest.mark.parametrize("n_rows", [1, 2])
def test_route_given_copies(n_rows):
    rng = np.random.default_rng(0)
    given = rng.integers(-1, 20, (n_rows, 4)), rng.random((n_rows, 4)).astype(np.float32)
    ids, weights = run(np.zeros((n_rows, 20), np.float32), 4, given=given)
    np.testing.assert_array_equal(ids, given[0])
    np.testing.assert_array_equal(weights, given[1])


def test_probabilities_lie_behind_ids_and_weights():
    for n_used in range(1, 20):
        assert probabilities_offset(n_used) >= 12 * n_used and probabilities_offset(n_used) % 64 == 0


def skip_tail(ids, tail_skip, n_expert, threads):
    """ids after `route_tail`, and how many it says that it left out."""
    n_rows, n_used = ids.shape
    left = aligned(ids.nbytes).view(np.int64).reshape(ids.shape)
    left[:] = ids
    skipped = aligned(64).view(np.int64)
    team = Team(threads, scratch_bytes=1 << 14)
    for scratch in team.scratch:
        scratch[ROUTE_SCRATCH:][: 8 * n_used] = left[0].view(np.uint8)
    team.run(
        "route_tail", Step(n_rows),
        n_expert=n_expert, n_used=n_used, tail_skip=tail_skip, route_scratch=ROUTE_SCRATCH, ids=left,
        list_scratch=1 << 12, skipped=skipped,
    )  # fmt: skip
    if n_rows == 1:
        results = {scratch[ROUTE_SCRATCH:][: 8 * n_used].tobytes() for scratch in team.scratch}
        assert len(results) == 1
        left[0] = np.frombuffer(results.pop(), np.int64)
    return left, int(skipped[0])


@pytest.mark.parametrize("threads", [(1,), (2, 1)])
@pytest.mark.parametrize("n_rows", [1, 2, 7, 40])
@pytest.mark.parametrize("tail_skip", [1, 3, 5, 9])
def test_route_tail_leaves_out_what_no_row_ranks_higher(threads, n_rows, tail_skip):
    rng = np.random.default_rng(n_rows)
    n_expert, n_used = 30, 5
    ids = rng.permuted(np.tile(np.arange(n_expert), (n_rows, 1)), axis=1)[:, :n_used]
    wanted = set(ids[:, :tail_skip].ravel().tolist())
    expected = np.where(np.isin(ids, list(wanted)), ids, -1)
    found, skipped = skip_tail(ids, tail_skip, n_expert, threads)
    np.testing.assert_array_equal(found, expected)
    assert skipped == (expected < 0).sum()
