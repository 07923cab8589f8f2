"""RMS norm, and the op that norms a row and quantises it for the matrices that read it.

Owns the order of the sum of squares: eight lane accumulators (k mod 8), fused, ascending, then `vec.sum8`.
"""

import math

import numpy as np

from strata_jit.kernels._jit import glue, inline_kernel, op
from strata_jit.kernels.abi import (
    STEP_N_OUT,
    STEP_N_ROWS,
    STEP_OUT_ROWS,
    TENSOR_ADDR,
    THREAD_SCRATCH,
    THREAD_TEAM_INDEX,
    THREAD_TEAM_SIZE,
)
from strata_jit.kernels.quantise import act_row, float_plane, quantise_row
from strata_jit.kernels.registry import arg_index
from strata_jit.kernels.vec import float_word, fma8, load8, splat8, store8, sum8, word

A = arg_index("norm_quant")
ONE = np.float32(1)


@glue
def rms_scale(x, n, eps):
    """1 / sqrt(mean(x*x) + eps) of float32[n] at `x`, n % 8 == 0."""
    total = splat8(np.float32(0))
    for k in range(0, 4 * n, 32):
        v = load8(x + k)
        total = fma8(v, v, total)
    return ONE / math.sqrt(sum8(total) / np.float32(n) + eps)


@glue
def vector_address(tensor):
    """Address of a vector tensor's float32 values, from its record; 0 for no tensor."""
    return word(tensor, TENSOR_ADDR) if tensor != 0 else 0


@inline_kernel
def scale_weigh(x, scale, weight, n, out):
    """out = (x * scale) * weight, float32[n] at each address; `out` may be `x`."""
    scale = splat8(scale)
    for k in range(0, 4 * n, 32):
        store8(out + k, (load8(x + k) * scale) * load8(weight + k))


@glue
def rms_norm(x, weight, n, eps, out):
    """out = (x * rms_scale) * weight, float32[n] at each address; `out` may be `x`."""
    scale_weigh(x, rms_scale(x, n, eps), weight, n, out)


@op
def norm_quant(control, args, thread):
    """Activation planes of the normed rows, or of the rows themselves if there is no weight.

    One row: every thread, into its scratch. Many rows: rows in turn over the team, into the shared buffer.
    """
    gather = word(args, A.gather)
    n_rows = word(control, STEP_N_OUT if gather else STEP_N_ROWS)
    first, step = word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE)
    if n_rows == 1:
        first, step = 0, 1
    temporary = word(thread, THREAD_SCRATCH) + word(args, A.tmp_scratch)
    weight, n = vector_address(word(args, A.weight)), word(args, A.n)
    for row in range(first, n_rows, step):
        source = word(control + word(control, STEP_OUT_ROWS), row) if gather else row
        x = word(args, A.x) + source * word(args, A.x_stride)
        dst = act_row(args, A.act_scratch, thread, row, n_rows)
        if weight != 0:
            y = float_plane(dst, args, A.act_scratch, temporary)
            rms_norm(x, weight, n, float_word(args, A.eps), y)
            x = y
        quantise_row(x, n, dst, args, A.act_scratch)
