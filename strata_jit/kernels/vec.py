"""Eight-lane vectors as Numba values: `f32x8`, `i32x8`, and the operations that kernels build on.

Every operation is generic LLVM vector code, so the same source serves every CPU and gives the same bits
on all of them: no operation here re-associates, contracts or approximates. Instructions of one CPU family
belong in `kernels/isa/`. Addresses are int64 byte addresses; vectors need no alignment.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, overload, register_model, type_callable

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
LANES = 8


def vector(element, n):
    """LLVM type <n x element>."""
    return ir.VectorType(element, n)


class VectorType(types.Type):
    """A Numba type whose values are LLVM vectors of eight lanes."""

    def __init__(self, name, element):
        self.llvm = vector(element, LANES)
        super().__init__(name=name)


class _F32x8(VectorType):
    def __init__(self):
        super().__init__("f32x8", F32)


class _I32x8(VectorType):
    def __init__(self):
        super().__init__("i32x8", I32)


f32x8 = _F32x8()
i32x8 = _I32x8()


@register_model(_F32x8)
@register_model(_I32x8)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


# --- emission helpers, shared with kernels/isa and kernels/dot --------------------------------------------


def const(llvm_type, values):
    """Constant vector; one number is repeated in every lane."""
    n = llvm_type.count
    values = [values] * n if isinstance(values, int | float) else list(values)
    return ir.Constant(llvm_type, [ir.Constant(llvm_type.element, v) for v in values])


def load_as(b, address, llvm_type, offset=0):
    """Unaligned load of `llvm_type` from the int64 `address` + constant `offset`."""
    return b.load(pointer(b, address, llvm_type, offset), align=1)


def store_as(b, address, value, offset=0):
    """Unaligned store to the int64 `address` + constant `offset`."""
    b.store(value, pointer(b, address, value.type, offset), align=1)


def pointer(b, address, llvm_type, offset=0):
    """Pointer to `llvm_type` at the int64 `address` + constant `offset`."""
    base = b.inttoptr(address, I8.as_pointer())
    if offset:
        base = b.gep(base, [ir.Constant(I64, offset)])
    return b.bitcast(base, llvm_type.as_pointer())


def splat(b, scalar, n=LANES):
    """Vector of n copies of an LLVM scalar."""
    one = b.insert_element(ir.Constant(vector(scalar.type, n), ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(one, one, const(vector(I32, n), 0))


def shuffle(b, v, w, lanes):
    """shufflevector with constant lanes."""
    return b.shuffle_vector(v, w, const(vector(I32, len(lanes)), lanes))


def call_llvm(b, name, result, *args):
    """Call the LLVM intrinsic `name`."""
    f = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(f, args)


def emit_fma(b, x, y, z):
    """fma(x, y, z) with one rounding, lane by lane."""
    return call_llvm(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def has_half(context):
    """Whether the CPU that we compile for converts f16 in hardware."""
    triple, _, features = context.codegen().magic_tuple()
    return "+f16c" in features or triple.startswith(("aarch64", "arm64"))


def emit_half_to_f32(context, b, bits):
    """Exact f16 -> f32 of a vector <n x i16>: in hardware, else by integer arithmetic."""
    n = bits.type.count
    floats, ints = vector(F32, n), vector(I32, n)
    if has_half(context):
        return b.fpext(b.bitcast(bits, vector(HALF, n)), floats)
    wide = b.zext(bits, ints)
    magnitude = b.and_(wide, const(ints, 0x7FFF))
    # shifting the exponent field gives the value times 2**-112, subnormals included
    scaled = b.fmul(b.bitcast(b.shl(magnitude, const(ints, 13)), floats), const(floats, 2.0**112))
    special = b.or_(b.shl(magnitude, const(ints, 13)), const(ints, 0x7F800000))
    is_special = b.icmp_unsigned(">=", magnitude, const(ints, 0x7C00))
    value = b.select(is_special, special, b.bitcast(scaled, ints))
    sign = b.shl(b.and_(wide, const(ints, 0x8000)), const(ints, 16))
    return b.bitcast(b.or_(value, sign), floats)


def emit_f32_to_half(context, b, value):
    """f32 -> f16 bits (<n x i16>), round to nearest even, overflow to infinity."""
    n = value.type.count
    floats, ints = vector(F32, n), vector(I32, n)
    if has_half(context):
        return b.bitcast(b.fptrunc(value, vector(HALF, n)), vector(I16, n))
    bits = b.bitcast(value, ints)
    sign = b.and_(b.lshr(bits, const(ints, 16)), const(ints, 0x8000))
    magnitude = b.and_(bits, const(ints, 0x7FFFFFFF))
    # normal range: add half of the dropped part, ties to even by the lowest bit kept
    odd = b.and_(b.lshr(magnitude, const(ints, 13)), const(ints, 1))
    rounded = b.add(b.add(magnitude, const(ints, 0xFFF)), odd)
    normal = b.lshr(b.sub(rounded, const(ints, 112 << 23)), const(ints, 13))
    # subnormal range: a float addition whose ulp is 2**-24 rounds for us
    aligned = b.fadd(b.bitcast(magnitude, floats), const(floats, 0.5))
    subnormal = b.sub(b.bitcast(aligned, ints), const(ints, 0x3F000000))
    half = b.select(b.icmp_unsigned("<", magnitude, const(ints, 113 << 23)), subnormal, normal)
    half = b.select(b.icmp_unsigned(">=", magnitude, const(ints, 0x477FF000)), const(ints, 0x7C00), half)
    half = b.select(b.icmp_unsigned(">", magnitude, const(ints, 0x7F800000)), const(ints, 0x7E00), half)
    return b.trunc(b.or_(half, sign), vector(I16, n))


# --- loads and stores -------------------------------------------------------------------------------------


@intrinsic
def load8(typingctx, address):
    """f32x8 at `address`."""

    def codegen(context, b, signature, args):
        return load_as(b, args[0], f32x8.llvm)

    return f32x8(types.int64), codegen


@intrinsic
def store8(typingctx, address, value):
    """Store an f32x8 or i32x8 at `address`."""

    def codegen(context, b, signature, args):
        store_as(b, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@intrinsic
def load8_f16(typingctx, address):
    """f32x8 from eight f16 at `address`, exact."""

    def codegen(context, b, signature, args):
        return emit_half_to_f32(context, b, load_as(b, args[0], vector(I16, LANES)))

    return f32x8(types.int64), codegen


@intrinsic
def store8_f16(typingctx, address, value):
    """Store an f32x8 as eight f16 (nearest even)."""

    def codegen(context, b, signature, args):
        store_as(b, args[0], emit_f32_to_half(context, b, args[1]))
        return context.get_dummy_value()

    return types.void(types.int64, f32x8), codegen


@intrinsic
def f16_bits(typingctx, value):
    """uint16 bits of one float32 rounded to f16 (nearest even)."""

    def codegen(context, b, signature, args):
        zero = const(vector(F32, 1), 0.0)
        one = b.insert_element(zero, args[0], ir.Constant(I32, 0))
        return b.extract_element(emit_f32_to_half(context, b, one), ir.Constant(I32, 0))

    return types.uint16(types.float32), codegen


def _scalar_load(numba_type, llvm_type):
    @intrinsic
    def load(typingctx, address):
        def codegen(context, b, signature, args):
            return load_as(b, args[0], llvm_type)

        return numba_type(types.int64), codegen

    return load


def _scalar_store(numba_type):
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, b, signature, args):
            store_as(b, args[0], context.cast(b, args[1], signature.args[1], numba_type))
            return context.get_dummy_value()

        return types.void(types.int64, value), codegen

    return store


load_f32, store_f32 = _scalar_load(types.float32, F32), _scalar_store(types.float32)
load_f64, store_f64 = _scalar_load(types.float64, F64), _scalar_store(types.float64)
load_i64, store_i64 = _scalar_load(types.int64, I64), _scalar_store(types.int64)
store_u8, store_u16 = _scalar_store(types.uint8), _scalar_store(types.uint16)


# --- arithmetic -------------------------------------------------------------------------------------------


@intrinsic
def splat8(typingctx, value):
    """f32x8 with `value` (float32) in every lane."""

    def codegen(context, b, signature, args):
        return splat(b, context.cast(b, args[0], signature.args[0], types.float32))

    return f32x8(value), codegen


@intrinsic
def fma8(typingctx, x, y, z):
    """x * y + z with one rounding."""

    def codegen(context, b, signature, args):
        return emit_fma(b, *args)

    return f32x8(f32x8, f32x8, f32x8), codegen


@intrinsic
def fma1(typingctx, x, y, z):
    """float32 x * y + z with one rounding."""

    def codegen(context, b, signature, args):
        return call_llvm(b, "llvm.fma.f32", F32, *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _binary(operator_fn, emit):
    @type_callable(operator_fn)
    def typer(context):
        def resolve(x, y):
            return f32x8 if x is f32x8 and y is f32x8 else None

        return resolve

    @lower_builtin(operator_fn, _F32x8, _F32x8)
    def lower(context, b, signature, args):
        return emit(b, *args)


_binary(operator.add, lambda b, x, y: b.fadd(x, y))
_binary(operator.sub, lambda b, x, y: b.fsub(x, y))
_binary(operator.mul, lambda b, x, y: b.fmul(x, y))
_binary(operator.truediv, lambda b, x, y: b.fdiv(x, y))


def _compare_select(condition):
    @intrinsic
    def pick(typingctx, x, y):
        def codegen(context, b, signature, args):
            return b.select(b.fcmp_ordered(condition, *args), args[0], args[1])

        return f32x8(f32x8, f32x8), codegen

    return pick


max8 = _compare_select(">")
"""Lane-wise x where x > y, else y (so a NaN in x gives y)."""
min8 = _compare_select("<")
"""Lane-wise x where x < y, else y (so a NaN in x gives y)."""


@intrinsic
def round8(typingctx, x):
    """Nearest integer, ties to even, as f32x8."""

    def codegen(context, b, signature, args):
        return call_llvm(b, "llvm.nearbyint.v8f32", f32x8.llvm, args[0])

    return f32x8(f32x8), codegen


@intrinsic
def abs8(typingctx, x):
    """Lane-wise absolute value."""

    def codegen(context, b, signature, args):
        return call_llvm(b, "llvm.fabs.v8f32", f32x8.llvm, args[0])

    return f32x8(f32x8), codegen


@intrinsic
def scale_by_power8(typingctx, x, k):
    """x * 2**k for integral k in [-126, 127], exact: 2**k is built from its exponent field."""

    def codegen(context, b, signature, args):
        exponent = b.add(b.fptosi(args[1], i32x8.llvm), const(i32x8.llvm, 127))
        power = b.bitcast(b.shl(exponent, const(i32x8.llvm, 23)), f32x8.llvm)
        return b.fmul(args[0], power)

    return f32x8(f32x8, f32x8), codegen


@intrinsic
def keep_lanes8(typingctx, x, n, other):
    """Lanes 0 .. n-1 of x, the remaining lanes of `other`."""

    def codegen(context, b, signature, args):
        lane = const(i32x8.llvm, range(LANES))
        keep = b.icmp_signed("<", lane, splat(b, b.trunc(args[1], I32)))
        return b.select(keep, args[0], args[2])

    return f32x8(f32x8, types.int64, f32x8), codegen


@intrinsic
def at_least8(typingctx, x, y):
    """int64 whose bit i says whether x >= y in lane i."""

    def codegen(context, b, signature, args):
        bits = b.bitcast(b.fcmp_ordered(">=", *args), ir.IntType(LANES))
        return b.zext(bits, I64)

    return types.int64(f32x8, f32x8), codegen


@intrinsic
def count_bits(typingctx, x):
    """Bits that are set in an int64."""

    def codegen(context, b, signature, args):
        return b.ctpop(args[0])

    return types.int64(types.int64), codegen


@intrinsic
def lane8(typingctx, x, i):
    """Lane i of x as float32."""

    def codegen(context, b, signature, args):
        return b.extract_element(args[0], b.trunc(args[1], I32))

    return types.float32(f32x8, types.int64), codegen


def _fold(name, combine, vector_type=f32x8, scalar_type=types.float32):
    """Horizontal reduction in one fixed order: lanes 0-3 with 4-7, then 2 apart, then 1 apart."""

    def codegen(context, b, signature, args):
        v = args[0]
        for half in (4, 2, 1):
            low, high = shuffle(b, v, v, range(half)), shuffle(b, v, v, range(half, 2 * half))
            v = combine(b, low, high)
        return b.extract_element(v, ir.Constant(I32, 0))

    @intrinsic
    def reduce(typingctx, x):
        return scalar_type(vector_type), codegen

    reduce.__doc__ = name
    return reduce


sum8 = _fold("((l0+l4)+(l2+l6))+((l1+l5)+(l3+l7))", lambda b, x, y: b.fadd(x, y))
hmax8 = _fold("Largest lane.", lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@overload(operator.neg)
def _neg8(x):
    if x is f32x8:
        return lambda x: splat8(-0.0) - x
    return None


def _call(n_args):
    signature = types.void(*[types.int64] * (n_args + 1))

    def codegen(context, b, sig, args):
        function = ir.FunctionType(ir.VoidType(), [I64] * n_args)
        b.call(b.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def call6(typingctx, address, a0, a1, a2, a3, a4, a5):
    """Call the C function `void f(int64 x 6)` at `address`."""
    return _call(6)


@intrinsic
def call8(typingctx, address, a0, a1, a2, a3, a4, a5, a6, a7):
    """Call the C function `void f(int64 x 8)` at `address`."""
    return _call(8)


# --- words of the structures in `abi`, and of an op's arguments -------------------------------------------


@intrinsic
def word(typingctx, base, index):
    """int64 word number `index` at `base`."""

    def codegen(context, b, signature, args):
        return b.load(_word_pointer(b, args, I64), align=8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def float_word(typingctx, base, index):
    """float32 whose bits are the low half of word number `index` at `base`."""

    def codegen(context, b, signature, args):
        bits = b.trunc(b.load(_word_pointer(b, args, I64), align=8), I32)
        return b.bitcast(bits, F32)

    return types.float32(types.int64, types.int64), codegen


def _word_pointer(b, args, llvm_type):
    base, index = args
    return b.gep(b.inttoptr(base, llvm_type.as_pointer()), [index])


# --- lanes in other places --------------------------------------------------------------------------------


def _two_vector_shuffle(lanes, doc):
    @intrinsic
    def pick(typingctx, x, y):
        def codegen(context, b, signature, args):
            return shuffle(b, *args, lanes)

        return f32x8(f32x8, f32x8), codegen

    pick.__doc__ = doc
    return pick


even8 = _two_vector_shuffle(range(0, 16, 2), "Elements 0, 2 .. 14 of x followed by y.")
odd8 = _two_vector_shuffle(range(1, 16, 2), "Elements 1, 3 .. 15 of x followed by y.")
zip_low8 = _two_vector_shuffle([0, 8, 1, 9, 2, 10, 3, 11], "x0 y0 x1 y1 x2 y2 x3 y3.")
zip_high8 = _two_vector_shuffle([4, 12, 5, 13, 6, 14, 7, 15], "x4 y4 x5 y5 x6 y6 x7 y7.")


# --- magnitudes and integers ------------------------------------------------------------------------------


def _emit_max_magnitude(b, x, y):
    ints = vector(I32, x.type.count)
    low, high = (b.and_(b.bitcast(v, ints), const(ints, 0x7FFFFFFF)) for v in (x, y))
    return b.bitcast(b.select(b.icmp_signed(">", low, high), low, high), x.type)


@intrinsic
def max_magnitude8(typingctx, x, y):
    """Lane-wise larger of |x| and |y|; a NaN is larger than everything, so that it is not lost."""

    def codegen(context, b, signature, args):
        return _emit_max_magnitude(b, *args)

    return f32x8(f32x8, f32x8), codegen


hmax_magnitude8 = _fold("Largest magnitude of the lanes, as `max_magnitude8`.", _emit_max_magnitude)


@intrinsic
def to_i32(typingctx, x):
    """i32x8 of integral lanes."""

    def codegen(context, b, signature, args):
        return b.fptosi(args[0], i32x8.llvm)

    return i32x8(f32x8), codegen


@intrinsic
def store8_i8(typingctx, address, x):
    """Store the low bytes of an i32x8."""

    def codegen(context, b, signature, args):
        store_as(b, args[0], b.trunc(args[1], vector(I8, LANES)))
        return context.get_dummy_value()

    return types.void(types.int64, i32x8), codegen


@intrinsic
def store8_i16(typingctx, address, x):
    """Store the low halves of an i32x8."""

    def codegen(context, b, signature, args):
        store_as(b, args[0], b.trunc(args[1], vector(I16, LANES)))
        return context.get_dummy_value()

    return types.void(types.int64, i32x8), codegen


@intrinsic
def abs_i32(typingctx, x):
    """Lane-wise absolute value of an i32x8."""

    def codegen(context, b, signature, args):
        return b.select(b.icmp_signed("<", args[0], const(i32x8.llvm, 0)), b.neg(args[0]), args[0])

    return i32x8(i32x8), codegen


@intrinsic
def swap_middle_i32(typingctx, x):
    """Lanes 0 2 1 3 4 6 5 7: within each four, the middle two change places."""

    def codegen(context, b, signature, args):
        return shuffle(b, args[0], args[0], [0, 2, 1, 3, 4, 6, 5, 7])

    return i32x8(i32x8), codegen


@type_callable(operator.add)
def _type_add_i32(context):
    def resolve(x, y):
        return i32x8 if x is i32x8 and y is i32x8 else None

    return resolve


@lower_builtin(operator.add, _I32x8, _I32x8)
def _lower_add_i32(context, b, signature, args):
    return b.add(*args)


sum_i32 = _fold("Sum of the lanes of an i32x8.", lambda b, x, y: b.add(x, y), i32x8, types.int32)


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at `address`, into all levels. Never faults."""

    def codegen(context, b, signature, args):
        flags = [ir.Constant(I32, v) for v in (0, 3, 1)]  # read, keep, data
        call_llvm(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, args[0], I8), *flags)
        return context.get_dummy_value()

    return types.void(types.int64), codegen
