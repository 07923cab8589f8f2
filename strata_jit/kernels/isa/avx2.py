"""Exact integer operations by AVX2 instructions, placed by hand.

LLVM finds neither a byte shuffle for a table look-up nor pmaddubsw by itself (plain loops are some ten times
slower); instruction semantics: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
"""

from strata_jit.kernels.isa.portable import V8I32, V16I16, V32I8, Portable
from strata_jit.kernels.vec import call_llvm, const


class Avx2(Portable):
    """AVX2, FMA and F16C (every x86-64-v3 CPU)."""

    name = "avx2"
    needs = frozenset({"avx2", "fma", "f16c"})

    def lookup16(self, b, table, index):
        """vpshufb looks up 16 bytes per 128-bit lane: the table stands in both."""
        return call_llvm(b, "llvm.x86.avx2.pshuf.b", V32I8, const(V32I8, list(table) * 2), index)

    def pairs_signed(self, b, w, a, abs_a):
        """vpmaddubsw(|a|, sign(a)*w): cannot saturate, 2*127*127 < 2**15."""
        signed = call_llvm(b, "llvm.x86.avx2.psign.b", V32I8, w, a)
        return call_llvm(b, "llvm.x86.avx2.pmadd.ub.sw", V16I16, abs_a, signed)

    def pairs_wide(self, b, w, a):
        """vpmaddubsw(|w|, sign(w)*a): |w| = 128 fits unsigned, 2*128*127 < 2**15."""
        signed = call_llvm(b, "llvm.x86.avx2.psign.b", V32I8, a, w)
        return call_llvm(b, "llvm.x86.avx2.pmadd.ub.sw", V16I16, self.abs8(b, w), signed)

    def pairs_unsigned(self, b, w, a):
        """vpmaddubsw(w, a)."""
        return call_llvm(b, "llvm.x86.avx2.pmadd.ub.sw", V16I16, w, a)

    def scale16(self, b, scales, t):
        """vpshufb puts byte t in both high halves, vpsraw extends its sign."""
        order = [4 * (i // 4 % 4) + t for i in range(32)]
        spread = call_llvm(b, "llvm.x86.avx2.pshuf.b", V32I8, scales, const(V32I8, order))
        return b.ashr(b.bitcast(spread, V16I16), const(V16I16, 8))

    def madd(self, b, x, y):
        """vpmaddwd."""
        return call_llvm(b, "llvm.x86.avx2.pmadd.wd", V8I32, x, y)
