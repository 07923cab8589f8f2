"""Rows of a GGUF file -> octets: `repack(name)` gives a compiled converter.

Owns the way from ggml's blocks (layouts: llama.cpp `ggml-common.h`) to the bytes that `kernels/layout.py`
describes. Lossless for every type: codes and scales move, no value is computed. Knows no file and no thread.

Every 32 bytes of an octet's payload hold one 32-bit word of each of its eight rows. So each block is LLVM
vector code over <8 x i32>: read the same words of eight rows, transpose them, move bits within the lanes. The
code is generic, hence the same for every CPU.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from strata_jit.kernels._jit import inline_kernel
from strata_jit.kernels.layout import ALIGN, CONVERSIONS, OCTET_ROWS, STORE_TYPES
from strata_jit.kernels.memory import u8_array, u16_array, u32_array
from strata_jit.kernels.vec import I8, I16, I32, const, emit_half_to_f32, shuffle, vector

WORDS = vector(I32, OCTET_ROWS)
HALVES = vector(I16, OCTET_ROWS)
BYTES = vector(I8, 4 * OCTET_ROWS)
LOW_NIBBLES = 0x0F0F0F0F

Value = Any  # an LLVM value; llvmlite has no type hints


class Block:
    """Emits the conversion of one block of eight rows: reads words of rows, appends vectors to the octet."""

    def __init__(self, context: Any, b: Any, rows: list[Value], header: Value, payload: Value) -> None:
        self.context = context
        self.b = b
        self.rows = rows
        self.header = header
        self.payload = payload
        self.written = 0

    def _load(self, row: Value, offset: int, llvm_type: Any) -> Value:
        at = self.b.gep(row, [I32(offset)])
        return self.b.load(self.b.bitcast(at, llvm_type.as_pointer()), align=1)

    def _store(self, base: Value, offset: int, value: Value) -> None:
        at = self.b.gep(base, [I32(offset)])
        self.b.store(value, self.b.bitcast(at, value.type.as_pointer()), align=16)

    def words(self, offset: int, n: int) -> list[Value]:
        """n vectors (2, or a multiple of 4): lane r of vector i is word i of row r, from byte `offset` on."""
        if n > 4:
            return [v for start in range(0, n, 4) for v in self.words(offset + 4 * start, 4)]
        rows = [self._load(row, offset, vector(I32, n)) for row in self.rows]
        # rows r and r + 4 side by side, so that no later shuffle crosses 128 bits
        wide = [shuffle(self.b, rows[r], rows[r + 4], range(2 * n)) for r in range(4)]
        vectors = []
        for i in range(0, n, 2):
            # words i and i + 1 of rows r, r + 1, then of r + 4, r + 5
            unpack = (i, 2 * n + i, i + 1, 2 * n + i + 1, n + i, 3 * n + i, n + i + 1, 3 * n + i + 1)
            low, high = (shuffle(self.b, wide[r], wide[r + 1], unpack) for r in (0, 2))
            vectors.append(shuffle(self.b, low, high, (0, 1, 8, 9, 4, 5, 12, 13)))
            vectors.append(shuffle(self.b, low, high, (2, 3, 10, 11, 6, 7, 14, 15)))
        return vectors

    def halves(self, offset: int) -> Value:
        """Vector of the 16-bit words at byte `offset` of the rows."""
        v = ir.Constant(HALVES, ir.Undefined)
        for r, row in enumerate(self.rows):
            v = self.b.insert_element(v, self._load(row, offset, I16), I32(r))
        return v

    def low_halves(self, v: Value) -> Value:
        return self.b.trunc(v, HALVES)

    def put_header(self, halves: Value, offset: int = 0) -> None:
        self._store(self.header, offset, halves)

    def put(self, v: Value) -> None:
        """Append one vector of 32 bytes to the payload."""
        self._store(self.payload, self.written, v)
        self.written += 32

    def mask(self, v: Value, bits: int) -> Value:
        return self.b.and_(v, const(WORDS, bits))

    def shl(self, v: Value, n: int) -> Value:
        return self.b.shl(v, const(WORDS, n)) if n else v

    def shr(self, v: Value, n: int) -> Value:
        return self.b.lshr(v, const(WORDS, n)) if n else v

    def or_(self, v: Value, w: Value) -> Value:
        return self.b.or_(v, w)

    def low_nibbles(self, v: Value, w: Value) -> Value:
        """N vector of two words' low nibbles: v's below, w's above."""
        return self.or_(self.mask(v, LOW_NIBBLES), self.shl(self.mask(w, LOW_NIBBLES), 4))

    def high_nibbles(self, v: Value, w: Value) -> Value:
        """N vector of two words' high nibbles: v's below, w's above."""
        return self.or_(self.mask(self.shr(v, 4), LOW_NIBBLES), self.mask(w, LOW_NIBBLES << 4))

    def transpose_fields(self, v: list[Value], field_bits: int) -> list[Value]:
        """Field f of byte t of vector i becomes field i of byte t of vector f (8 / field_bits of each)."""
        v = list(v)
        masks = {4: 0x0F0F0F0F, 2: 0x33333333, 1: 0x55555555}
        step = len(v) // 2
        while step:
            shift = step * field_bits
            for i in (i for i in range(len(v)) if not i & step):
                moved = self.mask(self.b.xor(self.shr(v[i], shift), v[i + step]), masks[shift])
                v[i + step] = self.b.xor(v[i + step], moved)
                v[i] = self.b.xor(v[i], self.shl(moved, shift))
            step //= 2
        return v


