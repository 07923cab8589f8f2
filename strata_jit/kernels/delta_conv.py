"""What surrounds the recurrence of a gated delta net: convolution, lengths and gates before, norm after.

Owns the ops `delta_conv` and `delta_norm`, the places of heads in a row of projections and in the history,
and these float orders. Convolution over time, per channel: y = w0 * x[t-3], then fma(w[j], x[t-3+j], y)
ascending, inputs before the sequence's first being 0; then silu. Length: squares summed as in the RMS norm,
x * (1 / sqrt(sum + eps)), the factor of q times q_scale. Gates: beta = sigmoid(b), decay =
exp(a * softplus(alpha + dt)). Output: rms_norm(o) * gate.
"""

import math

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    ROW_SEQUENCE,
    ROW_WORDS,
    STEP_N_ROWS,
    STEP_ROWS,
    THREAD_SCRATCH,
    THREAD_TEAM_INDEX,
    THREAD_TEAM_SIZE,
)
from strata_jit.kernels.kv import row_position
from strata_jit.kernels.mathx import exp8, sigmoid8, silu8, softplus8
from strata_jit.kernels.norm import rms_norm, vector_address
from strata_jit.kernels.quantise import act_row, float_plane, quantise_row
from strata_jit.kernels.registry import DELTA_TAPS, arg_index
from strata_jit.kernels.vec import (
    even8,
    float_word,
    fma8,
    lane8,
    load8,
    load_f32,
    odd8,
    splat8,
    store8,
    store_f32,
    sum8,
    word,
)

A = arg_index("delta_conv")
"""Arguments that `delta_conv` and `delta_net` have in common, at the same places."""
OUT = arg_index("delta_norm")
ONE = np.float32(1)
ZERO = np.float32(0)


# --- places -------------------------------------------------------------------------------------------------


@glue
def row_sequence(control, row):
    """Sequence of a row of the step."""
    return word(control + word(control, STEP_ROWS), row * ROW_WORDS + ROW_SEQUENCE)


@glue
def k_head_of(args, head):
    """The k head (and q head) that a v head reads."""
    return head // word(args, A.k_run) % word(args, A.n_head_k)


@glue
def projection(args, row):
    """Address of a row of projections."""
    return word(args, A.proj) + row * word(args, A.proj_stride)


@glue
def v_offset(args, head):
    """Byte offset of a v (or z) head from the first."""
    group = word(args, A.n_head_v) // word(args, A.n_head_k)
    return head // group * word(args, A.vz_stride) + head % group * 4 * word(args, A.head_dim)


@glue
def convolved_head(args, row, head):
    """Address of head number `head` of q | k | v."""
    n_k = word(args, A.n_head_k)
    if head < n_k:
        return projection(args, row) + word(args, A.q_off) + head * word(args, A.qk_stride)
    if head < 2 * n_k:
        return projection(args, row) + word(args, A.k_off) + (head - n_k) * word(args, A.qk_stride)
    return projection(args, row) + word(args, A.v_off) + v_offset(args, head - 2 * n_k)


# --- arithmetic ---------------------------------------------------------------------------------------------


@inline_kernel
def past_input(history, place_bytes, position, back):
    """Eight channels `back` positions ago, 0 before the first position. history: of place 0."""
    if position < back:
        return splat8(ZERO)
    return load8(history + (position - back) % DELTA_TAPS * place_bytes)


@inline_kernel
def convolve(x, taps, history, place_bytes, position, keep, n, out):
    """out = silu(convolution over time) of n channels, a multiple of 8; `out` may be `x`.

    x: the inputs at `position`; taps: float32[n][DELTA_TAPS]; history: of the channels, place 0. With `keep`
    the inputs go into the history: nobody reads their place during the step of one row.
    """
    for c in range(0, 4 * n, 32):
        w = taps + DELTA_TAPS * c
        w01, w23, w45, w67 = load8(w), load8(w + 32), load8(w + 64), load8(w + 96)
        even_low, even_high = even8(w01, w23), even8(w45, w67)
        odd_low, odd_high = odd8(w01, w23), odd8(w45, w67)
        now = load8(x + c)
        y = even8(even_low, even_high) * past_input(history + c, place_bytes, position, 3)
        y = fma8(even8(odd_low, odd_high), past_input(history + c, place_bytes, position, 2), y)
        y = fma8(odd8(even_low, even_high), past_input(history + c, place_bytes, position, 1), y)
        y = fma8(odd8(odd_low, odd_high), now, y)
        if keep:
            store8(history + c + position % DELTA_TAPS * place_bytes, now)
        store8(out + c, silu8(y))


