"""The op `head_linear`: the activation row of each head times the matrix of that head.

The matrices of a tensor are cut by rows like any other, each at the same rows. Their rows make whole octets.
"""

from strata_jit.kernels import abi
from strata_jit.kernels._jit import glue, op
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.runs import (
    column_bytes,
    dots,
    list_row,
    n_runs,
    octet_address,
    one_row_run,
    run_octets,
)
from strata_jit.kernels.scratch import ROW_BLOCK, RUN_OCTETS_MANY
from strata_jit.kernels.team import claim, first_unit
from strata_jit.kernels.vec import word

A = arg_index("head_linear")


@glue
def run_head(args, n_rows, head, octet, n, tmp):
    """One run of one head's matrix, all rows, a block of them at a time."""
    tensor, n_head = word(args, A.tensor), word(args, A.n_head)
    w, stride = octet_address(tensor, head, octet), word(tensor, abi.TENSOR_OCTET_STRIDE)
    act = word(args, A.act_shared) + word(args, A.act_off)
    out = word(args, A.out) + head * word(args, A.head_stride) + column_bytes(tensor, octet)
    for first in range(0, n_rows, ROW_BLOCK):
        n_tok = min(n_rows - first, ROW_BLOCK)
        for t in range(n_tok):
            row = first + t
            source = act + (row * n_head + head) * word(args, A.act_stride)
            list_row(tmp, t, source, out + row * word(args, A.out_stride))
        dots(tensor, w, stride, n, n_tok, tmp)


@op
def head_linear(control, args, thread):
    """Claim (head, run of octets)."""
    tensor, n_head, n_rows = word(args, A.tensor), word(args, A.n_head), word(control, abi.STEP_N_ROWS)
    n_octets, stride = word(tensor, abi.TENSOR_N_OCTETS), word(tensor, abi.TENSOR_OCTET_STRIDE)
    work, n_threads = n_head * n_octets * stride, word(thread, abi.THREAD_N_THREADS)
    if n_rows == 1:
        run = one_row_run(control, thread, work, stride, RUN_OCTETS_MANY)
    else:
        run = run_octets(work, stride, n_threads, RUN_OCTETS_MANY)
    runs, tmp = n_runs(n_octets, run), word(thread, abi.THREAD_SCRATCH) + word(args, A.tmp_scratch)
    unit = first_unit(thread)
    while unit < n_head * runs:
        head, octet = unit // runs, unit % runs * run
        run_head(args, n_rows, head, octet, min(run, n_octets - octet), tmp)
        unit = claim(thread)
