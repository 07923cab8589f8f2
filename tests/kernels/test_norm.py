"""The op `norm_quant` against its twins, bit for bit; one row against many, over teams."""

import numpy as np
import pytest

from strata_jit.kernels.layout import act_planes
from strata_jit.kernels.ref.norm import rms_norm
from tests.kernels.harness import Step, Team, Vector, aligned, floats
from tests.kernels.planes import BLOCK_COLS, KINDS, Planes

EPS = 1e-5
UNTOUCHED = 0xA5
TEAMS = [(1,), (3,), (2, 1), (1, 2, 3)]
ROW_SCRATCH = 64
TMP_SCRATCH = 1 << 16
CASES = [
    (n, kinds)
    for n in (32, 256, 576, 2048, 2560)
    for kinds in (("F32",), ("Q256",), ("Q32",), ("F32", "Q32"), KINDS)
    if all(n % BLOCK_COLS[k] == 0 for k in kinds)
]


def random_rows(n_rows, n, stride_floats, seed=0):
    x = floats(n_rows, stride_floats)
    x[:, :n] = np.random.default_rng(seed).standard_normal((n_rows, n))
    return x


def norm_quant(team, x, planes, weight, out_rows=None):
    """uint8[n_rows, n used bytes]; of a one-row step, the row in every thread's scratch."""
    n_rows = len(x) if out_rows is None else len(out_rows)
    shared = aligned(n_rows * planes.stride, fill=UNTOUCHED).reshape(n_rows, planes.stride)
    for scratch in team.scratch:
        scratch[:] = UNTOUCHED
    team.run(
        "norm_quant",
        Step(len(x), out_rows=[] if out_rows is None else out_rows),
        x=x,
        x_stride=x.strides[0],
        weight=0 if weight is None else Vector(weight),
        n=planes.n,
        eps=EPS,
        gather=int(out_rows is not None),
        tmp_scratch=TMP_SCRATCH,
        **planes.fields(ROW_SCRATCH, shared),
    )
    if n_rows > 1:
        return shared[:, planes.used]
    assert (shared == UNTOUCHED).all()
    stop = ROW_SCRATCH + planes.stride
    assert all((s[:ROW_SCRATCH] == UNTOUCHED).all() for s in team.scratch)
    assert all((s[stop:TMP_SCRATCH] == UNTOUCHED).all() for s in team.scratch)
    return np.stack([s[ROW_SCRATCH:stop] for s in team.scratch])[:, planes.used]


@pytest.mark.parametrize(("n", "kinds"), CASES)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_quant_matches_ref(n, kinds, normed):
    x, planes = random_rows(3, n, n), Planes(n, kinds)
    weight = np.random.default_rng(1).uniform(0.5, 2, n).astype(np.float32) if normed else None
    expected = planes.expected(rms_norm(x, weight, EPS) if normed else x)
    for team in (Team((1,)), Team((2, 1))):
        np.testing.assert_array_equal(norm_quant(team, x, planes, weight), expected)
        for row in range(3):
            for copy in norm_quant(team, x[row : row + 1], planes, weight):
                np.testing.assert_array_equal(copy, expected[row])


@pytest.mark.parametrize("threads", TEAMS)
@pytest.mark.parametrize("n_rows", [2, 5, 17])
def test_norm_quant_every_team_gives_the_same(threads, n_rows):
    x, planes = random_rows(n_rows, 256, 264), Planes(256, KINDS)
    weight = np.linspace(0.5, 1.5, 256, dtype=np.float32)
    alone = norm_quant(Team((1,)), x, planes, weight)
    np.testing.assert_array_equal(norm_quant(Team(threads), x, planes, weight), alone)


@pytest.mark.parametrize("out_rows", [[3], [0], [1, 2, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_norm_quant_gathers_rows_whose_logits_are_wanted(out_rows):
    x, planes = random_rows(7, 256, 256), Planes(256, KINDS)
    weight = np.ones(256, np.float32)
    expected = norm_quant(Team((1,)), x, planes, weight)[out_rows]
    found = norm_quant(Team((2, 1)), x, planes, weight, out_rows=out_rows)
    np.testing.assert_array_equal(found, expected if len(out_rows) > 1 else np.repeat(expected, 3, axis=0))


def test_norm_quant_gathers_the_only_row():
    x, planes, team = random_rows(1, 256, 256), Planes(256, KINDS), Team((2,))
    weight = np.ones(256, np.float32)
    plain = norm_quant(team, x, planes, weight)
    np.testing.assert_array_equal(norm_quant(team, x, planes, weight, out_rows=[0]), plain)


def test_norm_quant_keeps_a_nan_visible():
    x, team = random_rows(2, 512, 512), Team((1,))
    x[1, 300] = np.nan
    rows = norm_quant(team, x, Planes(512, ("Q256",)), None)
    start = act_planes("Q256", 512).d
    d = rows[:, start : start + 8].copy().view(np.float32)
    np.testing.assert_array_equal(np.isnan(d), [[False, False], [False, True]])
    y = norm_quant(team, x, Planes(512, ("F32",)), np.ones(512, np.float32)).copy().view(np.float32)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()
