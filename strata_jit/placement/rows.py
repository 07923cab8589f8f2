"""Which rows of a matrix each node owns.

Owns the cut; knows neither machines nor matrices, only numbers of rows and shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from strata_jit.errors import UsageError

ROW_GROUP = 8
"""Rows are cut in this unit, the octet in which matrices are stored."""


def cut_rows(n_rows: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges [start, stop) of `n_rows` rows in proportion to `shares`, one each, in order.

    Cuts fall on multiples of 8; every row lies in exactly one range; ranges may be empty. UsageError unless
    some share is positive and none negative.
    """
    total = sum(shares)
    if total <= 0 or min(shares) < 0 or n_rows < 0:
        raise UsageError(
            f"cannot cut {n_rows} rows in shares {list(shares)}: expected one positive, none negative"
        )
    groups = (n_rows + ROW_GROUP - 1) // ROW_GROUP
    cuts, before = [0], 0
    for share in shares:
        before += share
        # the nearest group to the exact cut, so that no range is off by more than a group
        cuts.append(min(n_rows, ROW_GROUP * ((2 * groups * before + total) // (2 * total))))
    return list(pairwise(cuts))
