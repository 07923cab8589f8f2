"""How the blocks of each quantised type turn into integers: emitted LLVM code, one function a type.

Owns the reading of octet payloads (`kernels/layout.py` has the byte layout) for one block of 8 rows: the
exact integer block sums against int8 activations, and the unpacking into scaled int16 for many tokens.
Knows no loop over blocks, no float and no instruction set: see `kernels/dot.py` and `kernels/isa/`.

Words: V is a vector of 32 weights, 4 consecutive columns of 8 rows (row r in bytes 4r .. 4r+3); a sub-block
is 32 columns, V_0 .. V_7. Activations `pairs`: per 32 columns 32 bytes a, then 32 bytes |a|.
"""

from dataclasses import dataclass

from llvmlite import ir
from numba.core import cgutils

from strata_jit.kernels.isa.portable import V8I32, V16I16, V32I8
from strata_jit.kernels.layout import STORE_TYPES, StoreType
from strata_jit.kernels.vec import I32, I64, const, load_as, splat, store_as

KVALUES_IQ4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Code book of IQ4_NL and IQ4_XS; ggml-common.h, kvalues_iq4nl."""

SUB = 32
"""Columns of a sub-block."""
QUADS = 8
"""Vectors V of a sub-block, 4 columns each."""


@dataclass(frozen=True)
class BlockFormat:
    """What the dot kernels must know of a type beyond its sizes; bytes are those of an octet."""

    store: StoreType
    scale_columns: int
    """Columns that share an integer sub-scale; 0 = no sub-scales."""
    scales: int
    """Bytes of sub-scales at the start of the payload."""
    sub_bytes: int
    """Payload bytes of a sub-block after scales and mins."""
    pairs: str = "pairs_signed"
    """Method of the instruction set that multiplies these weights with activations."""
    group: int = 1
    """Vectors V whose int16 pair sums may be added before widening: group * 2 * max|w| * 127 < 2**15."""

    @property
    def has_min(self):
        """Whether a min term is subtracted (Q4_K, Q5_K)."""
        return self.store.header_bytes == 32

    @property
    def n_sub(self):
        """Sub-blocks of a block."""
        return self.store.block_cols // SUB

    @property
    def sub_blocks_per_scales(self):
        """Sub-blocks that one vector of scales (4 a row) serves."""
        return min(self.n_sub, 4 * self.scale_columns // SUB) if self.scale_columns else self.n_sub

    @property
    def codes(self):
        """Offset of the first sub-block's codes in the payload."""
        return self.scales + (64 if self.has_min else 0)


FORMATS = {
    "IQ4_XS": BlockFormat(STORE_TYPES["IQ4_XS"], 32, 64, 128),
    "IQ4_NL": BlockFormat(STORE_TYPES["IQ4_NL"], 0, 0, 128),
    "Q8_0": BlockFormat(STORE_TYPES["Q8_0"], 0, 0, 256, pairs="pairs_wide"),
    "Q4_K": BlockFormat(STORE_TYPES["Q4_K"], 32, 64, 128, pairs="pairs_unsigned", group=8),
    "Q5_K": BlockFormat(STORE_TYPES["Q5_K"], 32, 64, 160, pairs="pairs_unsigned", group=4),
    "Q6_K": BlockFormat(STORE_TYPES["Q6_K"], 16, 128, 192, group=4),
}


# --- weights of a sub-block ---------------------------------------------------------------------------


def _nibbles(b, address, offset):
    """Low and high nibbles of the 32 bytes at address + offset."""
    packed = load_as(b, address, V32I8, offset)
    mask = const(V32I8, 0x0F)
    shifted = b.bitcast(b.lshr(b.bitcast(packed, V16I16), const(V16I16, 4)), V32I8)
    return b.and_(packed, mask), b.and_(shifted, mask)


