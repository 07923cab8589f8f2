"""Activations of a feed-forward and the op `glu_quant` against their twins, bit for bit."""

import numpy as np
import pytest
from numba import njit

from strata_jit.kernels.glu import glu8
from strata_jit.kernels.ref.mathx import sigmoid_f32
from strata_jit.kernels.ref.moe import glu
from strata_jit.kernels.registry import GLU_SWIGLU, GLU_SWIGLU_OAI
from strata_jit.kernels.vec import load8, store8
from tests.kernels.harness import Step, Team, aligned, floats
from tests.kernels.planes import BLOCK_COLS, KINDS, Planes

ACTIVATIONS = [GLU_SWIGLU, GLU_SWIGLU_OAI]
ENDS = [0, 7, 7.0000005, 1e-45, 104, 3e38, np.inf]
SPECIAL = np.float32([*ENDS, *(-x for x in ENDS), np.nan])
ROW_SCRATCH, TMP_SCRATCH = 64, 1 << 15


@njit
def glu_rows(activation, gate, up, out, n_bytes):
    for k in range(0, n_bytes, 32):
        store8(out + k, glu8(activation, load8(gate + k), load8(up + k)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu8_matches_ref(activation):
    gate, up = 20 * np.random.default_rng(0).standard_normal((2, 1 << 14), np.float32)
    n = len(SPECIAL)
    gate[: n * n], up[: n * n] = np.repeat(SPECIAL, n), np.tile(SPECIAL, n)
    out = np.empty_like(gate)
    glu_rows(activation, gate.ctypes.data, up.ctypes.data, out.ctypes.data, out.nbytes)
    np.testing.assert_array_equal(out, glu(activation, gate, up))


def glu_quant(team, h, n, planes, activation, has_weight):
    """Activation rows; of a one-row step, the row in every thread's scratch."""
    n_rows = len(h)
    shared = aligned(n_rows * planes.stride).reshape(n_rows, planes.stride)
    team.run(
        "glu_quant", Step(n_rows), h=h, h_stride=h.strides[0], gate_off=0, up_off=4 * n,
        weight_off=8 * n if has_weight else -1, n_ff=n, activation=activation, tmp_scratch=TMP_SCRATCH,
        **planes.fields(ROW_SCRATCH, shared),
    )  # fmt: skip
    if n_rows > 1:
        return shared[:, planes.used]
    return np.stack([s[ROW_SCRATCH:][: planes.stride] for s in team.scratch])[:, planes.used]


CASES = [(n, kinds) for n in (32, 256, 768) for kinds in (("F32",), ("Q256",), ("Q32",), KINDS)
         if all(n % BLOCK_COLS[kind] == 0 for kind in kinds)]  # fmt: skip


@pytest.mark.parametrize(("n", "kinds"), CASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_weight", [False, True])
def test_glu_quant_matches_ref(n, kinds, activation, has_weight):
    h = floats(5, 2 * n + 8)
    h[:] = 3 * np.random.default_rng(n).standard_normal(h.shape)
    expected = glu(activation, h[:, :n], h[:, n : 2 * n])
    if has_weight:
        expected = expected * sigmoid_f32(h[:, 2 * n : 2 * n + 1])
    rows = Planes(n, kinds).expected(expected)
    for threads in ((1,), (2, 1)):
        team = Team(threads)
        np.testing.assert_array_equal(glu_quant(team, h, n, Planes(n, kinds), activation, has_weight), rows)
        for copy in glu_quant(team, h[2:3], n, Planes(n, kinds), activation, has_weight):
            np.testing.assert_array_equal(copy, rows[2])
