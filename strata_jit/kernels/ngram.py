"""The n-gram embedding (PLE) on the residual streams: `ngram_gate` and `ngram_conv`.

Per stream c, with key and value from the row's n-gram embedding: s = <RMS(key_c) * key_norm_c, RMS(R_c) *
query_norm_c> / sqrt(n), the dot product in eight lanes as a norm's sum of squares; gate = sigmoid(sign(s) *
sqrt(max(|s|, 1e-6))); G_c = gate * value; N_c = RMS(G_c) * conv_norm_c; R_c = R_c + G_c. Then, over time,
R = R + silu(sum of conv[tap] * N[position - (n_tap - 1 - tap) * dilation]), fused, from the oldest tap on.
Positions before the sequence count as absent.

N lives in a ring for each sequence, so that a chunk and the steps before it look the same. Owns the ring: the
slot of a position is position mod n_ring, n_ring > history + rows of a step, so no step overwrites what it
reads. Streams and rows are those of `hyper`.
"""

import math

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import STEP_N_ROWS, THREAD_SCRATCH, THREAD_TEAM_INDEX
from strata_jit.kernels.hyper import streams_at, team_rows
from strata_jit.kernels.kv import row_position, row_sequence
from strata_jit.kernels.mathx import sigmoid8, silu8
from strata_jit.kernels.norm import rms_norm, vector_address
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.vec import (
    float_word,
    fma1,
    fma8,
    lane8,
    load8,
    load_f32,
    splat8,
    store8,
    store_f32,
    sum8,
    word,
)

GATE, CONV = arg_index("ngram_gate"), arg_index("ngram_conv")
ZERO = np.float32(0)
SMALLEST = np.float32(1e-6)


@glue
def ring_slot(control, ring, n_ring, row, back, row_bytes):
    """Address of N of the position `back` before a row's, in the ring of its sequence."""
    slot = (row_position(control, row) - back) % n_ring
    return ring + (row_sequence(control, row) * n_ring + slot) * row_bytes


@inline_kernel
def dot_lanes(x, y, n):
    """Dot product of float32[n] at two addresses, n % 8 == 0, in eight lanes."""
    total = splat8(ZERO)
    for k in range(0, 4 * n, 32):
        total = fma8(load8(x + k), load8(y + k), total)
    return sum8(total)


@inline_kernel
def gate_of(s):
    """sigmoid(sign(s) * sqrt(max(|s|, 1e-6))); of 0 it is a half, a NaN stays."""
    root = np.float32(math.sqrt(max(abs(s), SMALLEST)))
    if s < ZERO:
        root = -root
    signed = root if s != ZERO else ZERO
    return lane8(sigmoid8(splat8(signed if s == s else s)), 0)


@inline_kernel
def add_gated(stream, value, gate, n, gated):
    """gated = gate * value; stream = stream + gated; float32[n] each."""
    for k in range(0, 4 * n, 32):
        g = splat8(gate) * load8(value + k)
        store8(gated + k, g)
        store8(stream + k, load8(stream + k) + g)


@glue
def gate_stream(args, at, stream, key, value, spare, out):
    """One stream, whose first element is at byte `at` of the row's streams: add G, write N at `out`."""
    n, eps = word(args, GATE.n), float_word(args, GATE.eps)
    rms_norm(key + at, vector_address(word(args, GATE.key_norm)) + at, n, eps, spare)
    rms_norm(stream, vector_address(word(args, GATE.query_norm)) + at, n, eps, out)
    gate = gate_of(dot_lanes(spare, out, n) / np.float32(math.sqrt(np.float32(n))))
    add_gated(stream, value, gate, n, spare)
    rms_norm(spare, vector_address(word(args, GATE.conv_norm)) + at, n, eps, out)


@inline_kernel
def copy_floats(source, n_bytes, target):
    """Copy n_bytes, a multiple of 32."""
    for k in range(0, n_bytes, 32):
        store8(target + k, load8(source + k))


@op
def ngram_gate(control, args, thread):
    """G onto the streams, N into the ring. One row: N also into every thread's scratch, the ring's by one."""
    n, n_stream, n_rows = word(args, GATE.n), word(args, GATE.n_stream), word(control, STEP_N_ROWS)
    work = word(thread, THREAD_SCRATCH) + word(args, GATE.work_scratch)
    row_bytes = 4 * n * n_stream
    first, step = team_rows(thread, n_rows)
    for row in range(first, n_rows, step):
        key = word(args, GATE.key_value) + row * word(args, GATE.key_value_stride)
        value = key + word(args, GATE.value_off)
        key += word(args, GATE.key_off)
        streams = streams_at(args, GATE.streams_scratch, thread, row, n_rows)
        slot = ring_slot(control, word(args, GATE.ring), word(args, GATE.n_ring), row, 0, row_bytes)
        out = work if n_rows == 1 else slot
        for at in range(0, row_bytes, 4 * n):
            gate_stream(args, at, streams + at, key, value, work + row_bytes, out + at)
        if n_rows == 1 and word(thread, THREAD_TEAM_INDEX) == 0:
            copy_floats(work, row_bytes, slot)


@inline_kernel
def add_tap(conv, n_tap, tap, normed, n, total):
    """total = fma(conv[i][tap], normed[i], total) for i < n."""
    conv += 4 * tap
    for i in range(n):
        at = total + 4 * i
        store_f32(at, fma1(load_f32(conv + 4 * n_tap * i), load_f32(normed + 4 * i), load_f32(at)))


@inline_kernel
def add_silu(x, n, streams):
    """streams = streams + silu(x), float32[n] each."""
    for k in range(0, 4 * n, 32):
        store8(streams + k, load8(streams + k) + silu8(load8(x + k)))


@op
def ngram_conv(control, args, thread):
    """The convolution over time onto the streams."""
    n, n_rows = word(args, CONV.n) * word(args, CONV.n_stream), word(control, STEP_N_ROWS)
    work, n_tap = word(thread, THREAD_SCRATCH) + word(args, CONV.work_scratch), word(args, CONV.n_tap)
    conv, total = vector_address(word(args, CONV.conv)), work + 4 * n
    first, step = team_rows(thread, n_rows)
    for row in range(first, n_rows, step):
        for k in range(0, 4 * n, 32):
            store8(total + k, splat8(ZERO))
        for tap in range(n_tap):
            back = (n_tap - 1 - tap) * word(args, CONV.dilation)
            normed = ring_slot(control, word(args, CONV.ring), word(args, CONV.n_ring), row, back, 4 * n)
            if n_rows == 1 and back == 0:
                normed = work  # the ring's copy is being written
            if back <= row_position(control, row):
                add_tap(conv, n_tap, tap, normed, n, total)
        add_silu(total, n, streams_at(args, CONV.streams_scratch, thread, row, n_rows))
