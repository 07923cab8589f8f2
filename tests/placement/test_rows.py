"""Row cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jit.errors import UsageError
from strata_jit.placement import cut_rows


@given(st.integers(0, 5000), st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
def test_cut_rows_covers_everything_once(n_rows, shares):
    ranges = cut_rows(n_rows, shares)
    assert len(ranges) == len(shares)
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert (ranges[0][0], ranges[-1][1]) == (0, n_rows)
    total = sum(shares)
    for (start, stop), share in zip(ranges, shares, strict=True):
        assert start <= stop
        assert start % 8 == 0 or start == n_rows
        assert share or start == stop
        assert abs((stop - start) - n_rows * share / total) <= 16


def test_cut_rows_examples():
    assert cut_rows(768, [12, 11]) == [(0, 400), (400, 768)]
    assert cut_rows(5, [1, 1, 1]) == [(0, 0), (0, 5), (5, 5)]
    assert cut_rows(0, [1, 2]) == [(0, 0), (0, 0)]


@pytest.mark.parametrize(("n_rows", "shares"), [(8, []), (8, [0, 0]), (8, [2, -1]), (-1, [1])])
def test_cut_rows_refuses_shares_without_sense(n_rows, shares):
    with pytest.raises(UsageError):
        cut_rows(n_rows, shares)
