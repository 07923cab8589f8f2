"""Exact integer operations in generic LLVM vector code, for any CPU."""

from llvmlite import ir

from strata_jit.kernels.vec import I8, I16, I32, call_llvm, const, shuffle, vector

V32I8, V16I16, V8I32 = vector(I8, 32), vector(I16, 16), vector(I32, 8)
EVEN16, ODD16 = range(0, 32, 2), range(1, 32, 2)
EVEN8, ODD8 = range(0, 16, 2), range(1, 16, 2)


class Portable:
    """No instruction of one CPU family: LLVM lowers everything to what the CPU has.

    Lanes: a <32 x i8> holds 4 consecutive columns of 8 rows, row r in bytes 4r .. 4r+3.
    """

    name = "portable"
    needs: frozenset[str] = frozenset()
    byte_dots = False
    """Whether block sums are taken by `dot4`, of weights made unsigned, rather than by `pairs_*`."""

    def lookup16(self, b, table, index):
        """table[index] for <32 x i8> indices 0..15: a tree of selects over the index bits."""
        level = [const(V32I8, value) for value in table]
        for bit in (1, 2, 4, 8):
            chosen = b.icmp_unsigned("!=", b.and_(index, const(V32I8, bit)), const(V32I8, 0))
            level = [b.select(chosen, high, low) for low, high in zip(level[::2], level[1::2], strict=True)]
        return level[0]

    def pairs_signed(self, b, w, a, abs_a):
        """w*a summed over neighbouring columns, <16 x i16>; |w|, |a| <= 127."""
        return self._pairs(b, b.sext(w, vector(I16, 32)), a)

    def pairs_wide(self, b, w, a):
        """As pairs_signed, with w down to -128."""
        return self._pairs(b, b.sext(w, vector(I16, 32)), a)

    def pairs_unsigned(self, b, w, a):
        """w*a summed over neighbouring columns for unsigned w <= 127."""
        return self._pairs(b, b.zext(w, vector(I16, 32)), a)

    def _pairs(self, b, w16, a):
        products = b.mul(w16, b.sext(a, vector(I16, 32)))
        return b.add(shuffle(b, products, products, EVEN16), shuffle(b, products, products, ODD16))

    def scale16(self, b, scales, t):
        """Byte t (signed) of every 32-bit lane of `scales` <32 x i8>, in both 16-bit halves of its lane."""
        lanes = b.bitcast(scales, V16I16)
        half = shuffle(b, lanes, lanes, [2 * (i // 2) + t // 2 for i in range(16)])
        up = const(V16I16, 0 if t % 2 else 8)
        return b.ashr(b.shl(half, up), const(V16I16, 8))

    def madd(self, b, x, y):
        """x*y of <16 x i16>, neighbours summed: <8 x i32>."""
        wide = vector(I32, 16)
        products = b.mul(b.sext(x, wide), b.sext(y, wide))
        return b.add(shuffle(b, products, products, EVEN8), shuffle(b, products, products, ODD8))

    def abs8(self, b, w):
        """|w| as unsigned bytes."""
        return call_llvm(b, "llvm.abs.v32i8", V32I8, w, ir.Constant(ir.IntType(1), 0))
