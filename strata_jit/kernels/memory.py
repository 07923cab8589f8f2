"""One-dimensional array views of raw memory for nopython code.

Owns the step from an int64 address to a NumPy-like array. A view neither owns nor checks the memory behind
it, and costs nothing beyond its two registers. Knows no layout.
"""

from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from strata_jit.kernels._jit import inline_kernel


@intrinsic
def _u8_pointer(typingctx, addr):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.int64), codegen


@inline_kernel
def u8_array(addr, n):
    """uint8[n] at `addr`."""
    return carray(_u8_pointer(addr), (n,))
