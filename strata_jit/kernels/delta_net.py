"""The op `delta_net`: the recurrence of a gated delta net, and the state that it keeps from token to token.

Per v head the state is a matrix S[head_dim][head_dim], rows by k, columns by v, and a token does

    S = decay * S;  d = beta * (v - S^T k);  S = S + k d^T;  o = S^T q

Columns are independent given k, q and the gates. A unit is DELTA_COLUMNS of them, side by side in memory; the
units of a layer are cut into one range for each thread of the team, always the same, so a state stays where
the thread that computes it has touched it first. A unit runs over all rows of a step before the next begins.

Order of floats, per column: t = S[k] * decay; r in four accumulators by k mod 4, fma(k[k], t, r) ascending,
(r0 + r1) + (r2 + r3); d = beta * (v - r); S[k] = fma(k[k], d, t); o as r, with fma(q[k], S[k], o).
"""

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    STEP_N_ROWS,
    THREAD_SCRATCH,
    THREAD_STATE,
    THREAD_TEAM_INDEX,
    THREAD_TEAM_SIZE,
)
from strata_jit.kernels.delta_conv import (
    convolve_part,
    convolved_head,
    head_gates,
    k_head_of,
    prepare_key,
    projection,
    row_sequence,
    v_offset,
)
from strata_jit.kernels.kv import row_position
from strata_jit.kernels.mathx import sigmoid8, silu8
from strata_jit.kernels.registry import DELTA_COLUMNS, GATE_SILU, arg_index
from strata_jit.kernels.vec import fma8, load8, load_f32, prefetch, splat8, store8, word

A = arg_index("delta_net")
ZERO = np.float32(0)
LINE = 4 * DELTA_COLUMNS
"""Bytes of a unit's columns in one row of the state: a cache line."""


@inline_kernel
def _read(state, key, decay, total):
    """total + key[0] * (decay * state) of eight columns of one row."""
    return fma8(splat8(load_f32(key)), load8(state) * decay, total)


@inline_kernel
def _write(state, key, decay, d, query, total):
    """Update eight columns of one row; total + query[0] * state."""
    s = fma8(splat8(load_f32(key)), d, load8(state) * decay)
    store8(state, s)
    return fma8(splat8(load_f32(query)), s, total)


@inline_kernel
def advance(state, n, query, key, value, beta, decay, ahead, out):
    """One token of a unit: float32[n][DELTA_COLUMNS] at `state`, n % 4 == 0; output at `out`.

    query, key: float32[n]; value, out: float32[DELTA_COLUMNS]. `ahead`: bytes to the state that comes next,
    whose lines are asked for while this one is read.
    """
    g, b, h = splat8(decay), splat8(beta), 32
    x0 = x1 = x2 = x3 = y0 = y1 = y2 = y3 = splat8(ZERO)
    for i in range(0, n, 4):
        s0, k = state + LINE * i, key + 4 * i
        s1, s2, s3 = s0 + LINE, s0 + 2 * LINE, s0 + 3 * LINE
        prefetch(s0 + ahead)
        prefetch(s1 + ahead)
        prefetch(s2 + ahead)
        prefetch(s3 + ahead)
        x0, y0 = _read(s0, k, g, x0), _read(s0 + h, k, g, y0)
        x1, y1 = _read(s1, k + 4, g, x1), _read(s1 + h, k + 4, g, y1)
        x2, y2 = _read(s2, k + 8, g, x2), _read(s2 + h, k + 8, g, y2)
        x3, y3 = _read(s3, k + 12, g, x3), _read(s3 + h, k + 12, g, y3)
    dx = b * (load8(value) - ((x0 + x1) + (x2 + x3)))
    dy = b * (load8(value + h) - ((y0 + y1) + (y2 + y3)))
    x0 = x1 = x2 = x3 = y0 = y1 = y2 = y3 = splat8(ZERO)
    for i in range(0, n, 4):
        s0, k, q = state + LINE * i, key + 4 * i, query + 4 * i
        s1, s2, s3 = s0 + LINE, s0 + 2 * LINE, s0 + 3 * LINE
        x0, y0 = _write(s0, k, g, dx, q, x0), _write(s0 + h, k, g, dy, q, y0)
        x1, y1 = _write(s1, k + 4, g, dx, q + 4, x1), _write(s1 + h, k + 4, g, dy, q + 4, y1)
        x2, y2 = _write(s2, k + 8, g, dx, q + 8, x2), _write(s2 + h, k + 8, g, dy, q + 8, y2)
        x3, y3 = _write(s3, k + 12, g, dx, q + 12, x3), _write(s3 + h, k + 12, g, dy, q + 12, y3)
    store8(out, (x0 + x1) + (x2 + x3))
    store8(out + h, (y0 + y1) + (y2 + y3))


