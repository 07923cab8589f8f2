"""One-dimensional array views of raw memory for nopython code.

Owns the step from an int64 address to a NumPy-like array: `u8_array(addr, n)` and its siblings. A view
neither owns nor checks the memory behind it, and costs nothing beyond its two registers. The memory must be
aligned for the element type (x86 forgives, other CPUs need not). Knows no layout.
"""

from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from strata_jit.kernels._jit import inline_kernel


def _pointer_to(element):
    """Intrinsic: int64 address -> typed pointer."""

    @intrinsic
    def pointer(typingctx, addr):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


_u8_pointer = _pointer_to(types.uint8)
_u16_pointer = _pointer_to(types.uint16)
_u32_pointer = _pointer_to(types.uint32)


@inline_kernel
def u8_array(addr, n):
    """uint8[n] at `addr`."""
    return carray(_u8_pointer(addr), (n,))


@inline_kernel
def u16_array(addr, n):
    """uint16[n] at `addr`."""
    return carray(_u16_pointer(addr), (n,))


@inline_kernel
def u32_array(addr, n):
    """uint32[n] at `addr`."""
    return carray(_u32_pointer(addr), (n,))
