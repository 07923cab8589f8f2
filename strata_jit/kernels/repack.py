"""Rows of a GGUF file -> octets: `repack(name)` gives a compiled converter.

Owns the loops over rows and blocks; one block is the work of `kernels/repack_types.py`. Knows no file and no
thread.
"""

from functools import cache
from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from strata_jit.kernels._jit import inline_kernel
from strata_jit.kernels.layout import ALIGN, CONVERSIONS, OCTET_ROWS, STORE_TYPES
from strata_jit.kernels.memory import u8_array
from strata_jit.kernels.repack_block import Block
from strata_jit.kernels.repack_types import EMIT
from strata_jit.kernels.vec import I8


@intrinsic(prefer_literal=True)
def _repack_block(typingctx, name, src, row_bytes, last, header, payload):
    """Convert the block at `src` of rows 0..last (later rows repeat the last one); `name` is a literal."""
    emit = EMIT[name.literal_value]

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
def _clear_rows(address, n_bytes, lane, rows):
    """Zero the lanes, `lane` bytes each, of the rows that an octet does not have."""
    for group in range(0, n_bytes, OCTET_ROWS * lane):
        u8_array(address + group + rows * lane, (OCTET_ROWS - rows) * lane)[:] = 0


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
    header_lane, payload_lane = store.header_lane, store.payload_lane

    @njit("void(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True, error_model="numpy")
    def repack_rows(src_addr, src_row_bytes, n_rows, n_cols, dst_addr, dst_octet_stride):
        n_blocks = n_cols // block_cols
        n_header = (n_blocks * block_header + ALIGN - 1) // ALIGN * ALIGN
        n_padding = -(n_blocks * block_payload) % ALIGN
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
            u8_array(payload, n_padding)[:] = 0
            if rows < OCTET_ROWS:
                _clear_rows(dst, n_blocks * block_header, header_lane, rows)
                _clear_rows(dst + n_header, n_blocks * block_payload, payload_lane, rows)
            dst += dst_octet_stride

    return repack_rows
