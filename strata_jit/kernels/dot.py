"""Dot products of octets with activation rows: one kernel for one token, one for many, for every type.

Owns the loops over octets and blocks and the float order (docs/kernels.md); the integers of a block come from
`kernels/blocks.py`. C signatures, all arguments int64:

one:  (w, octet_stride, n_octets, n_cols, act, out)
      out float32[8 * n_octets] = rows . activation
many: (w, octet_stride, n_octets, n_cols, n_tok, acts, outs, scratch)
      acts, outs int64[n_tok]: addresses of activation rows and of float32[8 * n_octets];
      scratch of `many_scratch_bytes(n_tok)`

`w` is the first octet, `act` a row of the kind that the type reads (`kernels/layout.py`). Both kernels give
the same bits for the same row and token.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from strata_jit.kernels._jit import OVERLOAD_OPTIONS, callback
from strata_jit.kernels.blocks import (
    emit_block_sum,
    emit_byte_tile,
    emit_min_pairs,
    emit_min_sum,
    emit_offset_sum,
    emit_unpack,
    emit_unpack_bytes,
)
from strata_jit.kernels.dot_float import FLOAT_TYPES, float_one
from strata_jit.kernels.isa import ISAS
from strata_jit.kernels.isa.portable import V8I32, V16I16
from strata_jit.kernels.layout import STORE_TYPES
from strata_jit.kernels.prefetch import PREFETCH_BYTES, emit_prefetch
from strata_jit.kernels.vec import (
    F32,
    I8,
    I16,
    I32,
    I64,
    call_llvm,
    const,
    emit_fma,
    emit_half_to_f32,
    f32x8,
    load8,
    load_as,
    load_i64,
    splat,
    splat8,
    store8,
    store_as,
    vector,
)
from strata_jit.kernels.weights import FORMATS, format_for

UNPACKED_BYTES = 4096 + 256
"""Scratch of one unpacked octet block: 256 columns x 8 rows int16, then up to eight vectors of mins."""
TILE_TOKENS = 4


def many_scratch_bytes(n_tok):
    """Scratch that a many-token kernel needs for n_tok tokens."""
    return 2 * UNPACKED_BYTES + 64 * n_tok


def _literals(*values):
    return all(isinstance(v, types.Literal) for v in values)


# --- pieces that are emitted ------------------------------------------------------------------------------


def _half8(context, b, address, offset):
    """f32x8 from the eight f16 at address + offset."""
    return emit_half_to_f32(context, b, load_as(b, address, vector(I16, 8), offset))


def _power8(b, address):
    """f32x8 of 2**(e - 128) from the eight bytes e at `address`; 0 and 1 give subnormal numbers."""
    e = b.zext(load_as(b, address, vector(I8, 8)), V8I32)
    normal = b.sub(b.shl(e, const(V8I32, 23)), const(V8I32, 1 << 23))  # less than the other for e < 2
    subnormal = b.add(b.shl(e, const(V8I32, 21)), const(V8I32, 1 << 21))
    subnormal = call_llvm(b, "llvm.smin.v8i32", V8I32, subnormal, const(V8I32, 1 << 22))
    return b.bitcast(call_llvm(b, "llvm.smax.v8i32", V8I32, normal, subnormal), f32x8.llvm)


def _emit_d(context, b, fmt, head):
    """f32x8: the scales d of a block whose part of the header is at `head`."""
    if fmt.exponents:
        return _power8(b, head)
    d = _half8(context, b, head, 0)
    return d if fmt.d_factor == 1 else b.fmul(d, const(f32x8.llvm, fmt.d_factor))


def _emit_dmin(context, b, fmt, head):
    """f32x8: m of a block, or -dmin."""
    dmin = _half8(context, b, head, 16)
    return dmin if fmt.adds_min else b.fneg(dmin)


def _accumulate(b, integers, scale, acc):
    """acc + float(integers) * scale by one fma."""
    return emit_fma(b, b.sitofp(integers, f32x8.llvm), scale, acc)


@intrinsic(prefer_literal=True)
def block_dot(typingctx, name, isa, acc, head, payload, pairs, d, sums):
    """acc plus one block: `head` its d (and dmin or m), `d` the activation scale, `sums` the block's sums."""
    if not _literals(name, isa):
        return None
    type_name, target = name.literal_value, ISAS[isa.literal_value]

    def codegen(context, b, signature, args):
        _, _, acc, head, payload, pairs, d, sums = args
        fmt = format_for(type_name, target)
        emit_prefetch(b, payload, PREFETCH_BYTES, fmt.store.payload_bytes)
        da = splat(b, load_as(b, d, F32))
        total = emit_block_sum(b, target, fmt, payload, pairs, sums)
        if fmt.offset and not target.byte_dots:
            total = b.sub(total, emit_offset_sum(b, target, fmt, payload, sums))
        acc = _accumulate(b, total, b.fmul(_emit_d(context, b, fmt, head), da), acc)
        if fmt.has_min:
            minimum = emit_min_sum(b, target, fmt, emit_min_pairs(b, payload, fmt), sums)
            acc = _accumulate(b, minimum, b.fmul(_emit_dmin(context, b, fmt, head), da), acc)
        return acc

    return f32x8(name, isa, f32x8, *[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def block_unpack(typingctx, name, isa, payload, target_address):
    """Scaled int16 weights of one block (and its min pairs) at `target_address`."""
    if not _literals(name, isa):
        return None
    type_name, target = name.literal_value, ISAS[isa.literal_value]

    def codegen(context, b, signature, args):
        _, _, payload, address = args
        fmt = format_for(type_name, target)
        emit_prefetch(b, payload, PREFETCH_BYTES, fmt.store.payload_bytes)
        (emit_unpack_bytes if target.byte_dots else emit_unpack)(b, target, fmt, payload, address)
        if fmt.min_vectors:
            for q, mins in enumerate(emit_min_pairs(b, payload, fmt)):
                store_as(b, address, mins, 4096 + 32 * q)
        return context.get_dummy_value()

    return types.void(name, isa, types.int64, types.int64), codegen


def _tile_sums(b, target, fmt, unpacked, activations, sums_at):
    """Integer sums [octet][token] of one block: 2 octets x the activations' addresses (a16 or pairs)."""
    n_tok = len(activations)
    sums = [[cgutils.alloca_once_value(b, const(V8I32, 0)) for _ in range(n_tok)] for _ in range(2)]
    for row in sums:
        for slot in row:
            b.store(const(V8I32, 0), slot)
    if target.byte_dots:
        octets = [unpacked, b.add(unpacked, ir.Constant(I64, UNPACKED_BYTES))]
        emit_byte_tile(b, target, fmt, octets, activations, sums_at, sums)
        return [[b.load(slot) for slot in row] for row in sums]
    quads = ir.Constant(I64, fmt.store.block_cols // 4)
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), quads, ir.Constant(I64, 2), I64) as (quad, _):
        weight_at = b.add(unpacked, b.mul(quad, ir.Constant(I64, 64)))
        step = b.mul(quad, ir.Constant(I64, 8))
        act_at = [b.add(a, step) for a in activations]
        for part in range(4):
            weights = [load_as(b, weight_at, V16I16, UNPACKED_BYTES * o + 32 * part) for o in range(2)]
            for t in range(n_tok):
                a = b.bitcast(splat(b, load_as(b, act_at[t], I32, 4 * part)), V16I16)
                for o in range(2):
                    slot = sums[o][t]
                    b.store(b.add(b.load(slot), target.madd(b, weights[o], a)), slot)
    return [[b.load(slot) for slot in row] for row in sums]


def _load_mins(b, unpacked, fmt, offset):
    """The pairs of mins that `block_unpack` has left behind the weights, or ones."""
    if not fmt.min_vectors:
        return emit_min_pairs(b, None, fmt)
    return [load_as(b, unpacked, V16I16, offset + 4096 + 32 * q) for q in range(fmt.min_vectors)]


@intrinsic(prefer_literal=True)
def block_tile(
    typingctx, name, isa, n_tok, unpacked, head0, head1, acts, act_offset, d_offset, sums_offset, accs
):
    """Add one block of two unpacked octets to the float accumulators of n_tok tokens.

    acts: address of int64[n_tok] activation rows; *_offset: where this block's planes start in such a row;
    accs: float32[n_tok][2][8].
    """
    if not _literals(name, isa, n_tok):
        return None
    type_name, target, count = name.literal_value, ISAS[isa.literal_value], n_tok.literal_value

    def codegen(context, b, signature, args):
        unpacked, head0, head1, acts, act_offset, d_offset, sums_offset, accs = args[3:]
        fmt = format_for(type_name, target)
        rows = [load_as(b, acts, I64, 8 * t) for t in range(count)]
        act_at, sums_at = ([b.add(row, offset) for row in rows] for offset in (act_offset, sums_offset))
        sums = _tile_sums(b, target, fmt, unpacked, act_at, sums_at)
        # every load comes before the first store, which might alias it for all that LLVM knows
        tile = [(t, o) for t in range(count) for o in range(2)]
        d = [_emit_d(context, b, fmt, head) for head in (head0, head1)]
        da = [splat(b, load_as(b, b.add(row, d_offset), F32)) for row in rows]
        results = [load_as(b, accs, f32x8.llvm, 64 * t + 32 * o) for t, o in tile]
        for i, (t, o) in enumerate(tile):
            results[i] = _accumulate(b, sums[o][t], b.fmul(d[o], da[t]), results[i])
        if fmt.has_min:
            dmin = [_emit_dmin(context, b, fmt, head) for head in (head0, head1)]
            mins = [_load_mins(b, unpacked, fmt, UNPACKED_BYTES * o) for o in range(2)]
            for i, (t, o) in enumerate(tile):
                minimum = emit_min_sum(b, target, fmt, mins[o], b.add(rows[t], sums_offset))
                results[i] = _accumulate(b, minimum, b.fmul(dmin[o], da[t]), results[i])
        for (t, o), result in zip(tile, results, strict=True):
            store_as(b, accs, result, 64 * t + 32 * o)
        return context.get_dummy_value()

    return types.void(name, isa, n_tok, *[types.int64] * 8), codegen


# --- kernels ----------------------------------------------------------------------------------------------
# Each loop is an overload on the literal type and ISA names, so that what Numba caches (the C callbacks at
# the end) closes over two strings alone: a dispatcher in a closure would change the cache key every time.


def one_loop(name, isa, w, octet_stride, n_octets, n_cols, act, out):
    """The one-token kernel of type `name`; nopython only."""
    raise NotImplementedError("one_loop runs in nopython code only")


def many_loop(name, isa, w, octet_stride, n_octets, n_cols, n_tok, acts, outs, scratch):
    """The many-token kernel of type `name`; nopython only."""
    raise NotImplementedError("many_loop runs in nopython code only")


@overload(one_loop, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _one_loop(name, isa, w, octet_stride, n_octets, n_cols, act, out):
    type_name = name.literal_value
    return float_one(STORE_TYPES[type_name]) if type_name in FLOAT_TYPES else _quant_one(FORMATS[type_name])


@overload(many_loop, prefer_literal=True, jit_options=OVERLOAD_OPTIONS)
def _many_loop(name, isa, w, octet_stride, n_octets, n_cols, n_tok, acts, outs, scratch):
    if name.literal_value in FLOAT_TYPES:
        return _float_many
    return _quant_many(FORMATS[name.literal_value], ISAS[isa.literal_value].byte_dots)


def _quant_one(fmt):
    block_cols, payload_bytes = fmt.store.block_cols, fmt.store.payload_bytes
    head_bytes, sums_bytes = fmt.store.header_bytes, fmt.sums_bytes

    def loop(name, isa, w, octet_stride, n_octets, n_cols, act, out):
        n_blocks = n_cols // block_cols
        first_payload = (head_bytes * n_blocks + 63) // 64 * 64
        d = act + 4 * n_cols
        sums = d + (4 * n_blocks + 63) // 64 * 64
        for o in range(n_octets):
            head = w + o * octet_stride
            payload = head + first_payload
            acc = splat8(0.0)
            for block in range(n_blocks):
                pairs = act + 2 * block_cols * block
                acc = block_dot(
                    name, isa, acc, head, payload, pairs, d + 4 * block, sums + sums_bytes * block
                )
                head += head_bytes
                payload += payload_bytes
            store8(out + 32 * o, acc)

    return loop


def _quant_many(fmt, byte_dots):
    block_cols, payload_bytes = fmt.store.block_cols, fmt.store.payload_bytes
    head_bytes, sums_bytes = fmt.store.header_bytes, fmt.sums_bytes
    a_plane = 0 if byte_dots else 2  # pairs or a16, in units of n_cols

    def loop(name, isa, w, octet_stride, n_octets, n_cols, n_tok, acts, outs, scratch):
        n_blocks = n_cols // block_cols
        first_payload = (head_bytes * n_blocks + 63) // 64 * 64
        d_plane = 4 * n_cols
        sums_plane = d_plane + (4 * n_blocks + 63) // 64 * 64
        accs = scratch + 2 * UNPACKED_BYTES
        for o in range(0, n_octets, 2):
            # an odd last octet is done twice, to the same place
            last = min(o + 1, n_octets - 1)
            octet0, octet1 = w + o * octet_stride, w + last * octet_stride
            for t in range(2 * n_tok):
                store8(accs + 32 * t, splat8(0.0))
            for block in range(n_blocks):
                payload = first_payload + payload_bytes * block
                for second in range(2):
                    source = (octet1 if second else octet0) + payload
                    block_unpack(name, isa, source, scratch + second * UNPACKED_BYTES)
                head0, head1 = octet0 + head_bytes * block, octet1 + head_bytes * block
                a = a_plane * n_cols + 2 * block_cols * block
                d, sums = d_plane + 4 * block, sums_plane + sums_bytes * block
                t = 0
                while t + TILE_TOKENS <= n_tok:
                    at, acc = acts + 8 * t, accs + 64 * t
                    block_tile(name, isa, TILE_TOKENS, scratch, head0, head1, at, a, d, sums, acc)
                    t += TILE_TOKENS
                while t < n_tok:
                    at, acc = acts + 8 * t, accs + 64 * t
                    block_tile(name, isa, 1, scratch, head0, head1, at, a, d, sums, acc)
                    t += 1
            for t in range(n_tok):
                out = load_i64(outs + 8 * t)
                store8(out + 32 * o, load8(accs + 64 * t))
                store8(out + 32 * last, load8(accs + 64 * t + 32))

    return loop


def _float_many(name, isa, w, octet_stride, n_octets, n_cols, n_tok, acts, outs, scratch):
    # octet by octet, so that its weights are read from memory once
    for o in range(n_octets):
        for t in range(n_tok):
            act, out = load_i64(acts + 8 * t), load_i64(outs + 8 * t) + 32 * o
            one_loop(name, isa, w + o * octet_stride, octet_stride, 1, n_cols, act, out)


def dot_one_kernel(name, isa):
    """Compiled C callback for one token, of the stored type `name` and the instruction set `isa`."""

    @callback(6)
    def dot_one(w, octet_stride, n_octets, n_cols, act, out):
        one_loop(name, isa, w, octet_stride, n_octets, n_cols, act, out)

    return dot_one


def dot_many_kernel(name, isa):
    """Compiled C callback for many tokens, of the stored type `name` and the instruction set `isa`."""

    @callback(8)
    def dot_many(w, octet_stride, n_octets, n_cols, n_tok, acts, outs, scratch):
        many_loop(name, isa, w, octet_stride, n_octets, n_cols, n_tok, acts, outs, scratch)

    return dot_many
