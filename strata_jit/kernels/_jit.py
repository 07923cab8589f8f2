"""The decorators of nopython code: `kernel`, `inline_kernel`, `glue`, `op` and `callback`.

Owns the compiler options, so that they are the same everywhere; knows no kernel and no cache directory.
There is no fastmath: the order of float operations is part of every kernel's definition.

An op is compiled (or read from the cache) when its address is first asked for, not when its module is
imported: so the caller can report progress op by op, and pays for no op that it does not use.
"""

from numba import cfunc, njit

_OPTIONS = {"error_model": "numpy"}
_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_OP_SIGNATURE = "void(int64,int64,int64)"


def kernel(function):
    """A function with its own code, callable from Python and from other kernels."""
    return njit(nogil=True, cache=True, **_OPTIONS)(function)


def inline_kernel(function):
    """A helper that is always inlined; Python cannot call it, and only its callers are cached."""
    return njit(nogil=True, forceinline=True, **_NO_WRAPPERS, **_OPTIONS)(function)


def glue(function):
    """A short helper between kernels, inlined as source before types are inferred.

    An `inline_kernel` is optimised on its own and again in each caller, so nesting them deeply multiplies
    compile time: inner loops belong in `inline_kernel`s, what lies between them and the op in `glue`.
    """
    return njit(nogil=True, inline="always", **_NO_WRAPPERS, **_OPTIONS)(function)


class Op:
    """A step of the program: C function `void(int64 control, int64 args, int64 thread)`."""

    def __init__(self, function):
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self._function = function
        self._compiled = None

    @property
    def address(self):
        """Address of the compiled function, valid while this process lives."""
        if self._compiled is None:
            self._compiled = cfunc(_OP_SIGNATURE, nopython=True, cache=True, **_OPTIONS)(self._function)
        return self._compiled.address


def op(function):
    """Make `function(control, args, thread)` an `Op`."""
    return Op(function)


def callback(n_args):
    """A C function `void(int64, ...)` of n_args arguments, compiled at once; kernels call it by address."""
    return cfunc(f"void({','.join(['int64'] * n_args)})", nopython=True, cache=True, **_OPTIONS)


OVERLOAD_OPTIONS = {"error_model": "numpy", "forceinline": True}
"""For helpers written as overloads on literal types."""
