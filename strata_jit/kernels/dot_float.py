"""Loops of the float types: one octet after the other times one activation row of float32, nopython only.

Owns their float order: four accumulators by column mod 4, fma in ascending order, (a0 + a1) + (a2 + a3).
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from strata_jit.kernels.isa.portable import V8I32
from strata_jit.kernels.prefetch import PREFETCH_BYTES, prefetch
from strata_jit.kernels.vec import (
    I64,
    const,
    f32x8,
    fma8,
    load8,
    load8_f16,
    load_as,
    load_f32,
    splat8,
    store8,
)


@intrinsic
def load8_bf16(typingctx, address, odd):
    """Eight bf16 as f32x8: the low (odd = 0) or high half of each 32-bit lane at `address`."""

    def codegen(context, b, signature, args):
        lanes = load_as(b, args[0], V8I32)
        is_odd = b.icmp_signed("!=", args[1], ir.Constant(I64, 0))
        low, high = b.shl(lanes, const(V8I32, 16)), b.and_(lanes, const(V8I32, -65536))
        return b.bitcast(b.select(is_odd, high, low), f32x8.llvm)

    return f32x8(types.int64, types.int64), codegen


def f32_one(name, isa, w, octet_stride, n_octets, n_cols, act, out):
    """Eight float32 a column."""
    for o in range(n_octets):
        p = w + o * octet_stride
        a0, a1, a2, a3 = splat8(0.0), splat8(0.0), splat8(0.0), splat8(0.0)
        for k in range(0, n_cols, 4):
            x = act + 4 * k
            prefetch(p + PREFETCH_BYTES)
            prefetch(p + PREFETCH_BYTES + 64)
            a0 = fma8(load8(p), splat8(load_f32(x)), a0)
            a1 = fma8(load8(p + 32), splat8(load_f32(x + 4)), a1)
            a2 = fma8(load8(p + 64), splat8(load_f32(x + 8)), a2)
            a3 = fma8(load8(p + 96), splat8(load_f32(x + 12)), a3)
            p += 128
        store8(out + 32 * o, (a0 + a1) + (a2 + a3))


def bf16_one(name, isa, w, octet_stride, n_octets, n_cols, act, out):
    """Lane r holds columns k and k + 1 of row r."""
    for o in range(n_octets):
        p = w + o * octet_stride
        a0, a1, a2, a3 = splat8(0.0), splat8(0.0), splat8(0.0), splat8(0.0)
        for k in range(0, n_cols, 4):
            x = act + 4 * k
            prefetch(p + PREFETCH_BYTES)
            a0 = fma8(load8_bf16(p, 0), splat8(load_f32(x)), a0)
            a1 = fma8(load8_bf16(p, 1), splat8(load_f32(x + 4)), a1)
            a2 = fma8(load8_bf16(p + 32, 0), splat8(load_f32(x + 8)), a2)
            a3 = fma8(load8_bf16(p + 32, 1), splat8(load_f32(x + 12)), a3)
            p += 64
        store8(out + 32 * o, (a0 + a1) + (a2 + a3))


def f16_one(name, isa, w, octet_stride, n_octets, n_cols, act, out):
    """Eight f16 a column."""
    for o in range(n_octets):
        p = w + o * octet_stride
        a0, a1, a2, a3 = splat8(0.0), splat8(0.0), splat8(0.0), splat8(0.0)
        for k in range(0, n_cols, 4):
            x = act + 4 * k
            prefetch(p + PREFETCH_BYTES)
            a0 = fma8(load8_f16(p), splat8(load_f32(x)), a0)
            a1 = fma8(load8_f16(p + 16), splat8(load_f32(x + 4)), a1)
            a2 = fma8(load8_f16(p + 32), splat8(load_f32(x + 8)), a2)
            a3 = fma8(load8_f16(p + 48), splat8(load_f32(x + 12)), a3)
            p += 64
        store8(out + 32 * o, (a0 + a1) + (a2 + a3))


FLOAT_LOOPS = {"F32": f32_one, "BF16": bf16_one, "F16": f16_one}
"""Stored type -> its one-token loop."""
