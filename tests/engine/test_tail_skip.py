"""Leaving out the last experts: off by default, counted, the same bits for any team."""

import numpy as np
import pytest

import strata_jit
from strata_jit.errors import UsageError
from tests.engine.judge import Golden


@pytest.fixture(scope="module")
def golden(request_golden):
    return Golden(request_golden("llama"))


def run(golden, **options):
    """Logits as bits, and choices left out."""
    with strata_jit.load(golden.model, ctx=64, **options) as model:
        bits = model.logits(golden.tokens[1]).view(np.uint32)
        return bits, model.experts_skipped()


def test_tail_skip_changes_logits_and_counts(golden):
    plain, none = run(golden, workers=0, chunk=1)
    assert none == 0
    found, skipped = run(golden, workers=0, chunk=1, route_tail_skip=1)
    assert skipped > 0 and not np.array_equal(found, plain)
    same, none = run(golden, workers=0, chunk=1, route_tail_skip=1000)
    assert none == 0
    np.testing.assert_array_equal(same, plain)


@pytest.mark.parametrize("chunk", [1, 7])
def test_tail_skip_is_the_same_for_any_team(golden, chunk):
    one, n_one = run(golden, workers=0, chunk=chunk, route_tail_skip=1)
    other, n_other = run(golden, workers=2, chunk=chunk, route_tail_skip=1, numa_pool="test", test_slices=2)
    np.testing.assert_array_equal(one, other)
    assert n_one == n_other > 0


def test_tail_skip_refuses_negative_ranks(golden):
    with pytest.raises(UsageError, match="route_tail_skip: found -1"):
        run(golden, route_tail_skip=-1)
