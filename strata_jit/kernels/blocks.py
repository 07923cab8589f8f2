"""How the blocks of the quantised types turn into integers: emitted LLVM code, the same for all types.

Owns the reading of octet payloads (`kernels/layout.py` has the byte layout) for one block of 8 rows: the
exact integer block sums against int8 activations, and the unpacking into scaled int16 for many tokens.
Knows no loop over blocks, no float and no instruction set: see `kernels/dot.py` and `kernels/isa/`. What
types differ in stands in `kernels/weights.py`.

Words: V as there. Activations `pairs`: per 32 columns 32 bytes a, then 32 bytes |a|; `sums`: int16 sums of a
over 16 columns, of a 256-column block in the order 0 2 1 3 of each four.
"""

from llvmlite import ir
from numba.core import cgutils

from strata_jit.kernels.isa.portable import V8I32, V16I16, V32I8
from strata_jit.kernels.vec import I32, I64, const, load_as, shuffle, splat, store_as
from strata_jit.kernels.weights import QUADS, SUB, emit_weights

# --- one token: block sums --------------------------------------------------------------------------------


def broadcast(b, address, offset):
    """The 4 bytes at address + offset in every 32-bit lane, as <32 x i8>."""
    return b.bitcast(splat(b, load_as(b, address, I32, offset)), V32I8)


