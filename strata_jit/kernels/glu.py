"""Gated activations of a feed-forward: `glu8` for kernels, and the op `glu_quant`.

Owns their formulas. GLU_SWIGLU: silu(gate) * up. GLU_SWIGLU_OAI, as gpt-oss has it: g = min(gate, 7),
u = min(max(up, -7), 7), (g / (1 + exp(-(1.702 * g)))) * (u + 1). A NaN stays one.
"""

import numpy as np

from strata_jit.kernels._jit import inline_kernel, op
from strata_jit.kernels.abi import STEP_N_ROWS, THREAD_SCRATCH, THREAD_TEAM_INDEX, THREAD_TEAM_SIZE
from strata_jit.kernels.mathx import exp8, sigmoid8, silu8
from strata_jit.kernels.quantise import act_row, float_plane, quantise_row
from strata_jit.kernels.registry import GLU_SWIGLU_OAI, arg_index
from strata_jit.kernels.vec import load8, load_f32, max8, min8, splat8, store8, word

A = arg_index("glu_quant")
OAI_ALPHA = np.float32(1.702)
OAI_LIMIT = np.float32(7)
ONE = np.float32(1)


@inline_kernel
def swiglu_oai8(gate, up):
    """The activation of gpt-oss."""
    one = splat8(ONE)
    g = min8(splat8(OAI_LIMIT), gate)
    u = min8(splat8(OAI_LIMIT), max8(splat8(-OAI_LIMIT), up))
    return (g / (one + exp8(-(g * splat8(OAI_ALPHA))))) * (u + one)


@inline_kernel
def glu8(activation, gate, up):
    """Eight lanes of the activation GLU_..."""
    if activation == GLU_SWIGLU_OAI:
        return swiglu_oai8(gate, up)
    return silu8(gate) * up


@inline_kernel
def glu_row(args, h, y):
    """float32[n_ff] at `y` from the row at `h`."""
    weight = splat8(ONE)
    if word(args, A.weight_off) >= 0:
        weight = sigmoid8(splat8(load_f32(h + word(args, A.weight_off))))
    gate, up, activation = h + word(args, A.gate_off), h + word(args, A.up_off), word(args, A.activation)
    for k in range(0, 4 * word(args, A.n_ff), 32):
        store8(y + k, glu8(activation, load8(gate + k), load8(up + k)) * weight)


@op
def glu_quant(control, args, thread):
    """One row: every thread, to its scratch. Many rows: rows in turn over the team, to the shared buffer."""
    n_rows = word(control, STEP_N_ROWS)
    first, step = word(thread, THREAD_TEAM_INDEX), word(thread, THREAD_TEAM_SIZE)
    if n_rows == 1:
        first, step = 0, 1
    temporary = word(thread, THREAD_SCRATCH) + word(args, A.tmp_scratch)
    for row in range(first, n_rows, step):
        dst = act_row(args, A.act_scratch, thread, row, n_rows)
        y = float_plane(dst, args, A.act_scratch, temporary)
        glu_row(args, word(args, A.h) + row * word(args, A.h_stride), y)
        quantise_row(y, word(args, A.n_ff), dst, args, A.act_scratch)
