"""The loop of the float types: octets times one activation row of float32.

Owns how a column of eight rows is read, and the float order: four accumulators by column mod 4, fma in
ascending order, (a0 + a1) + (a2 + a3).
"""

from numba import types
from numba.extending import intrinsic

from strata_jit.kernels.isa.portable import V8I32
from strata_jit.kernels.layout import STORE_TYPES
from strata_jit.kernels.prefetch import PREFETCH_BYTES, emit_prefetch
from strata_jit.kernels.vec import (
    I16,
    const,
    emit_half_to_f32,
    f32x8,
    fma8,
    load_as,
    load_f32,
    splat8,
    store8,
    vector,
)


def _f32(context, b, address, column):
    return load_as(b, address, f32x8.llvm, 32 * column)


def _f16(context, b, address, column):
    return emit_half_to_f32(context, b, load_as(b, address, vector(I16, 8), 16 * column))


def _bf16(context, b, address, column):
    """An even column is the low half of each lane, the odd one after it the high half."""
    lanes = load_as(b, address, V8I32, 32 * (column // 2))
    high = b.and_(lanes, const(V8I32, -65536)) if column % 2 else b.shl(lanes, const(V8I32, 16))
    return b.bitcast(high, f32x8.llvm)


_COLUMNS = {"F32": _f32, "BF16": _bf16, "F16": _f16}
FLOAT_TYPES = tuple(_COLUMNS)


@intrinsic(prefer_literal=True)
def column8(typingctx, name, address, column):
    """f32x8 of column 0 .. 3 (a literal) of the four at `address`, stored as type `name` (a literal)."""
    if not (isinstance(name, types.Literal) and isinstance(column, types.Literal)):
        return None
    emit, number = _COLUMNS[name.literal_value], column.literal_value

    def codegen(context, b, signature, args):
        return emit(context, b, args[1], number)

    return f32x8(name, types.int64, column), codegen


@intrinsic(prefer_literal=True)
def prefetch_columns(typingctx, name, address):
    """Prefetch four columns of type `name` (a literal) that the stream at `address` will come to."""
    if not isinstance(name, types.Literal):
        return None
    n_bytes = STORE_TYPES[name.literal_value].payload_bytes

    def codegen(context, b, signature, args):
        emit_prefetch(b, args[1], PREFETCH_BYTES, n_bytes)
        return context.get_dummy_value()

    return types.void(name, types.int64), codegen


def float_one(store):
    """The one-token loop of a stored float type; nopython only."""
    step = store.payload_bytes

    def loop(name, isa, w, octet_stride, n_octets, n_cols, act, out):
        for o in range(n_octets):
            p = w + o * octet_stride
            a0, a1, a2, a3 = splat8(0.0), splat8(0.0), splat8(0.0), splat8(0.0)
            for k in range(0, n_cols, 4):
                x = act + 4 * k
                prefetch_columns(name, p)
                a0 = fma8(column8(name, p, 0), splat8(load_f32(x)), a0)
                a1 = fma8(column8(name, p, 1), splat8(load_f32(x + 4)), a1)
                a2 = fma8(column8(name, p, 2), splat8(load_f32(x + 8)), a2)
                a3 = fma8(column8(name, p, 3), splat8(load_f32(x + 12)), a3)
                p += step
            store8(out + 32 * o, (a0 + a1) + (a2 + a3))

    return loop