@inline_kernel
def clear(state, nbytes):
    """Zero `nbytes`, a multiple of 32."""
    for i in range(0, nbytes, 32):
        store8(state + i, splat8(ZERO))


@inline_kernel
def output_gate(z, mode, out):
    """silu(z) or sigmoid(z) of a unit's columns."""
    for i in range(0, LINE, 32):
        store8(out + i, silu8(load8(z + i)) if mode == GATE_SILU else sigmoid8(load8(z + i)))


@glue
def units_of(args, thread):
    """(units of a head, first unit of the thread, end)."""
    per_head = word(args, A.head_dim) // DELTA_COLUMNS
    n, size = per_head * word(args, A.n_head_v), word(thread, THREAD_TEAM_SIZE)
    first = word(thread, THREAD_TEAM_INDEX) * n // size
    return per_head, first, (word(thread, THREAD_TEAM_INDEX) + 1) * n // size


@glue
def state_of(control, args, thread, row, unit):
    """Address of a unit's state, of the row's sequence."""
    base = word(thread, THREAD_STATE) + word(args, A.state_off)
    base += row_sequence(control, row) * word(args, A.state_stride)
    return base + unit * LINE * word(args, A.head_dim)


@inline_kernel
def run_unit(control, args, thread, row, unit, query, key, value, beta, decay, ahead):
    """One row of a unit, whose v is at `value`: its output and its gate into the row of `out`."""
    head_dim, n_head_v = word(args, A.head_dim), word(args, A.n_head_v)
    state = state_of(control, args, thread, row, unit)
    out = word(args, A.out) + row * word(args, A.out_stride) + LINE * unit
    if row_position(control, row) == 0:
        clear(state, LINE * head_dim)
    advance(state, head_dim, query, key, value, beta, decay, ahead, out)
    per_head = head_dim // DELTA_COLUMNS
    z = projection(args, row) + word(args, A.z_off) + v_offset(args, unit // per_head)
    output_gate(z + LINE * (unit % per_head), word(args, A.z_mode), out + 4 * n_head_v * head_dim)


@op
def delta_net_one(control, args, thread):
    """The thread's units at one row. Each thread prepares the q and k heads that it needs by itself, so that
    the team need not meet in between; the one with a head's first unit keeps their inputs in the history."""
    head_dim, n_k = word(args, A.head_dim), word(args, A.n_head_k)
    per_head, first, stop = units_of(args, thread)
    query = word(thread, THREAD_SCRATCH) + word(args, A.work_scratch)
    key, value = query + 4 * head_dim, query + 8 * head_dim
    unit_bytes, last_head = LINE * head_dim, -1
    beta = decay = ZERO
    if first < stop:
        for i in range(0, unit_bytes, LINE):
            prefetch(state_of(control, args, thread, 0, first) + i)
    for unit in range(first, stop):
        head, block = unit // per_head, unit % per_head
        if head != last_head:
            k_head, last_head = k_head_of(args, head), head
            keep = block == 0 and head == k_head * word(args, A.k_run)
            prepare_key(control, args, 0, k_head, keep, query)
            prepare_key(control, args, 0, n_k + k_head, keep, key)
            beta, decay = head_gates(args, 0, head)
        convolve_part(control, args, 0, 2 * n_k + head, DELTA_COLUMNS * block, DELTA_COLUMNS, 1, value)
        run_unit(control, args, thread, 0, unit, query, key, value, beta, decay, unit_bytes)


@op
def delta_net_many(control, args, thread):
    """The thread's units, each over all rows, from what `delta_conv` has prepared."""
    n_rows, n_k, n_v = word(control, STEP_N_ROWS), word(args, A.n_head_k), word(args, A.n_head_v)
    per_head, first, stop = units_of(args, thread)
    unit_bytes = LINE * word(args, A.head_dim)
    for unit in range(first, stop):
        head, block = unit // per_head, unit % per_head
        k_head = k_head_of(args, head)
        for row in range(n_rows):
            query = convolved_head(args, row, k_head)
            key = convolved_head(args, row, n_k + k_head)
            value = convolved_head(args, row, 2 * n_k + head) + LINE * block
            gates = word(args, A.gates) + 8 * (row * n_v + head)
            ahead = unit_bytes if row == n_rows - 1 else 0
            beta, decay = load_f32(gates), load_f32(gates + 4)
            run_unit(control, args, thread, row, unit, query, key, value, beta, decay, ahead)
