"""One block of eight rows on its way into an octet: the steps that conversions are made of.

Owns the reading of words of eight rows, their transposition and the moving of bits within lanes, as emitted
LLVM code. Every 32 bytes of an octet's payload hold one 32-bit word of each of its eight rows, so it is
vector code over <8 x i32>: generic, hence the same for every CPU. Knows no type: that is for
`kernels/repack_types.py`.
"""

from typing import Any

from llvmlite import ir

from strata_jit.kernels.layout import OCTET_ROWS
from strata_jit.kernels.vec import I8, I16, I32, const, shuffle, vector

WORDS = vector(I32, OCTET_ROWS)
HALVES = vector(I16, OCTET_ROWS)
BYTES = vector(I8, 4 * OCTET_ROWS)
LOW_NIBBLES = 0x0F0F0F0F

Value = Any  # an LLVM value; llvmlite has no type hints


def _n_bytes(v: Value) -> int:
    n: int = v.type.count * v.type.element.width // 8
    return n


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
        self.b.store(value, self.b.bitcast(at, value.type.as_pointer()), align=min(16, _n_bytes(value)))

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

    def bytes_(self, offset: int) -> Value:
        """Vector of the bytes at `offset` of the rows."""
        v = ir.Constant(vector(I8, OCTET_ROWS), ir.Undefined)
        for r, row in enumerate(self.rows):
            v = self.b.insert_element(v, self._load(row, offset, I8), I32(r))
        return v

    def look_up(self, table: Value, offset: int, high: Value | None = None) -> Value:
        """Vector of table[i], i being the byte at `offset` of a row, plus its lane of `high`."""
        v = ir.Constant(WORDS, ir.Undefined)
        for r, row in enumerate(self.rows):
            index = self.b.zext(self._load(row, offset, I8), I32)
            if high is not None:
                index = self.b.add(index, self.b.extract_element(high, I32(r)))
            at = self.b.gep(table, [I32(0), index])
            v = self.b.insert_element(v, self.b.load(at), I32(r))
        return v

    def low_halves(self, v: Value) -> Value:
        return self.b.trunc(v, HALVES)

    def put_header(self, lanes: Value, offset: int = 0) -> None:
        self._store(self.header, offset, lanes)

    def put(self, v: Value) -> None:
        """Append one vector to the payload."""
        self._store(self.payload, self.written, v)
        self.written += _n_bytes(v)

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

    def spread(self, v: Value) -> Value:
        """Bits 0 to 3 of each word to bit 0 of its bytes 0 to 3; the other bits of `v` are zero."""
        return self.mask(self.b.mul(v, const(WORDS, 0x00204081)), 0x01010101)

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
