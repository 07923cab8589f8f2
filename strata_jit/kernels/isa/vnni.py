"""Exact integer operations by vpdpbusd, in either encoding.

It adds the products of four unsigned and four signed bytes to an int32, without saturation: Intel 64 and
IA-32 Architectures Software Developer's Manual, volume 2. Everything else stays with AVX2, whose encodings
CPUs with AVX-512 have as well.
"""

from strata_jit.kernels.isa.avx2 import Avx2
from strata_jit.kernels.isa.portable import V8I32
from strata_jit.kernels.vec import call_llvm


class Avx512Vnni(Avx2):
    """AVX-512 VNNI on vectors of 256 bits (Ice Lake, Zen 4 and later): its operand may be a broadcast."""

    name = "avx512vnni"
    needs = Avx2.needs | {"avx512vnni", "avx512vl"}
    byte_dots = True

    def dot4(self, b, total, w, a):
        """<8 x i32> total + the four products w*a of each lane: bytes w unsigned, a signed."""
        # since LLVM 22 the operands are vectors of bytes; it converts calls of the form before
        w, a = b.bitcast(w, V8I32), b.bitcast(a, V8I32)
        return call_llvm(b, "llvm.x86.avx512.vpdpbusd.256", V8I32, total, w, a)


class AvxVnni(Avx512Vnni):
    """AVX-VNNI, the same in VEX encoding (Alder Lake and later, without AVX-512)."""

    name = "avxvnni"
    needs = Avx2.needs | {"avxvnni"}