def _put_nibbles(o: Block, q: list[Value], merge: Callable[[Value, Value], Value]) -> None:
    for i in range(0, len(q), 2):
        o.put(merge(q[i], q[i + 1]))


def _iq4_sub_block(o: Block, offset: int) -> None:
    """32 columns of IQ4: byte j holds the codes of columns j and 16 + j."""
    q = o.words(offset, 4)
    _put_nibbles(o, q, o.low_nibbles)
    _put_nibbles(o, q, o.high_nibbles)


def _iq4_nl(o: Block) -> None:
    o.put_header(o.halves(0))
    _iq4_sub_block(o, 2)


def _iq4_xs(o: Block) -> None:
    first, low, _, _ = o.words(0, 4)  # d | scales_h << 16, scales_l, two words of quants
    o.put_header(o.low_halves(first))
    for h in range(2):
        # spread four nibbles of scales_l, and four 2-bit fields of scales_h, one to a byte
        x = o.mask(o.shr(low, 16 * h), 0xFFFF)
        x = o.mask(o.or_(x, o.shl(x, 8)), 0x00FF00FF)
        x = o.mask(o.or_(x, o.shl(x, 4)), 0x0F0F0F0F)
        y = o.mask(o.shr(first, 16 + 8 * h), 0xFF)
        y = o.mask(o.or_(y, o.shl(y, 12)), 0x000F000F)
        y = o.mask(o.or_(y, o.shl(y, 6)), 0x03030303)
        scales = o.b.bitcast(o.or_(x, o.shl(y, 4)), BYTES)
        o.put(o.b.sub(scales, const(BYTES, 32)))
    for j in range(8):
        _iq4_sub_block(o, 8 + 16 * j)


def _k_header(o: Block) -> None:
    """d, dmin, and the 6-bit scales and mins of Q4_K and Q5_K: the first 16 bytes of a block."""
    first, s, m, upper = o.words(0, 4)
    o.put_header(o.low_halves(first))
    o.put_header(o.low_halves(o.shr(first, 16)), 16)
    o.put(o.mask(s, 0x3F3F3F3F))
    o.put(o.or_(o.mask(upper, LOW_NIBBLES), o.mask(o.shr(s, 2), 0x30303030)))
    o.put(o.mask(m, 0x3F3F3F3F))
    o.put(o.or_(o.mask(o.shr(upper, 4), LOW_NIBBLES), o.mask(o.shr(m, 2), 0x30303030)))


def _q4_k(o: Block) -> None:
    _k_header(o)
    for pair in range(4):
        q = o.words(16 + 32 * pair, 8)
        _put_nibbles(o, q, o.low_nibbles)
        _put_nibbles(o, q, o.high_nibbles)


def _q5_k(o: Block) -> None:
    _k_header(o)
    fifth = o.transpose_fields(o.words(16, 8), 1)
    for pair in range(4):
        q = o.words(48 + 32 * pair, 8)
        _put_nibbles(o, q, o.low_nibbles)
        o.put(fifth[2 * pair])
        _put_nibbles(o, q, o.high_nibbles)
        o.put(fifth[2 * pair + 1])


def _q6_k(o: Block) -> None:
    o.put_header(o.halves(208))
    for scales in o.words(192, 4):
        o.put(scales)
    for half in range(2):
        q = o.words(64 * half, 16)
        high = [o.transpose_fields(o.words(128 + 32 * half + 16 * h, 4), 2) for h in range(2)]
        for s in range(4):
            merge = o.high_nibbles if s >= 2 else o.low_nibbles
            _put_nibbles(o, q[8:] if s % 2 else q[:8], merge)
            o.put(high[0][s])
            o.put(high[1][s])


