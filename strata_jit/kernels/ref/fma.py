"""Twin of the float32 fused multiply-add: a * b + c with a single rounding, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def fma32(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> NDArray[np.float32]:
    """float32 of a * b + c rounded once (nearest, ties to even), broadcast over its float32 arguments.

    The product of two float32 is exact in float64. The float64 sum is then turned into the sum *rounded to
    odd*: where it is inexact (Knuth's two-sum gives the exact error), the last bit is made 1 by going to the
    neighbour on the error's side. Rounded to odd with two spare bits or more, it rounds to float32 as the
    exact sum would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x, y, addend = (np.asarray(v, np.float32).astype(np.float64) for v in (a, b, c))
        product = x * y
        total = np.asarray(product + addend)
        part = total - product
        error = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        step = np.where(np.signbit(error) == np.signbit(total), 1, -1)
        adjust = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        odd = (bits + np.where(adjust, step, 0)).view(np.float64)
        return odd.astype(np.float32)
