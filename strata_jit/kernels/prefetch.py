"""Prefetching of weights: an octet is read once, as a stream, so its lines are not to stay in the caches."""

from llvmlite import ir

from strata_jit.kernels.vec import I8, I32, call_llvm, pointer

PREFETCH_BYTES = 2048
"""How far ahead of a payload its stream is prefetched: 2-8 KiB measure alike, less is worse."""


def emit_prefetch(b, address, offset, n_bytes):
    """Prefetch every cache line of n_bytes, non-temporal."""
    flags = [ir.Constant(I32, v) for v in (0, 0, 1)]  # read, no reuse, data
    for line in range(0, n_bytes, 64):
        call_llvm(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, address, I8, offset + line), *flags)
