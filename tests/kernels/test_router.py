"""The router against its twin; one row against many, bit for bit."""

import numpy as np
import pytest

from strata_jit.kernels.ref.router import route
from strata_jit.kernels.scratch import probabilities_offset, route_scratch_bytes
from tests.kernels.harness import Step, Team, aligned, floats

WEIGHT_RTOL = 1e-6
ROUTE_SCRATCH = 64


def run(logits, n_used, norm_w=True, w_scale=1.0, threads=(2,), given=None):
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
        mode=0 if given is None else 3, norm_w=norm_w, w_scale=w_scale, route_scratch=ROUTE_SCRATCH,
        ids=ids, weights=weights,
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


def spread_logits(rng, n_rows, n_expert):
    """Logits that float32 and float64 put into the same order."""
    return rng.permuted(np.tile(np.linspace(-5, 5, n_expert), (n_rows, 1)), axis=1).astype(np.float32)


@pytest.mark.parametrize(("n_expert", "n_used"), [(1, 1), (7, 2), (8, 8), (9, 3), (64, 8), (97, 10)])
@pytest.mark.parametrize("norm_w", [False, True])
def test_route_matches_ref(n_expert, n_used, norm_w):
    rng = np.random.default_rng(n_expert)
    logits = spread_logits(rng, 5, n_expert)
    ids, weights = run(logits, n_used, norm_w, 2.5, threads=(1, 2))
    for row in range(5):
        expected = route(logits[row], n_used, norm_w, 2.5)
        np.testing.assert_array_equal(ids[row], expected[0])
        np.testing.assert_allclose(weights[row], expected[1], rtol=WEIGHT_RTOL)


@pytest.mark.parametrize("n_expert", [1, 5, 8, 33, 97])
@pytest.mark.parametrize("n_rows", [2, 3, 70])
def test_route_one_equals_many(n_expert, n_rows):
    rng = np.random.default_rng(n_rows)
    logits = (4 * rng.standard_normal((n_rows, n_expert))).astype(np.float32)
    n_used = min(n_expert, 10)
    for threads in ((1,), (3, 1)):
        ids, weights = run(logits, n_used, threads=threads)
        for row in range(n_rows):
            one = run(logits[row : row + 1], n_used, threads=threads)
            np.testing.assert_array_equal(ids[row], one[0][0])
            np.testing.assert_array_equal(weights[row], one[1][0])


def test_route_ties_take_the_lower_id():
    logits = np.array([[1, 3, 3, 0, 3, 1, 1, 1, 3, 0, 3]], np.float32)
    ids, weights = run(logits, 7)
    np.testing.assert_array_equal(ids[0], [1, 2, 4, 8, 10, 0, 5])
    assert len(set(weights[0, :5])) == 1 and len(set(weights[0, 5:])) == 1


def test_route_probabilities_that_underflow_are_ties():
    logits = np.array([[-300, 0, -200, -250, -201, -1, -400, -150, -120]], np.float32)
    ids, _ = run(logits, 5)
    np.testing.assert_array_equal(ids[0], route(logits[0], 5, True, 1)[0])
    np.testing.assert_array_equal(ids[0], [1, 5, 0, 2, 3])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("share", ["one", "all"])
def test_route_never_gives_an_invalid_id(bad, share):
    logits = np.arange(11, dtype=np.float32)[None].repeat(2, axis=0)
    logits[0, slice(3, 4) if share == "one" else slice(None)] = bad
    ids, weights = run(logits, 10)
    for row in range(2):
        assert len(set(ids[row])) == 10 and ids[row].min() >= 0 and ids[row].max() < 11
        expected = route(logits[row], 10, True, 1)
        np.testing.assert_array_equal(ids[row], expected[0])
        np.testing.assert_allclose(weights[row], expected[1], rtol=WEIGHT_RTOL)
    assert np.isfinite(weights[1]).all()


def test_route_normalises_by_no_less_than_the_bound():
    logits = np.zeros((1, 97), np.float32)
    logits[0, 0] = -60
    ids, weights = run(logits, 1)
    assert ids[0, 0] == 1 and weights[0, 0] == 1


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