@inline_kernel
def normalise_length(x, n, eps, scale):
    """x *= scale / its length, in place, float32[n], n % 8 == 0."""
    total = splat8(ZERO)
    for i in range(0, 4 * n, 32):
        v = load8(x + i)
        total = fma8(v, v, total)
    factor = splat8(ONE / math.sqrt(sum8(total) + eps) * scale)
    for i in range(0, 4 * n, 32):
        store8(x + i, load8(x + i) * factor)


@inline_kernel
def convolve_part(control, args, row, head, first, n, keep, out):
    """`convolve` for n channels from number `first` on of head number `head` of q | k | v."""
    head_dim, position = word(args, A.head_dim), row_position(control, row)
    channel_bytes = 4 * (head * head_dim + first)
    place_bytes = 4 * head_dim * (2 * word(args, A.n_head_k) + word(args, A.n_head_v))
    history = word(args, A.history) + word(args, A.history_off) + channel_bytes
    history += row_sequence(control, row) * word(args, A.history_stride)
    taps = vector_address(word(args, A.conv)) + DELTA_TAPS * channel_bytes
    x = convolved_head(args, row, head) + 4 * first
    convolve(x, taps, history, place_bytes, position, keep, n, out)


@inline_kernel
def prepare_key(control, args, row, head, keep, out):
    """Head number `head` of q | k into float32[head_dim] at `out`: convolution, silu, length."""
    head_dim = word(args, A.head_dim)
    convolve_part(control, args, row, head, 0, head_dim, keep, out)
    scale = float_word(args, A.q_scale) if head < word(args, A.n_head_k) else ONE
    normalise_length(out, head_dim, float_word(args, A.eps), scale)


@inline_kernel
def head_gates(args, row, head):
    """(beta, decay) of a v head."""
    group = word(args, A.gate_group)
    beta = projection(args, row) + word(args, A.gate_off) + 4 * (head // group * 2 * group + head % group)
    step = load_f32(beta + 4 * group) + load_f32(vector_address(word(args, A.dt)) + 4 * head)
    rate = lane8(softplus8(splat8(step)), 0) * load_f32(vector_address(word(args, A.a)) + 4 * head)
    return lane8(sigmoid8(splat8(load_f32(beta))), 0), lane8(exp8(splat8(rate)), 0)


# --- ops ----------------------------------------------------------------------------------------------------


@op
def delta_conv(control, args, thread):
    """In turn over the team: heads of q | k | v, each over all rows, then the gates of rows."""
    n_rows, n_k, n_v = word(control, STEP_N_ROWS), word(args, A.n_head_k), word(args, A.n_head_v)
    first, step = word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE)
    for head in range(first, 2 * n_k + n_v, step):
        for row in range(n_rows):
            x = convolved_head(args, row, head)
            if head < 2 * n_k:
                prepare_key(control, args, row, head, 1, x)
            else:
                convolve_part(control, args, row, head, 0, word(args, A.head_dim), 1, x)
    for row in range(first, n_rows, step):
        for head in range(n_v):
            beta, decay = head_gates(args, row, head)
            to = word(args, A.gates) + 8 * (row * n_v + head)
            store_f32(to, beta)
            store_f32(to + 4, decay)


@op
def delta_norm(control, args, thread):
    """Norm, gate and quantise. One row: every thread, into its scratch. Many: rows in turn over the team."""
    n_rows, n_head = word(control, STEP_N_ROWS), word(args, OUT.n_head)
    head_bytes = 4 * word(args, OUT.head_dim)
    first, step = word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE)
    if n_rows == 1:
        first, step = 0, 1
    temporary = word(thread, THREAD_SCRATCH) + word(args, OUT.tmp_scratch)
    norm, eps = vector_address(word(args, OUT.norm)), float_word(args, OUT.eps)
    for row in range(first, n_rows, step):
        out = word(args, OUT.out) + row * word(args, OUT.out_stride)
        dst = act_row(args, OUT.act_scratch, thread, row, n_rows)
        y = float_plane(dst, args, OUT.act_scratch, temporary)
        for head in range(n_head):
            rms_norm(out + head * head_bytes, norm, head_bytes // 4, eps, y + head * head_bytes)
        for i in range(0, n_head * head_bytes, 32):
            store8(y + i, load8(y + i) * load8(out + n_head * head_bytes + i))
        quantise_row(y, n_head * head_bytes // 4, dst, args, OUT.act_scratch)
