"""Quantisation of awkward rows, and the op `ff_quant`, against the twin bit for bit."""

import numpy as np
import pytest

from tests.kernels.harness import Step, Team, aligned, floats
from tests.kernels.planes import Planes

N_FF = 512
N_USED = 4
UNTOUCHED = 0xA5
ROUTE_SCRATCH = 0
ROW_SCRATCH = 256
PLANES = Planes(N_FF, ("Q256", "Q32"))


def awkward_rows():
    """float32[n, N_FF]: halves between two codes, zeros, tiny and huge blocks, one large element."""
    rng = np.random.default_rng(5)
    rows = [rng.standard_normal(N_FF)]
    rows.append(np.where(np.arange(N_FF) % 32 == 0, 127, (np.arange(N_FF) % 200 - 100) + 0.5))
    rows.append(np.zeros(N_FF))
    rows.append(np.where(np.arange(N_FF) < 256, -0.0, rng.standard_normal(N_FF)))
    rows.append(rng.standard_normal(N_FF) * 1e-38)
    rows.append(rng.standard_normal(N_FF) * 1e-44)
    rows.append(np.clip(rng.standard_normal(N_FF) * 1e38, -3.4e38, 3.4e38))
    rows.append(np.where(np.arange(N_FF) == 77, -1e6, rng.standard_normal(N_FF)))
    x = floats(len(rows), N_FF)
    x[...] = rows
    return x


def ff_quant(team, ff, ids):
    """uint8[n_entries, stride]; of a one-row step uint8[n_threads, n_entries, stride], from every scratch."""
    n_rows = len(ids)
    shared = aligned(ids.size * PLANES.stride, fill=UNTOUCHED).reshape(ids.size, PLANES.stride)
    for scratch in team.scratch:
        scratch[:] = UNTOUCHED
        if n_rows == 1:
            scratch[ROUTE_SCRATCH : ROUTE_SCRATCH + ids.nbytes] = ids.view(np.uint8).ravel()
    team.run(
        "ff_quant",
        Step(n_rows),
        ff=ff,
        ff_stride=ff.strides[0],
        n_ff=N_FF,
        n_used=ids.shape[1],
        route_scratch=ROUTE_SCRATCH,
        ids=ids if n_rows > 1 else 0,
        **PLANES.fields(ROW_SCRATCH, shared),
    )
    if n_rows > 1:
        return shared
    stop = ROW_SCRATCH + ids.size * PLANES.stride
    return np.stack([s[ROW_SCRATCH:stop].reshape(ids.size, PLANES.stride) for s in team.scratch])


@pytest.mark.parametrize("threads", [(1,), (3,), (1, 2)])
def test_ff_quant_matches_ref(threads):
    x = awkward_rows()
    many = ff_quant(Team(threads), x, np.arange(len(x)).reshape(-1, N_USED))
    np.testing.assert_array_equal(many[:, PLANES.used], PLANES.expected(x))
    for row in range(0, len(x), N_USED):
        one = ff_quant(Team(threads), x[row : row + N_USED], np.arange(N_USED)[None])
        for copy in one:
            np.testing.assert_array_equal(copy[:, PLANES.used], PLANES.expected(x[row : row + N_USED]))


@pytest.mark.parametrize("n_rows", [1, 2])
def test_ff_quant_skips_absent_experts(n_rows):
    ff = awkward_rows()[: n_rows * N_USED]
    ids = np.array([[3, -1, 0, 9], [-1, -1, 5, 2]])[:n_rows]
    ff[ids.ravel() < 0] = np.nan
    rows = ff_quant(Team((2,)), ff, ids).reshape(-1, ids.size, PLANES.stride)
    present = ids.ravel() >= 0
    for copy in rows:
        assert (copy[~present] == UNTOUCHED).all()
        np.testing.assert_array_equal(copy[present][:, PLANES.used], PLANES.expected(ff[present]))


def test_quantised_codes_stay_in_range():
    """The inverse of the scale may be rounded up: no code leaves [-127, 127] for it."""
    amax = np.random.default_rng(0).uniform(1e-3, 1e3, 4096).astype(np.float32)
    x = floats(2, 4096 * 32)
    x[...] = np.repeat(amax, 32)
    x[1] *= -1
    blocks = x.reshape(-1, N_FF)
    rows = ff_quant(Team((1,)), blocks, np.zeros((len(blocks), 1), np.int64))
    start = PLANES.offsets["Q32"]
    a = rows[:, start : start + 2 * N_FF].view(np.int8).reshape(-1, 2, 32)
    assert set(np.unique(a[:, 0])) == {-127, 127}
    assert (a[:, 1] == 127).all()
