"""Runs of octets: the unit in which matrix work is claimed, and the calls of dot kernels on one run.

Owns the length of a run, the reading of tensor records, and the last octet of a matrix, whose missing rows
are computed (they are zero) but never stored. Knows no op; addresses are int64 bytes, `octet` counts from
the first of the node's slice.
"""

import numpy as np

from strata_jit.kernels import abi
from strata_jit.kernels._jit import inline_kernel, kernel
from strata_jit.kernels.abi import ROW_GROUP
from strata_jit.kernels.scratch import (
    MANY_MIN,
    OCTET_BYTES,
    RUN_BYTES,
    TMP_ACTS,
    TMP_DOT,
    TMP_OUTS,
    UNITS_PER_THREAD,
)
from strata_jit.kernels.vec import (
    call6,
    call8,
    lane8,
    load8,
    load_f32,
    load_i64,
    store8,
    store_f32,
    store_i64,
    word,
)

ONE = np.float32(1)


@inline_kernel
def run_octets(work_bytes, octet_stride, n_threads, longest):
    """Octets of a run, 1 .. longest, even where more than one, from the bytes of all work of the op."""
    fair = work_bytes // (UNITS_PER_THREAD * n_threads)
    return _run_of(min(fair, RUN_BYTES), octet_stride, longest)


@inline_kernel
def one_row_run(control, thread, work_bytes, octet_stride, longest):
    """`run_octets` for a step of one row, in which the host may ask for a number of runs."""
    tasks = word(control, abi.STEP_TASKS)
    if tasks > 0:
        return _run_of(work_bytes // tasks, octet_stride, longest)
    return run_octets(work_bytes, octet_stride, word(thread, abi.THREAD_N_THREADS), longest)


@inline_kernel
def _run_of(run_bytes, octet_stride, longest):
    run = min(run_bytes // max(octet_stride, 1), longest)
    return max(run - run % 2, 1)


@inline_kernel
def n_runs(n_octets, run):
    """Runs that cover `n_octets`, the last one possibly shorter."""
    return (n_octets + run - 1) // run


@inline_kernel
def rows_from(tensor, octet):
    """Rows of the matrix from `octet` to the end of the slice: 8 or more unless it is the last octet."""
    return word(tensor, abi.TENSOR_ROW_STOP) - word(tensor, abi.TENSOR_ROW_START) - ROW_GROUP * octet


@inline_kernel
def column_bytes(tensor, octet):
    """Byte offset of the octet's first result in a float32 row of all the matrix's results."""
    return 4 * (word(tensor, abi.TENSOR_ROW_START) + ROW_GROUP * octet)


@inline_kernel
def octet_address(tensor, expert, octet):
    """Address of an octet of an expert (0 where the tensor has none)."""
    stride, expert_stride = word(tensor, abi.TENSOR_OCTET_STRIDE), word(tensor, abi.TENSOR_EXPERT_STRIDE)
    return word(tensor, abi.TENSOR_ADDR) + expert * expert_stride + octet * stride


@inline_kernel
def bias_address(bias, expert, tensor, octet):
    """Address of the float32 biases of the octet's rows; 0 where `bias` is no tensor."""
    if bias == 0:
        return 0
    row = word(bias, abi.TENSOR_ADDR) + 4 * expert * word(bias, abi.TENSOR_N_COLS)
    return row + column_bytes(tensor, octet)


@inline_kernel
def add_bias(y, bias, i):
    """y plus the i-th octet of biases at `bias`, if any; behind the last row it may read anything."""
    if bias != 0:
        y = y + load8(bias + OCTET_BYTES * i)
    return y


@inline_kernel
def dot_run(tensor, expert, octet, n, act, out):
    """float32[8n] at `out` = the run's rows times one activation row."""
    w = octet_address(tensor, expert, octet)
    stride, n_cols = word(tensor, abi.TENSOR_OCTET_STRIDE), word(tensor, abi.TENSOR_N_COLS)
    call6(word(tensor, abi.TENSOR_DOT_ONE), w, stride, n, n_cols, act, out)


@inline_kernel
def dots(tensor, w, stride, n, n_tok, tmp):
    """n octets from `w` on times the n_tok activation rows listed in `tmp`, to the addresses listed there."""
    if n_tok < MANY_MIN:
        dot_one, n_cols = word(tensor, abi.TENSOR_DOT_ONE), word(tensor, abi.TENSOR_N_COLS)
        for t in range(n_tok):
            act, out = load_i64(tmp + TMP_ACTS + 8 * t), load_i64(tmp + TMP_OUTS + 8 * t)
            call6(dot_one, w, stride, n, n_cols, act, out)
        return
    call8(
        word(tensor, abi.TENSOR_DOT_MANY),
        w,
        stride,
        n,
        word(tensor, abi.TENSOR_N_COLS),
        n_tok,
        tmp + TMP_ACTS,
        tmp + TMP_OUTS,
        tmp + TMP_DOT,
    )


@inline_kernel
def list_row(tmp, i, act, out):
    """Make (act, out) the i-th row of the next `dots`."""
    store_i64(tmp + TMP_ACTS + 8 * i, act)
    store_i64(tmp + TMP_OUTS + 8 * i, out)


@kernel
def store_tail(address, value, n):
    """Store the first n lanes, n < 8."""
    for i in range(n):
        store_f32(address + 4 * i, lane8(value, i))


@kernel
def add_tail(address, value, n):
    """Add the first n lanes to memory, n < 8."""
    for i in range(n):
        store_f32(address + 4 * i, load_f32(address + 4 * i) + lane8(value, i))


@inline_kernel
def store_octet(address, value, n_rows):
    """Store an octet of which `n_rows` rows exist (more than 8 count as 8)."""
    if n_rows >= ROW_GROUP:
        store8(address, value)
    else:
        store_tail(address, value, n_rows)


@inline_kernel
def add_octet(address, value, n_rows):
    """Add an octet to memory: address[r] = address[r] + value[r]."""
    if n_rows >= ROW_GROUP:
        store8(address, load8(address) + value)
    else:
        add_tail(address, value, n_rows)


@inline_kernel
def put_octet(address, value, add, n_rows):
    """`add_octet` or `store_octet`."""
    if add != 0:
        add_octet(address, value, n_rows)
    else:
        store_octet(address, value, n_rows)