def _q8_0(o: Block) -> None:
    o.put_header(o.halves(0))
    for v in o.words(2, 8):
        o.put(v)


def _bf16(o: Block) -> None:
    for v in o.words(0, 2):
        o.put(v)


def _f32(o: Block) -> None:
    for v in o.words(0, 4):
        o.put(v)


def _f16(o: Block) -> None:
    for v in o.words(0, 2):
        for half in (v, o.shr(v, 16)):
            o.put(emit_half_to_f32(o.context, o.b, o.low_halves(half)))


def _f32_bf16(o: Block) -> None:
    w = o.words(0, 4)
    for i in (0, 2):
        o.put(o.or_(o.shr(w[i], 16), o.mask(w[i + 1], 0xFFFF0000)))


_EMIT: dict[str, Callable[[Block], None]] = {
    "IQ4_XS": _iq4_xs,
    "IQ4_NL": _iq4_nl,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "BF16": _bf16,
    "F32": _f32,
    "F16": _f16,
    "F32_BF16": _f32_bf16,
}


@intrinsic(prefer_literal=True)
def _repack_block(typingctx, name, src, row_bytes, last, header, payload):
    """Convert the block at `src` of rows 0..last (later rows repeat the last one); `name` is a literal."""
    emit = _EMIT[name.literal_value]

    def codegen(context, b, signature, args):
        _, src, row_bytes, last, header, payload = args
        pointer = I8.as_pointer()
        rows = []
        for r in range(OCTET_ROWS):
            index = last.type(r)
            index = b.select(b.icmp_signed("<", index, last), index, last)
            rows.append(b.inttoptr(b.add(src, b.mul(index, row_bytes)), pointer))
        emit(Block(context, b, rows, b.inttoptr(header, pointer), b.inttoptr(payload, pointer)))
        return context.get_dummy_value()

    return types.void(name, *[types.int64] * 5), codegen


@inline_kernel
def _clear_rows(octet, n_header, n_octet, rows):
    """Zero the lanes of the rows that an octet does not have."""
    halves = u16_array(octet, n_header // 2)
    for i in range(0, n_header // 2, OCTET_ROWS):
        halves[i + rows : i + OCTET_ROWS] = 0
    words = u32_array(octet + n_header, (n_octet - n_header) // 4)
    for i in range(0, (n_octet - n_header) // 4, OCTET_ROWS):
        words[i + rows : i + OCTET_ROWS] = 0


@cache
def repack(name: str) -> Any:
    """Compiled `f(src_addr, src_row_bytes, n_rows, n_cols, dst_addr, dst_octet_stride)`, all int64, no GIL.

    f converts `n_rows` rows at `src_addr` (any alignment) into ceil(n_rows / 8) octets at `dst_addr` (64-byte
    aligned), each `dst_octet_stride` bytes after the one before, and writes no byte between them. `name` is a
    key of `layout.CONVERSIONS`; `n_cols` a multiple of its block. This call compiles f, or reads it from the
    cache. Twin: `ref.octets.pack_octets`.
    """
    conversion = CONVERSIONS[name]
    store = STORE_TYPES[conversion.store]
    block_cols, block_bytes = store.block_cols, conversion.block_bytes
    block_header, block_payload = store.header_bytes, store.payload_bytes

    @njit("void(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True, error_model="numpy")
    def repack_rows(src_addr, src_row_bytes, n_rows, n_cols, dst_addr, dst_octet_stride):
        n_blocks = n_cols // block_cols
        n_header = (n_blocks * block_header + ALIGN - 1) // ALIGN * ALIGN
        dst = dst_addr
        for first in range(0, n_rows, OCTET_ROWS):
            rows = min(OCTET_ROWS, n_rows - first)
            u8_array(dst, n_header)[n_blocks * block_header :] = 0
            src = src_addr + first * src_row_bytes
            header, payload = dst, dst + n_header
            for _ in range(n_blocks):
                _repack_block(name, src, src_row_bytes, rows - 1, header, payload)
                src += block_bytes
                header += block_header
                payload += block_payload
            if rows < OCTET_ROWS:
                _clear_rows(dst, n_header, n_header + n_blocks * block_payload, rows)
            dst += dst_octet_stride

    return repack_rows
