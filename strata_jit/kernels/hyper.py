"""Hyper-connections: several residual streams, and the ops between them and a layer's block.

A block reads mix(R): xn = RMS norm of each stream, times its weights; low = silu(down xn / n_stream);
gate = sigmoid(up low); the mean over the streams of xn * gate. Its output comes back by
R[c] = fma(2 * sigmoid((inject xn)[c] / n_stream), out, R[c]). The matrices are `linear` ops; these
divide as well (their `scale`), and take the gate's sigmoid. Owns where streams lie and the order of the sums
over them: ascending from the first, fused, then divided by n_stream.

In a step of one row every thread keeps streams of its own in its scratch, and all compute the same: a block
costs no barrier beyond those of its matrices. In a step of many, rows go to threads in turn, the same row to
the same thread in all ops here: what one op leaves in a stream, the next may read without a barrier.
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    STEP_N_OUT,
    STEP_N_ROWS,
    STEP_OUT_ROWS,
    THREAD_SCRATCH,
    THREAD_TEAM_INDEX,
    THREAD_TEAM_SIZE,
)
from strata_jit.kernels.mathx import sigmoid8, silu8
from strata_jit.kernels.norm import rms_norm, vector_address
from strata_jit.kernels.quantise import act_row, float_plane, quantise_row
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.vec import float_word, fma8, load8, load_f32, splat8, store8, word

COMBINE, NORM = arg_index("hc_combine"), arg_index("hc_norm")
LOW, MIX = arg_index("hc_low"), arg_index("hc_mix")
TWO = np.float32(2)


@glue
def team_rows(thread, n_rows):
    """(first, step) of the rows of this thread: in turn over the team, a single one is everybody's."""
    if n_rows == 1:
        return 0, 1
    return word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE)


@glue
def seen_rows(control, gather):
    """Rows that an op sees: all of the step, or those whose logits are wanted."""
    return word(control, STEP_N_OUT if gather else STEP_N_ROWS)


@glue
def step_row(control, gather, row):
    """Row of the step that is the op's `row`."""
    return word(control + word(control, STEP_OUT_ROWS), row) if gather else row


@glue
def streams_at(args, at, thread, row, n_rows):
    """Address of the streams of a row, one of n_rows; `at`: index of the first of the op's STREAMS fields."""
    if n_rows == 1:
        return word(thread, THREAD_SCRATCH) + word(args, at)
    return word(args, at + 1) + row * word(args, at + 2)


@inline_kernel
def start_streams(x, n_stream, n, streams):
    """float32[n_stream][n] at `streams`: copies of float32[n] at `x`."""
    for k in range(0, 4 * n, 32):
        v = load8(x + k)
        for c in range(n_stream):
            store8(streams + 4 * n * c + k, v)


@inline_kernel
def combine_streams(source, block, inject, n_stream, n, streams):
    """float32[n_stream][n] at `streams` (which may be `source`) = source + block, by each stream's factor."""
    for c in range(n_stream):
        factor = splat8(TWO) * sigmoid8(splat8(load_f32(inject + 4 * c)))
        for k in range(4 * n * c, 4 * n * (c + 1), 32):
            store8(streams + k, fma8(factor, load8(block + k - 4 * n * c), load8(source + k)))


@inline_kernel
def mix_streams(xn, gate, n_stream, n, out):
    """float32[n] at `out`: the mean over the streams of xn * gate, float32[n_stream][n] each."""
    count = splat8(np.float32(n_stream))
    for k in range(0, 4 * n, 32):
        total = load8(xn + k) * load8(gate + k)
        for at in range(4 * n + k, 4 * n * n_stream, 4 * n):
            total = fma8(load8(xn + at), load8(gate + at), total)
        store8(out + k, total / count)


@op
def hc_combine(control, args, thread):
    """Streams of the rows: copies of the embedding, or with a block's output added."""
    gather, n_stream, n = word(args, COMBINE.gather), word(args, COMBINE.n_stream), word(args, COMBINE.n)
    n_rows = seen_rows(control, gather)
    first, step = team_rows(thread, n_rows)
    for i in range(first, n_rows, step):
        row = step_row(control, gather, i)
        streams = streams_at(args, COMBINE.streams_scratch, thread, row, n_rows)
        block = word(args, COMBINE.block) + row * word(args, COMBINE.block_stride)
        if word(args, COMBINE.first) != 0:
            start_streams(block, n_stream, n, streams)
        else:
            source = streams_at(args, COMBINE.streams_scratch, thread, row, word(control, STEP_N_ROWS))
            inject = word(args, COMBINE.inject) + row * word(args, COMBINE.inject_stride)
            inject += word(args, COMBINE.inject_off)
            combine_streams(source, block, inject, n_stream, n, streams)


@op
def hc_norm(control, args, thread):
    """Normed streams of the rows, as activations."""
    gather, n_stream, n = word(args, NORM.gather), word(args, NORM.n_stream), word(args, NORM.n)
    n_rows, weight = seen_rows(control, gather), vector_address(word(args, NORM.weight))
    first, step = team_rows(thread, n_rows)
    for i in range(first, n_rows, step):
        row = step_row(control, gather, i)
        streams = streams_at(args, NORM.streams_scratch, thread, row, n_rows)
        dst = act_row(args, NORM.act_scratch, thread, i, n_rows)
        xn = dst + word(args, NORM.off_f32)
        for at in range(0, 4 * n * n_stream, 4 * n):
            rms_norm(streams + at, weight + at, n, float_word(args, NORM.eps), xn + at)
        quantise_row(xn, n * n_stream, dst, args, NORM.act_scratch)


@op
def hc_low(control, args, thread):
    """silu of the low-rank rows, as activations."""
    n_rows, n = word(control, word(args, LOW.count)), word(args, LOW.n)
    temporary = word(thread, THREAD_SCRATCH) + word(args, LOW.tmp_scratch)
    first, step = team_rows(thread, n_rows)
    for row in range(first, n_rows, step):
        dst = act_row(args, LOW.act_scratch, thread, row, n_rows)
        x = word(args, LOW.low) + row * word(args, LOW.low_stride)
        y = float_plane(dst, args, LOW.act_scratch, temporary)
        for k in range(0, 4 * n, 32):
            store8(y + k, silu8(load8(x + k)))
        quantise_row(y, n, dst, args, LOW.act_scratch)


@op
def hc_mix(control, args, thread):
    """What a block reads: the mean of the gated streams, as activations."""
    n_rows, n = word(control, word(args, MIX.count)), word(args, MIX.n)
    temporary = word(thread, THREAD_SCRATCH) + word(args, MIX.tmp_scratch)
    first, step = team_rows(thread, n_rows)
    for row in range(first, n_rows, step):
        dst = act_row(args, MIX.act_scratch, thread, row, n_rows)
        y = float_plane(dst, args, MIX.act_scratch, temporary)
        xn = act_row(args, MIX.xn_scratch, thread, row, n_rows) + word(args, MIX.xn_off)
        gate = word(args, MIX.gate) + row * word(args, MIX.gate_stride)
        mix_streams(xn, gate, word(args, MIX.n_stream), n, y)
        quantise_row(y, n, dst, args, MIX.act_scratch)