def _codes(b, address, offset):
    """The eight raw 4-bit code vectors of a sub-block."""
    return [v for i in range(QUADS // 2) for v in _nibbles(b, address, offset + 32 * i)]


def _bit_field(b, packed, low_bit, width, place):
    """Bits low_bit .. low_bit+width-1 of each byte, moved to bit `place`."""
    lanes, shift = b.bitcast(packed, V16I16), place - low_bit
    if shift > 0:
        lanes = b.shl(lanes, const(V16I16, shift))
    elif shift < 0:
        lanes = b.lshr(lanes, const(V16I16, -shift))
    return b.and_(b.bitcast(lanes, V32I8), const(V32I8, ((1 << width) - 1) << place))


def _weights_iq4(b, isa, address, offset):
    return [isa.lookup16(b, KVALUES_IQ4NL, code) for code in _codes(b, address, offset)]


def _weights_q8_0(b, isa, address, offset):
    return [load_as(b, address, V32I8, offset + 32 * i) for i in range(QUADS)]


def _weights_q4_k(b, isa, address, offset):
    return _codes(b, address, offset)


def _weights_q5_k(b, isa, address, offset):
    high = load_as(b, address, V32I8, offset + 128)
    return [b.or_(code, _bit_field(b, high, i, 1, 4)) for i, code in enumerate(_codes(b, address, offset))]


def _weights_q6_k(b, isa, address, offset):
    highs = [load_as(b, address, V32I8, offset + 128 + 32 * h) for h in range(2)]
    return [
        b.sub(b.or_(code, _bit_field(b, highs[i // 4], 2 * (i % 4), 2, 4)), const(V32I8, 32))
        for i, code in enumerate(_codes(b, address, offset))
    ]


_WEIGHTS = {
    "IQ4_XS": _weights_iq4,
    "IQ4_NL": _weights_iq4,
    "Q8_0": _weights_q8_0,
    "Q4_K": _weights_q4_k,
    "Q5_K": _weights_q5_k,
    "Q6_K": _weights_q6_k,
}


# --- one token: block sums --------------------------------------------------------------------------------


def _broadcast(b, address, offset):
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
    source = load_as(b, scales, V32I8)
    parts = [isa.scale16(b, source, i * per_sub + k) for k in range(per_sub)]
    return [part for part in parts for _ in range(QUADS // per_sub)]


def emit_block_sum(b, isa, name, payload, pairs):
    """sum_j scale_j * sum(w*a) of one block, exact: <8 x i32>, one row a lane."""
    fmt = FORMATS[name]
    total = cgutils.alloca_once(b, V8I32)
    b.store(const(V8I32, 0), total)

    def group(scales, codes, first_sub):
        act = b.add(pairs, b.mul(first_sub, ir.Constant(I64, 2 * SUB)))
        for i in range(fmt.sub_blocks_per_scales):
            weights = _WEIGHTS[name](b, isa, codes, fmt.sub_bytes * i)
            part = _sub_block_sum(b, isa, fmt, weights, _sub_scales(b, isa, fmt, scales, i), act, 2 * SUB * i)
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
            a = _broadcast(b, act, offset + 4 * i)
            extra = (_broadcast(b, act, offset + SUB + 4 * i),) if combine == isa.pairs_signed else ()
            products = combine(b, weights[i], a, *extra)
            joint = products if joint is None else b.add(joint, products)
        part = isa.madd(b, joint, scales[first])
        total = part if total is None else b.add(total, part)
    return total


def emit_min_pairs(b, payload, fmt):
    """Mins of a Q4_K/Q5_K superblock as four <16 x i16>: lane r of number q holds (m_2q, m_2q+1) of row r."""
    pairs = []
    for h in range(2):
        lanes = b.bitcast(load_as(b, payload, V32I8, fmt.scales + 32 * h), V8I32)
        for q in range(2):
            low = b.and_(b.lshr(lanes, const(V8I32, 16 * q)), const(V8I32, 0xFF))
            high = b.and_(
                b.shl(lanes, const(V8I32, 8 - 16 * q)) if q == 0 else b.lshr(lanes, const(V8I32, 8)),
                const(V8I32, 0xFF0000),
            )
            pairs.append(b.bitcast(b.or_(low, high), V16I16))
    return pairs


def emit_min_sum(b, isa, min_pairs, sums):
    """sum_j m_j * (sum of a over sub-block j), exact: <8 x i32>. `sums`: address of int16[8]."""
    total = const(V8I32, 0)
    for q, mins in enumerate(min_pairs):
        activation = b.bitcast(splat(b, load_as(b, sums, I32, 4 * q)), V16I16)
        total = b.add(total, isa.madd(b, mins, activation))
    return total


# --- many tokens: scaled int16 ----------------------------------------------------------------------------


def emit_unpack(b, isa, name, payload, target):
    """Store scale*w of one block as int16: per V two vectors, columns (0, 2) and (1, 3) of each lane.

    |scale*w| <= 32*128 (Q6_K), so int16 holds it; the products with int8 activations sum exactly in int32.
    """
    fmt = FORMATS[name]

    def group(scales, codes, first_sub):
        to = b.add(target, b.mul(first_sub, ir.Constant(I64, 64 * QUADS)))
        for i in range(fmt.sub_blocks_per_scales):
            weights = _WEIGHTS[name](b, isa, codes, fmt.sub_bytes * i)
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
