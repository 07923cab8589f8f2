"""What the dot kernels know of each quantised type: its `BlockFormat`, and how its codes become weights.

Owns the reading of one sub-block's codes from an octet's payload (`kernels/layout.py` has the byte layout) as
emitted LLVM code. Knows neither scales nor activations: see `kernels/blocks.py`.

Words: V is a vector of 32 weights, 4 consecutive columns of 8 rows (row r in bytes 4r .. 4r+3); a sub-block
is 32 columns, V_0 .. V_7.
"""

from dataclasses import dataclass, replace

from strata_jit.gguf.grids import IQ3_S_VALUES, IQ3_XXS_VALUES
from strata_jit.kernels.isa.portable import V16I16, V32I8
from strata_jit.kernels.layout import STORE_TYPES, StoreType
from strata_jit.kernels.vec import const, load_as

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
    """Vectors V whose int16 pair sums may be added before widening:
    group * 2 * max|w + offset| * 127 < 2**15."""
    offset: int = 0
    """Block sums are taken of w + offset, which is unsigned, and brought down by way of the sums of a."""
    mins: int = 0
    """Bytes of mins behind the scales."""
    packed_mins: bool = False
    """Whether a byte of sub-scales holds the scale in its low and the min in its high nibble (Q2_K)."""
    exponents: bool = False
    """Whether the header holds exponents of two (MXFP4) rather than f16."""
    d_factor: float = 1.0
    """Power of two by which `d` is multiplied, so that scales and weights are integers."""

    @property
    def is_signed(self):
        """Whether codes stand for signed weights, with no offset."""
        return self.pairs != "pairs_unsigned"

    @property
    def has_min(self):
        """Whether a second term is added to the block sum: min times sum of a, or m times sum of a."""
        return self.store.header_bytes == 32

    @property
    def adds_min(self):
        """Whether that term is added (m of Q4_1 and Q5_1) rather than subtracted (mins of the K types)."""
        return self.has_min and not self.scale_columns

    @property
    def min_vectors(self):
        """Vectors of pairs of mins that a block has; 0 where its mins are not integers of its payload."""
        return self.store.block_cols // self.scale_columns // 2 if self.has_min and self.scale_columns else 0

    @property
    def n_sub(self):
        """Sub-blocks of a block."""
        return self.store.block_cols // SUB

    @property
    def vectors_per_scale(self):
        """Vectors V of a sub-block that share a scale."""
        return (self.scale_columns or SUB) // 4

    @property
    def sums_bytes(self):
        """Bytes of a block in the activation's plane of sums: int16 per 16 columns."""
        return self.store.block_cols // 8

    @property
    def sub_blocks_per_scales(self):
        """Sub-blocks that one vector of scales (4 a row) serves."""
        return min(self.n_sub, 4 * self.scale_columns // SUB) if self.scale_columns else self.n_sub

    @property
    def codes(self):
        """Offset of the first sub-block's codes in the payload."""
        return self.scales + self.mins


def _format(name, *sizes, **more):
    return BlockFormat(STORE_TYPES[name], *sizes, **more)


def _unsigned(name, *sizes, **more):
    return _format(name, *sizes, pairs="pairs_unsigned", **more)


FORMATS = {
    fmt.store.name: fmt
    for fmt in (
        _format("IQ4_XS", 32, 64, 128),
        _format("IQ4_NL", 0, 0, 128),
        _format("Q8_0", 0, 0, 256, pairs="pairs_wide"),
        _unsigned("Q4_0", 0, 0, 128, group=8, offset=8),
        _unsigned("Q4_1", 0, 0, 128, group=8),
        _unsigned("Q5_0", 0, 0, 160, group=4, offset=16),
        _unsigned("Q5_1", 0, 0, 160, group=4),
        _unsigned("MXFP4", 0, 0, 128, group=4, offset=12, exponents=True),
        _unsigned("Q2_K", 16, 128, 64, group=4, packed_mins=True),
        _unsigned("Q3_K", 16, 128, 96, group=4, offset=4),
        _unsigned("Q4_K", 32, 64, 128, group=8, mins=64),
        _unsigned("Q5_K", 32, 64, 160, group=4, mins=64),
        _unsigned("Q6_K", 16, 128, 192, group=2, offset=32),
        _unsigned("IQ3_XXS", 32, 64, 128, group=2, offset=31, d_factor=0.5),
        _unsigned("IQ3_S", 32, 64, 128, group=4, offset=15),
    )
}


def _signed_book(magnitudes):
    """Code book of 4 bits: a number of a magnitude, bit 3 the sign."""
    return (*magnitudes, *(-m for m in magnitudes))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BOOKS = {
    "IQ4_XS": _IQ4,
    "IQ4_NL": _IQ4,
    "MXFP4": _signed_book((0, 1, 2, 3, 4, 6, 8, 12)),
    "IQ3_XXS": _signed_book([value // 2 for value in IQ3_XXS_VALUES]),
    "IQ3_S": _signed_book(IQ3_S_VALUES),
}
"""Weights of the 16 codes: `kvalues_iq4nl` and `kvalues_mxfp4` of ggml-common.h, half of IQ3_XXS's."""


def format_for(name, isa):
    """How `isa` takes the block sums of a type: `FORMATS[name]`, or that with 128 added to signed weights."""
    fmt = FORMATS[name]
    return replace(fmt, pairs="pairs_unsigned", offset=128) if isa.byte_dots and fmt.is_signed else fmt


def emit_weights(b, isa, fmt, address, offset):
    """The eight V of a sub-block whose codes are at address + offset, as w + the format's offset."""
    name = fmt.store.name
    if name in BOOKS:
        table = [(value + fmt.offset + 128) % 256 - 128 for value in BOOKS[name]]  # as int8
        return [isa.lookup16(b, table, code) for code in _codes(b, address, offset)]
    weights = _WEIGHTS[name](b, address, offset)
    if fmt.offset and FORMATS[name].is_signed:
        return [b.xor(w, const(V32I8, -128)) for w in weights]
    return weights


def _nibbles(b, address, offset):
    """Low and high nibbles of the 32 bytes at address + offset."""
    packed = load_as(b, address, V32I8, offset)
    return _bit_field(b, packed, 0, 4, 0), _bit_field(b, packed, 4, 4, 0)


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


def _bit_pairs(b, address, offset, place=0):
    """Eight V of 2 bits: bits 2m and 2m + 1 of the h-th 32 bytes belong to V_4h+m."""
    packed = [load_as(b, address, V32I8, offset + 32 * h) for h in range(2)]
    return [_bit_field(b, packed[i // 4], 2 * (i % 4), 2, place) for i in range(QUADS)]


def _bits(b, address, offset, place):
    """Eight V of one bit: bit i of the 32 bytes belongs to V_i."""
    packed = load_as(b, address, V32I8, offset)
    return [_bit_field(b, packed, i, 1, place) for i in range(QUADS)]


def _join(b, low, high):
    return [b.or_(*parts) for parts in zip(low, high, strict=True)]


def _eight_bits(b, address, offset):
    return [load_as(b, address, V32I8, offset + 32 * i) for i in range(QUADS)]


def _five_bits(b, address, offset):
    return _join(b, _codes(b, address, offset), _bits(b, address, offset + 128, 4))


def _six_bits(b, address, offset):
    return _join(b, _codes(b, address, offset), _bit_pairs(b, address, offset + 128, 4))


def _three_bits(b, address, offset):
    return _join(b, _bit_pairs(b, address, offset), _bits(b, address, offset + 64, 2))


_WEIGHTS = {
    "Q8_0": _eight_bits,
    "Q4_0": _codes,
    "Q4_1": _codes,
    "Q5_0": _five_bits,
    "Q5_1": _five_bits,
    "Q2_K": _bit_pairs,
    "Q3_K": _three_bits,
    "Q4_K": _codes,
    "Q5_K": _five_bits,
    "Q6_K": _six_bits,
}
