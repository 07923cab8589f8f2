"""The op `linear`: activation rows times one or several matrices, to segments of output rows.

Per segment: y = dot; y = y + bias (if any); y = y * scale; y = sigmoid(y) (if asked for); out = y, or
out + y. Owns how the team shares the octets of all segments; the dot products are the kernels of the tensors.
Rows past the end of a matrix are not stored.
"""

from strata_jit.kernels import abi
from strata_jit.kernels._jit import inline_kernel, op
from strata_jit.kernels.abi import ROW_GROUP
from strata_jit.kernels.mathx import sigmoid8
from strata_jit.kernels.registry import OPS, arg_index, repeat_index
from strata_jit.kernels.runs import (
    ONE,
    add_bias,
    bias_address,
    column_bytes,
    dot_run,
    dots,
    list_row,
    n_runs,
    octet_address,
    one_row_run,
    put_octet,
    rows_from,
    run_octets,
)
from strata_jit.kernels.scratch import (
    OCTET_BYTES,
    ROW_BLOCK,
    RUN_OCTETS_MANY,
    RUN_OCTETS_ONE,
    TILE_ROW_BYTES,
    TMP_TILE,
)
from strata_jit.kernels.team import claim, first_unit
from strata_jit.kernels.vec import float_word, load8, splat8, word

ARG = arg_index("linear")
SEG = repeat_index("linear")
N_FIELDS = len(OPS["linear"].fields)
SEGMENT_WORDS = len(OPS["linear"].repeat)


@inline_kernel
def segment_at(args, index):
    """Address of the arguments of a segment."""
    return args + abi.WORD_BYTES * (N_FIELDS + SEGMENT_WORDS * index)


@inline_kernel
def slice_bytes(args):
    """Bytes of weights that this node's slices of all segments hold."""
    total = 0
    for i in range(word(args, ARG.n_segments)):
        tensor = word(segment_at(args, i), SEG.tensor)
        total += word(tensor, abi.TENSOR_N_OCTETS) * word(tensor, abi.TENSOR_OCTET_STRIDE)
    return total


@inline_kernel
def is_plain(seg, octet, n):
    """Whether the dot products of the run are the results, all of them of real rows."""
    tensor, scale = word(seg, SEG.tensor), float_word(seg, SEG.scale)
    changed = word(seg, SEG.add) != 0 or word(seg, SEG.bias) != 0 or scale != ONE
    changed = changed or word(seg, SEG.sigmoid) != 0
    return not changed and rows_from(tensor, octet) >= ROW_GROUP * n


@inline_kernel
def finish(seg, octet, n, tile, out):
    """Turn the run's dot products in `tile` into results at `out`, the address of its first column."""
    tensor, scale = word(seg, SEG.tensor), splat8(float_word(seg, SEG.scale))
    bias = bias_address(word(seg, SEG.bias), 0, tensor, octet)
    for i in range(n):
        y = add_bias(load8(tile + OCTET_BYTES * i), bias, i) * scale
        if word(seg, SEG.sigmoid) != 0:
            y = sigmoid8(y)
        put_octet(out + OCTET_BYTES * i, y, word(seg, SEG.add), rows_from(tensor, octet + i))


@inline_kernel
def run_one(seg, octet, n, act, tile):
    """One run, one row."""
    tensor = word(seg, SEG.tensor)
    out = word(seg, SEG.out) + word(seg, SEG.out_offset) + column_bytes(tensor, octet)
    if is_plain(seg, octet, n):
        dot_run(tensor, 0, octet, n, act, out)
    else:
        dot_run(tensor, 0, octet, n, act, tile)
        finish(seg, octet, n, tile, out)


@inline_kernel
def run_many(seg, octet, n, act, act_stride, n_rows, tmp):
    """One run, all rows, a block of them at a time."""
    tensor, out_stride = word(seg, SEG.tensor), word(seg, SEG.out_stride)
    out = word(seg, SEG.out) + word(seg, SEG.out_offset) + column_bytes(tensor, octet)
    plain, tile = is_plain(seg, octet, n), tmp + TMP_TILE
    w, stride = octet_address(tensor, 0, octet), word(tensor, abi.TENSOR_OCTET_STRIDE)
    for first in range(0, n_rows, ROW_BLOCK):
        n_tok = min(n_rows - first, ROW_BLOCK)
        for t in range(n_tok):
            to = out + (first + t) * out_stride if plain else tile + t * TILE_ROW_BYTES
            list_row(tmp, t, act + (first + t) * act_stride, to)
        dots(tensor, w, stride, n, n_tok, tmp)
        if not plain:
            for t in range(n_tok):
                finish(seg, octet, n, tile + t * TILE_ROW_BYTES, out + (first + t) * out_stride)


@op
def linear_one(control, args, thread):
    """Claim runs of octets of all segments, one after the other, for the row in the thread scratch."""
    scratch = word(thread, abi.THREAD_SCRATCH)
    work, tmp = slice_bytes(args), scratch + word(args, ARG.tmp_scratch)
    unit, start = first_unit(thread), 0
    for i in range(word(args, ARG.n_segments)):
        seg = segment_at(args, i)
        tensor = word(seg, SEG.tensor)
        act = scratch + word(args, ARG.act_scratch) + word(seg, SEG.act_off)
        n_octets = word(tensor, abi.TENSOR_N_OCTETS)
        run = one_row_run(control, thread, work, word(tensor, abi.TENSOR_OCTET_STRIDE), RUN_OCTETS_ONE)
        stop = start + n_runs(n_octets, run)
        while unit < stop:
            octet = (unit - start) * run
            run_one(seg, octet, min(run, n_octets - octet), act, tmp)
            unit = claim(thread)
        start = stop


@op
def linear_many(control, args, thread):
    """As `linear_one`, for all rows of the step, whose activations are in the shared buffer."""
    tmp, n_threads = word(thread, abi.THREAD_SCRATCH), word(thread, abi.THREAD_N_THREADS)
    tmp += word(args, ARG.tmp_scratch)
    n_rows, work = word(control, word(args, ARG.count)), slice_bytes(args)
    unit, start = first_unit(thread), 0
    for i in range(word(args, ARG.n_segments)):
        seg = segment_at(args, i)
        tensor = word(seg, SEG.tensor)
        act = word(args, ARG.act_shared) + word(seg, SEG.act_off)
        n_octets = word(tensor, abi.TENSOR_N_OCTETS)
        run = run_octets(work, word(tensor, abi.TENSOR_OCTET_STRIDE), n_threads, RUN_OCTETS_MANY)
        stop = start + n_runs(n_octets, run)
        while unit < stop:
            octet = (unit - start) * run
            n = min(run, n_octets - octet)
            run_many(seg, octet, n, act, word(args, ARG.act_stride), n_rows, tmp)
            unit = claim(thread)
        start = stop
