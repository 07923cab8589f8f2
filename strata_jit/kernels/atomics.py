"""Every atomic access, pause, futex call and clock read of the nopython code.

Owns what has to be exactly one machine operation: int64 and futex-word (32-bit) atomics on raw addresses,
the hint for spinning, sleeping on and waking a futex word in memory that processes share, the monotonic
clock, and the call of a C function by address. Knows neither barrier nor program. Addresses are int64 bytes;
a futex word is the low half of an int64, so it is read and written as 32 bits and travels as int64 in
[0, 2**32).
"""

import platform
import sys

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from strata_jit.kernels._jit import inline_kernel
from strata_jit.kernels.sync_abi import FUTEX_SYSCALL, FUTEX_WAIT, FUTEX_WAKE

llvm.initialize_native_asmparser()  # inline assembly aborts the process without it

I32, I64 = ir.IntType(32), ir.IntType(64)
MACHINE = platform.machine()
IS_X86_64 = MACHINE == "x86_64"
FUTEX_NUMBER = FUTEX_SYSCALL.get(MACHINE, -1)
"""Elsewhere every futex call fails with ENOSYS, and waiting falls back to its yields."""
FUTEX_SHIFT = 0 if sys.byteorder == "little" else 4
CLOCK_MONOTONIC = 1
ALL_WAITERS = 2**31 - 1


def _pointer(b, address, llvm_type):
    return b.inttoptr(address, llvm_type.as_pointer())


def _futex_pointer(b, address):
    """Pointer to the low half of the int64 at `address`."""
    return _pointer(b, b.add(address, ir.Constant(I64, FUTEX_SHIFT)), I32)


def _external(b, name, function_type):
    """A symbol of libc, which the process has loaded in any case."""
    return cgutils.get_or_insert_function(b.module, function_type, name)


# --- int64 -------------------------------------------------------------------------------------------------


@intrinsic
def load64(typingctx, address):
    """Plain load of the int64 at `address`: for words that nobody else writes meanwhile."""

    def codegen(context, b, signature, args):
        return b.load(_pointer(b, args[0], I64))

    return types.int64(types.int64), codegen