def _for_scale_groups(b, fmt, payload, body):
    """Emit a loop over the sub-blocks, those that share a vector of scales at a time.

    body(scales, codes, first): addresses of the vector of scales and of the group's first codes, and the
    group's first sub-block; called once, since the rounds differ in these values alone.
    """
    n_group = fmt.sub_blocks_per_scales
    if n_group == fmt.n_sub:
        body(payload, b.add(payload, ir.Constant(I64, fmt.codes)), ir.Constant(I64, 0))
        return
    with cgutils.for_range(b, ir.Constant(I64, fmt.n_sub // n_group), intp=I64) as loop:
        scales = b.add(payload, b.mul(loop.index, ir.Constant(I64, 32)))
        first = b.mul(loop.index, ir.Constant(I64, fmt.sub_bytes * n_group))
        codes = b.add(payload, b.add(first, ir.Constant(I64, fmt.codes)))
        body(scales, codes, b.mul(loop.index, ir.Constant(I64, n_group)))


def _sub_scales(b, isa, fmt, scales, i):
    """int16 scales of a group's sub-block i, one for each vector V; ones where the type has none."""
    if not fmt.scale_columns:
        return [const(V16I16, 1)] * QUADS
    per_sub = SUB // fmt.scale_columns
    source = _scale_bytes(b, fmt, scales)
    parts = [isa.scale16(b, source, i * per_sub + k) for k in range(per_sub)]
    return [part for part in parts for _ in range(QUADS // per_sub)]


def _scale_bytes(b, fmt, scales):
    """The vector of scales, 4 a row, at `scales`."""
    source = load_as(b, scales, V32I8)
    return b.and_(source, const(V32I8, 0x0F)) if fmt.packed_mins else source


def emit_block_sum(b, isa, fmt, payload, pairs, sums):
    """sum_j scale_j * sum((w + offset) * a) of one block, exact: <8 x i32>, one row a lane.

    The format's offset is for `emit_offset_sum` to take off, but `dot4` begins without it.
    """
    total = cgutils.alloca_once(b, V8I32)
    b.store(const(V8I32, 0), total)

    def group(scales, codes, first_sub):
        act = b.add(pairs, b.mul(first_sub, ir.Constant(I64, 2 * SUB)))
        for i in range(fmt.sub_blocks_per_scales):
            weights = emit_weights(b, isa, fmt, codes, fmt.sub_bytes * i)
            if isa.byte_dots:
                sums_at = b.add(sums, b.mul(first_sub, ir.Constant(I64, 4)))
                part = _sub_block_dot(b, isa, fmt, weights, scales, i, act, sums_at)
            else:
                factors = _sub_scales(b, isa, fmt, scales, i)
                part = _sub_block_sum(b, isa, fmt, weights, factors, act, 2 * SUB * i)
            b.store(b.add(b.load(total), part), total)

    _for_scale_groups(b, fmt, payload, group)
    return b.load(total)


def _sub_block_sum(b, isa, fmt, weights, scales, act, offset):
    """scale * sum(w*a) of one sub-block; `act` + offset: its 32 bytes a, then 32 bytes |a|."""
    combine = getattr(isa, fmt.pairs)
    total = None
    for first in range(0, QUADS, fmt.group):
        joint = None
        for i in range(first, first + fmt.group):
            a = broadcast(b, act, offset + 4 * i)
            extra = (broadcast(b, act, offset + SUB + 4 * i),) if combine == isa.pairs_signed else ()
            products = combine(b, weights[i], a, *extra)
            joint = products if joint is None else b.add(joint, products)
        part = isa.madd(b, joint, scales[first])
        total = part if total is None else b.add(total, part)
    return total


def _sub_block_dot(b, isa, fmt, weights, scales, sub, act, sums):
    """scale * sum(w*a) by dot products of four bytes: sub-block `sub` of those that share `scales`.

    |sum((w + offset) * a)| <= 32 * 255 * 127 < 2**20 and |scale| <= 128: exact in int32 for a whole block.
    """
    total, span = None, fmt.vectors_per_scale
    for k in range(QUADS // span):
        part = emit_dot_start(b, isa, fmt, sums, sub, k)
        for i in range(span * k, span * k + span):
            part = isa.dot4(b, part, weights[i], broadcast(b, act, 2 * SUB * sub + 4 * i))
        if fmt.scale_columns:
            part = b.mul(part, _scale32(b, fmt, scales, sub * (QUADS // span) + k))
        total = part if total is None else b.add(total, part)
    return total


def _scale32(b, fmt, scales, t):
    """<8 x i32>: byte t (signed) of each row's scales."""
    lanes = b.bitcast(_scale_bytes(b, fmt, scales), V8I32)
    return b.ashr(b.shl(lanes, const(V8I32, 24 - 8 * t)), const(V8I32, 24))


def emit_dot_start(b, isa, fmt, sums, sub, k):
    """-offset * sum(a) of the k-th scale's columns in sub-block `sub` from an even one on, at `sums`."""
    if not fmt.offset:
        return const(V8I32, 0)
    if fmt.n_sub == 1:
        return isa.madd(b, const(V16I16, -fmt.offset), _pair_of_sums(b, sums, 0))
    pair, half = sub // 2 * 2, sub % 2  # sums of 16 columns stand in the order 0 2 1 3
    if fmt.scale_columns == SUB:
        a = b.add(_pair_of_sums(b, sums, pair), _pair_of_sums(b, sums, pair + 1))
    else:
        a = _pair_of_sums(b, sums, pair + k)
    return isa.madd(b, const(V16I16, [-fmt.offset if i % 2 == half else 0 for i in range(16)]), a)


def emit_offset_sum(b, isa, fmt, payload, sums):
    """What `emit_block_sum` is too large by: offset * sum_j scale_j * sum(a), exact: <8 x i32>."""
    if not fmt.scale_columns:
        return emit_min_sum(b, isa, fmt, [const(V16I16, fmt.offset)], sums)
    scales = [load_as(b, payload, V32I8, at) for at in range(0, fmt.scales, 32)]
    total = emit_min_sum(b, isa, fmt, _byte_pairs(b, fmt, scales), sums)
    return b.mul(total, const(V8I32, fmt.offset))


def emit_min_pairs(b, payload, fmt):
    """Mins of a block in the <16 x i16> that `emit_min_sum` takes; ones where a block has one float min."""
    if not fmt.scale_columns:
        return [const(V16I16, 1)]
    if fmt.packed_mins:
        packed = [load_as(b, payload, V32I8, at) for at in range(0, fmt.scales, 32)]
        return _byte_pairs(b, fmt, [b.lshr(v, const(V32I8, 4)) for v in packed])
    return _byte_pairs(b, fmt, [load_as(b, payload, V32I8, fmt.scales + at) for at in range(0, fmt.mins, 32)])


def _byte_pairs(b, fmt, vectors):
    """Scales or mins, 4 a row and vector, as pairs of int16: two <16 x i16> a vector, lane r of row r.

    Numbers (0, 1) and (2, 3) of each four where they belong to 32 columns, (0, 2) and (1, 3) to 16: as
    `emit_min_sum` finds the sums of a.
    """
    zero, eight, pairs = const(V32I8, 0), const(V16I16, 8), []
    for v in vectors:
        if fmt.scale_columns == SUB:  # these are not negative
            for first in (0, 2):
                lanes = [4 * (i // 4) + first + i // 2 % 2 if i % 2 == 0 else 32 for i in range(32)]
                pairs.append(b.bitcast(shuffle(b, v, zero, lanes), V16I16))
        else:
            lanes = b.bitcast(v, V16I16)
            pairs += [b.ashr(b.shl(lanes, eight), eight), b.ashr(lanes, eight)]
    return pairs


def emit_min_sum(b, isa, fmt, pairs, sums):
    """sum_j m_j * (sum of a over m_j's columns), exact: <8 x i32>. `sums`: address of the block's sums."""
    total = None
    for q, mins in enumerate(pairs):
        if fmt.scale_columns == SUB:
            a = b.add(_pair_of_sums(b, sums, 2 * q), _pair_of_sums(b, sums, 2 * q + 1))
        else:
            a = _pair_of_sums(b, sums, q)
        part = isa.madd(b, mins, a)
        total = part if total is None else b.add(total, part)
    return total


def _pair_of_sums(b, sums, i):
    return b.bitcast(splat(b, load_as(b, sums, I32, 4 * i)), V16I16)


# --- many tokens: scaled int16 ----------------------------------------------------------------------------


def emit_unpack(b, isa, fmt, payload, target):
    """Store scale*w of one block as int16: per V two vectors, columns (0, 2) and (1, 3) of each lane.

    |scale*w| <= 32*128 (Q6_K), so int16 holds it; the products with int8 activations sum exactly in int32.
    """

    def group(scales, codes, first_sub):
        to = b.add(target, b.mul(first_sub, ir.Constant(I64, 64 * QUADS)))
        for i in range(fmt.sub_blocks_per_scales):
            weights = emit_weights(b, isa, fmt, codes, fmt.sub_bytes * i)
            if fmt.offset:
                weights = [b.sub(w, const(V32I8, fmt.offset)) for w in weights]
            factors = _sub_scales(b, isa, fmt, scales, i) if fmt.scale_columns else None
            _store_unpacked(b, weights, factors, to, 64 * QUADS * i)

    _for_scale_groups(b, fmt, payload, group)


def _store_unpacked(b, weights, factors, target, offset):
    eight = const(V16I16, 8)
    for i, weight in enumerate(weights):
        lanes = b.bitcast(weight, V16I16)
        for half, columns in enumerate((b.ashr(b.shl(lanes, eight), eight), b.ashr(lanes, eight))):
            scaled = columns if factors is None else b.mul(columns, factors[i])
            store_as(b, target, scaled, offset + 64 * i + 32 * half)


# --- many tokens by dot products of bytes ------------------------------------------------------------------

BYTE_SCALES = 2048
"""Offset in an unpacked block of its scales, behind 64 V."""


def emit_unpack_bytes(b, isa, fmt, payload, target):
    """Store w + offset of one block, V by V, and from `BYTE_SCALES` on its scales as <8 x i32> each."""
    per_sub = QUADS // fmt.vectors_per_scale

    def group(scales, codes, first_sub):
        to = b.add(target, b.mul(first_sub, ir.Constant(I64, 32 * QUADS)))
        scales_to = b.add(target, b.mul(first_sub, ir.Constant(I64, 32 * per_sub)))
        for i in range(fmt.sub_blocks_per_scales):
            for v, weight in enumerate(emit_weights(b, isa, fmt, codes, fmt.sub_bytes * i)):
                store_as(b, to, weight, 32 * (QUADS * i + v))
            for t in range(i * per_sub, (i + 1) * per_sub) if fmt.scale_columns else ():
                store_as(b, scales_to, _scale32(b, fmt, scales, t), BYTE_SCALES + 32 * t)

    _for_scale_groups(b, fmt, payload, group)


def emit_byte_tile(b, isa, fmt, unpacked, pairs, sums, totals):
    """Add the sums of one block to `totals` [octet][token] of slots of <8 x i32>.

    unpacked    addresses of the octets' unpacked blocks
    pairs, sums addresses of the block's planes in each token's activation row
    """
    span = fmt.vectors_per_scale
    per_sub, unrolled = QUADS // span, min(fmt.n_sub, 2)
    with cgutils.for_range(b, ir.Constant(I64, fmt.n_sub // unrolled), intp=I64) as loop:

        def at(addresses, stride):
            step = b.mul(loop.index, ir.Constant(I64, stride * unrolled))
            return [b.add(address, step) for address in addresses]

        weights, scales = at(unpacked, 32 * QUADS), at(unpacked, 32 * per_sub)
        acts, sums_at = at(pairs, 2 * SUB), at(sums, 4)
        for group in range(unrolled * per_sub):
            sub, k = divmod(group, per_sub)
            starts = [emit_dot_start(b, isa, fmt, address, sub, k) for address in sums_at]
            parts = [list(starts) for _ in unpacked]
            for i in range(span * k, span * k + span):
                w = [load_as(b, address, V32I8, 32 * (QUADS * sub + i)) for address in weights]
                for t, act in enumerate(acts):
                    a = broadcast(b, act, 2 * SUB * sub + 4 * i)
                    for o, part in enumerate(parts):
                        part[t] = isa.dot4(b, part[t], w[o], a)
            for o, part in enumerate(parts):
                scale = load_as(b, scales[o], V8I32, BYTE_SCALES + 32 * group) if fmt.scale_columns else None
                for slot, value in zip(totals[o], part, strict=True):
                    b.store(b.add(b.load(slot), b.mul(value, scale) if scale else value), slot)
