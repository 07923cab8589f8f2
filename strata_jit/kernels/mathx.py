"""exp, silu, sigmoid, log1p and softplus on eight lanes, sine and cosine in float64.

Owns our own polynomials: libm and NumPy choose theirs by CPU, so that their last bits differ from machine to
machine. Every step here is one IEEE operation in a fixed order. Knows no op and no memory.

exp: x = k*ln2 + r with |r| <= ln2/2, exp(r) = 1 + r + r*r*P(r), P of degree 4 fitted for the smallest largest
relative error (3.2e-9), each coefficient rounded to float32 in turn.
log1p: log(1 + u) = 2 atanh(s) with s = u / (2 + u), atanh(s) = s + s*z*L(z) with z = s*s <= 1/9, L of
degree 3 fitted alike (4.5e-9).
sin, cos: x = n*pi/2 + r with |r| <= pi/4, Taylor series whose first left-out term is below 2**-53.
"""

import math

import numpy as np

from strata_jit.kernels._jit import inline_kernel
from strata_jit.kernels.vec import abs8, fma8, max8, min8, round8, scale_by_power8, splat8

LOG2_E = np.float32(math.log2(math.e))
LN2_HIGH = np.float32(math.log(2))
LN2_LOW = np.float32(math.log(2) - float(LN2_HIGH))
EXP_LOWEST = np.float32(-104)
"""exp of it and of everything below rounds to 0."""
EXP_HIGHEST = np.float32(89)
"""exp of it and of everything above is infinite."""
P0, P1, P2, P3, P4 = (
    np.float32(c) for c in (0.49999994, 0.16666521, 0.041668262, 0.0083686709, 0.0013821042)
)
L0, L1, L2, L3 = (np.float32(c) for c in (0.3333321, 0.20010719, 0.14001514, 0.14003377))

ROUND_F64 = 1.5 * 2.0**52
"""Adding and subtracting it rounds to the nearest integer, ties to even, where |x| < 2**51."""
TWO_OVER_PI = 2 / math.pi
HALF_PI_HIGH = float.fromhex("0x1.921fb544p+0")
"""The first 33 bits of pi/2: n times it is exact where |n| < 2**20."""
HALF_PI_LOW = float.fromhex("0x1.0b4611a626331p-34")
"""The next 53 bits of pi/2."""
S3, S5, S7, S9, S11, S13, S15 = ((-1) ** (n // 2) / math.factorial(n) for n in range(3, 16, 2))
C2, C4, C6, C8, C10, C12, C14, C16 = ((-1) ** (n // 2) / math.factorial(n) for n in range(2, 17, 2))


@inline_kernel
def exp8(x):
    """e**x, within 1 ulp; 0 and inf beyond the range of float32, subnormals included; a NaN stays."""
    x = min8(splat8(EXP_HIGHEST), max8(splat8(EXP_LOWEST), x))
    k = round8(x * splat8(LOG2_E))
    r = fma8(k, splat8(-LN2_LOW), fma8(k, splat8(-LN2_HIGH), x))
    p = fma8(r, splat8(P4), splat8(P3))
    p = fma8(r, p, splat8(P2))
    p = fma8(r, p, splat8(P1))
    p = fma8(r, p, splat8(P0))
    one = splat8(np.float32(1))
    y = fma8(r, fma8(r, p, one), one)
    half = round8(k * splat8(np.float32(0.5)))
    return scale_by_power8(scale_by_power8(y, half), k - half)


@inline_kernel
def sigmoid8(x):
    """1 / (1 + exp(-x))."""
    one = splat8(np.float32(1))
    return one / (one + exp8(-x))


@inline_kernel
def silu8(x):
    """x / (1 + exp(-x))."""
    return x / (splat8(np.float32(1)) + exp8(-x))


@inline_kernel
def log1p8(u):
    """log(1 + u) where 0 <= u <= 1, within 2 ulp, subnormals included; a NaN stays."""
    s = u / (splat8(np.float32(2)) + u)
    z = s * s
    p = fma8(z, splat8(L3), splat8(L2))
    p = fma8(z, p, splat8(L1))
    p = fma8(z, p, splat8(L0))
    twice = s + s
    return fma8(twice * z, p, twice)


@inline_kernel
def softplus8(x):
    """log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)); a NaN stays."""
    return max8(x, splat8(np.float32(0))) + log1p8(exp8(-abs8(x)))


@inline_kernel
def sincos(x):
    """(sin x, cos x) of a float64, to about 1e-15 where |x| < 1.6e6."""
    n = (x * TWO_OVER_PI + ROUND_F64) - ROUND_F64
    r = (x - n * HALF_PI_HIGH) - n * HALF_PI_LOW
    z = r * r
    s = S3 + z * (S5 + z * (S7 + z * (S9 + z * (S11 + z * (S13 + z * S15)))))
    s = r + r * z * s
    c = C2 + z * (C4 + z * (C6 + z * (C8 + z * (C10 + z * (C12 + z * (C14 + z * C16))))))
    c = 1.0 + z * c
    quadrant = np.int64(n) & 3
    if quadrant == 0:
        return s, c
    if quadrant == 1:
        return c, -s
    if quadrant == 2:
        return -s, -c
    return -c, s