@intrinsic
def store64(typingctx, address, value):
    """Plain store of an int64. Others may read it, without any promise on order."""

    def codegen(context, b, signature, args):
        b.store(args[1], _pointer(b, args[0], I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, address):
    """int64 at `address`; what its writer stored before releasing it is visible afterwards."""

    def codegen(context, b, signature, args):
        return b.load_atomic(_pointer(b, args[0], I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Store an int64 after everything that this thread has stored so far."""

    def codegen(context, b, signature, args):
        b.store_atomic(args[1], _pointer(b, args[0], I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _read_modify_write(name, operation, ordering):
    """Intrinsic (address, value) -> the int64 that was there before."""

    @intrinsic
    def rmw(typingctx, address, value):
        def codegen(context, b, signature, args):
            return b.atomic_rmw(operation, _pointer(b, args[0], I64), args[1], ordering)

        return types.int64(types.int64, types.int64), codegen

    rmw.__doc__ = name
    return rmw


fetch_add = _read_modify_write(
    "Add to the int64 at `address`, acq_rel; returns the old value.", "add", "acq_rel"
)
fetch_add_seq = _read_modify_write(
    "Add to the int64 at `address`, seq_cst; returns the old value.", "add", "seq_cst"
)
exchange = _read_modify_write(
    "Swap the int64 at `address`, seq_cst; returns the old value.", "xchg", "seq_cst"
)


@intrinsic
def compare_exchange(typingctx, address, expected, value):
    """Store `value` at `address` if it holds `expected`, acq_rel; returns what was there before."""

    def codegen(context, b, signature, args):
        pointer = _pointer(b, args[0], I64)
        return b.extract_value(b.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire"), 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


# --- futex words -------------------------------------------------------------------------------------------


def _load_futex(name, ordering):
    """Intrinsic: address -> the 32-bit futex word there, zero-extended."""

    @intrinsic
    def load(typingctx, address):
        def codegen(context, b, signature, args):
            return b.zext(b.load_atomic(_futex_pointer(b, args[0]), ordering, 4), I64)

        return types.int64(types.int64), codegen

    load.__doc__ = name
    return load


load_futex = _load_futex("Futex word at `address`, acquire.", "acquire")
load_futex_seq = _load_futex(
    "Futex word at `address`, seq_cst: the check between counting oneself and sleeping.", "seq_cst"
)


@intrinsic
def publish_futex(typingctx, address, value):
    """Store a futex word with seq_cst order, so that a load of its sleepers cannot overtake it."""

    def codegen(context, b, signature, args):
        b.atomic_rmw("xchg", _futex_pointer(b, args[0]), b.trunc(args[1], I32), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _emit_syscall(b, number, *args):
    """x86-64 Linux system call by inline assembly: the result, or -errno."""
    registers = ("rax", "rdi", "rsi", "rdx", "r10", "r8", "r9")[: len(args) + 1]
    inputs = ",".join(f"{{{r}}}" for r in registers)
    values = [ir.Constant(I64, number), *args]
    function = ir.FunctionType(I64, [I64] * len(values))
    return b.asm(function, "syscall", f"={{rax}},{inputs},~{{rcx}},~{{r11}},~{{memory}}", values, True)


def _emit_libc_syscall(b, number, *args):
    """The same through libc's variadic `syscall`: -1 on any error, its errno out of reach."""
    function = _external(b, "syscall", ir.FunctionType(I64, [I64], var_arg=True))
    return b.call(function, [ir.Constant(I64, number), *args])


def _futex_intrinsics(emit):
    """(wait, wake) by one way of entering the kernel."""

    @intrinsic
    def wait(typingctx, address, expected, timeout_ns):
        def codegen(context, b, signature, args):
            word = b.add(args[0], ir.Constant(I64, FUTEX_SHIFT))
            second = ir.Constant(I64, 1_000_000_000)
            timeout = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
            b.store(b.sdiv(args[2], second), cgutils.gep_inbounds(b, timeout, 0, 0))
            b.store(b.srem(args[2], second), cgutils.gep_inbounds(b, timeout, 0, 1))
            zero = ir.Constant(I64, 0)
            command = ir.Constant(I64, FUTEX_WAIT)
            return emit(b, FUTEX_NUMBER, word, command, args[1], b.ptrtoint(timeout, I64), zero, zero)

        return types.int64(types.int64, types.int64, types.int64), codegen

    @intrinsic
    def wake(typingctx, address, n):
        def codegen(context, b, signature, args):
            word = b.add(args[0], ir.Constant(I64, FUTEX_SHIFT))
            zero = ir.Constant(I64, 0)
            return emit(b, FUTEX_NUMBER, word, ir.Constant(I64, FUTEX_WAKE), args[1], zero, zero, zero)

        return types.int64(types.int64, types.int64), codegen

    return wait, wake


futex_wait_libc, futex_wake_libc = _futex_intrinsics(_emit_libc_syscall)
futex_wait, futex_wake = _futex_intrinsics(_emit_syscall) if IS_X86_64 else (futex_wait_libc, futex_wake_libc)
"""futex_wait(address, expected, timeout_ns): sleep while the word is `expected`, at most so long; it may
return early for no reason. futex_wake(address, n): wake up to n sleepers. Both work between processes."""


# --- processor, scheduler, clock ---------------------------------------------------------------------------


@intrinsic
def pause(typingctx):
    """Tell the core that this is a spin loop (x86 `pause`, AArch64 `yield`, nothing elsewhere)."""

    def codegen(context, b, signature, args):
        if IS_X86_64:
            b.call(_external(b, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), [])), [])
        elif MACHINE == "aarch64":
            b.asm(ir.FunctionType(ir.VoidType(), []), "yield", "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sched_yield(typingctx):
    """Let another thread of this CPU run, if there is one."""

    def codegen(context, b, signature, args):
        b.call(_external(b, "sched_yield", ir.FunctionType(I32, [])), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def clock_ns(typingctx):
    """Nanoseconds of CLOCK_MONOTONIC."""

    def codegen(context, b, signature, args):
        now = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
        function = ir.FunctionType(I32, [I32, now.type])
        b.call(_external(b, "clock_gettime", function), [ir.Constant(I32, CLOCK_MONOTONIC), now])
        seconds = b.load(cgutils.gep_inbounds(b, now, 0, 0))
        nanoseconds = b.load(cgutils.gep_inbounds(b, now, 0, 1))
        return b.add(b.mul(seconds, ir.Constant(I64, 1_000_000_000)), nanoseconds)

    return types.int64(), codegen


@intrinsic
def call3(typingctx, address, control, args, thread):
    """Call the C function `void f(int64, int64, int64)` at `address`: an op kernel."""

    def codegen(context, b, signature, args):
        function = ir.FunctionType(ir.VoidType(), [I64] * 3)
        b.call(_pointer(b, args[0], function), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@inline_kernel
def field(base, word):
    """Address of int64 number `word` of the structure at `base`."""
    return base + word * 8
