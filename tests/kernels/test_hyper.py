"""The hyper-connection ops against their twins, bit for bit; one row against many, over teams."""

import numpy as np
import pytest

from strata_jit.kernels.abi import STEP_N_OUT, STEP_N_ROWS
from strata_jit.kernels.ref import hyper as ref
from strata_jit.kernels.ref.mathx import silu_f32
from tests.kernels.harness import Step, Team, Vector, aligned, floats
from tests.kernels.planes import KINDS, Planes

EPS = 1e-6
TEAMS = [(1,), (3,), (2, 1)]
SHAPES = [(4, 256), (2, 64), (3, 40), (1, 8)]
STREAMS, ACT, TMP = 64, 1 << 14, 1 << 16


def rows_of(rng, *shape):
    out = floats(*shape)
    out[:] = 3 * rng.standard_normal(shape)
    return out


class Streams:
    """Streams of the rows of a step, shared and in every thread's scratch."""

    def __init__(self, threads, n_rows, n_stream, n, values=None):
        self.team, self.n_stream, self.n = Team(threads), n_stream, n
        self.shared = floats(n_rows, n_stream * n)
        if values is not None and n_rows > 1:
            self.shared[:] = values.reshape(n_rows, -1)
        for copy in self.private():
            copy[:] = np.nan if values is None or n_rows > 1 else values.ravel()

    def private(self):
        size = 4 * self.n_stream * self.n
        return [s[STREAMS : STREAMS + size].view(np.float32) for s in self.team.scratch]

    def fields(self):
        return {
            "streams_scratch": STREAMS, "streams": self.shared, "streams_stride": self.shared.strides[0],
            "n_stream": self.n_stream, "n": self.n,
        }  # fmt: skip

    def combine(self, step, block, inject=None, gather=0):
        self.team.run(
            "hc_combine", step, block=block, block_stride=block.strides[0],
            inject=block if inject is None else inject,
            inject_stride=0 if inject is None else inject.strides[0],
            inject_off=0 if inject is None else 8,
            first=int(inject is None), gather=gather, **self.fields(),
        )  # fmt: skip

    def found(self, n_rows):
        """[copies, n_rows, n_stream, n]"""
        copies = self.private() if n_rows == 1 else [self.shared]
        return np.stack(copies).reshape(len(copies), -1, self.n_stream, self.n)


@pytest.mark.parametrize("threads", TEAMS)
@pytest.mark.parametrize("n_rows", [1, 2, 7])
@pytest.mark.parametrize(("n_stream", "n"), SHAPES)
def test_streams_begin_as_copies_and_take_a_block(threads, n_rows, n_stream, n):
    rng = np.random.default_rng(n)
    x, out = rows_of(rng, n_rows, n + 8), rows_of(rng, n_rows, n + 8)
    inject = rows_of(rng, n_rows, n_stream + 2)
    streams = Streams(threads, n_rows, n_stream, n)
    streams.combine(Step(n_rows), x)
    start = np.repeat(x[:, None, :n], n_stream, axis=1)
    np.testing.assert_array_equal(streams.found(n_rows), np.broadcast_to(start, streams.found(n_rows).shape))
    streams.combine(Step(n_rows), out, inject)
    expected = [ref.combine(s, o[:n], i[2:]) for s, o, i in zip(start, out, inject, strict=True)]
    for copy in streams.found(n_rows):
        np.testing.assert_array_equal(copy, expected)


@pytest.mark.parametrize("out_rows", [[2], [0, 3, 4]])
def test_only_wanted_rows_take_the_last_block(out_rows):
    """A single one among many ends up in every thread's scratch; the shared streams stay."""
    rng = np.random.default_rng(0)
    values, out, inject = rows_of(rng, 5, 2, 64), rows_of(rng, 5, 64), rows_of(rng, 5, 4)
    streams = Streams((2, 1), 5, 2, 64, values)
    step = Step(5, out_rows=out_rows)
    streams.combine(step, out, inject, gather=1)
    taken = np.stack([ref.combine(values[r], out[r], inject[r, 2:]) for r in out_rows])
    found = streams.shared.reshape(5, 2, 64)
    if len(out_rows) == 1:
        np.testing.assert_array_equal(found, values)
        for copy in streams.private():
            np.testing.assert_array_equal(copy, taken.ravel())
    else:
        np.testing.assert_array_equal(found[out_rows], taken)
        np.testing.assert_array_equal(np.delete(found, out_rows, 0), np.delete(values, out_rows, 0))
    weight = rng.uniform(0.5, 2, (2, 64)).astype(np.float32)
    planes = Planes(128, ("F32", "Q32"))
    expected = planes.expected([ref.norm(t, weight, EPS).ravel() for t in taken])
    rows = run_act(streams.team, "hc_norm", step, planes, len(out_rows), gather=1,
                   weight=Vector(weight.ravel()), eps=EPS, **streams.fields())  # fmt: skip
    np.testing.assert_array_equal(rows, expected if len(out_rows) > 1 else np.repeat(expected, 3, axis=0))


def run_act(team, op, step, planes, n_rows, **fields):
    """uint8[n_rows, n used bytes]; of one row, the row of every thread."""
    shared = aligned(n_rows * planes.stride).reshape(n_rows, -1)
    team.run(op, step, **planes.fields(ACT, shared), **fields)
    copies = [s[ACT : ACT + planes.stride] for s in team.scratch]
    return (shared if n_rows > 1 else np.stack(copies))[:, planes.used]


@pytest.mark.parametrize("threads", TEAMS)
@pytest.mark.parametrize("n_rows", [1, 2, 7])
@pytest.mark.parametrize(("n_stream", "n"), SHAPES)
def test_norm_low_and_mix(threads, n_rows, n_stream, n):
    rng = np.random.default_rng(n)
    values = rows_of(rng, n_rows, n_stream, n)
    weight = rng.uniform(0.5, 2, (n_stream, n)).astype(np.float32)
    streams = Streams(threads, n_rows, n_stream, n, values)
    team, step, copies = streams.team, Step(n_rows), 1 if n_rows > 1 else sum(threads)
    kinds = [k for k in KINDS if n_stream * n % {"F32": 8, "Q256": 256, "Q32": 32}[k] == 0]
    planes = Planes(n_stream * n, kinds)
    normed = np.stack([ref.norm(v, weight, EPS) for v in values])
    rows = run_act(team, "hc_norm", step, planes, n_rows, weight=Vector(weight.ravel()), eps=EPS, gather=0,
                   **streams.fields())  # fmt: skip
    expected = planes.expected(normed.reshape(n_rows, -1))
    np.testing.assert_array_equal(rows, np.repeat(expected, copies, axis=0))

    low, out = rows_of(rng, n_rows, n), Planes(n, ("F32", "Q32") if n % 32 == 0 else ("F32",))
    rows = run_act(team, "hc_low", step, out, n_rows, low=low, low_stride=low.strides[0], n=n,
                   count=STEP_N_ROWS, tmp_scratch=TMP)  # fmt: skip
    np.testing.assert_array_equal(rows, np.repeat(out.expected(silu_f32(low)), copies, axis=0))

    gate, xn = rows_of(rng, n_rows, n_stream * n), rows_of(rng, n_rows, n_stream * n + 16)
    for scratch in team.scratch:
        scratch[TMP : TMP + xn[0].nbytes] = xn[0].view(np.uint8)
    pairs = zip(xn[:, 16:].reshape(values.shape), gate.reshape(values.shape), strict=True)
    mixed = [ref.mix(x, g) for x, g in pairs]
    rows = run_act(team, "hc_mix", step, out, n_rows, xn_scratch=TMP, xn_shared=xn, xn_stride=xn.strides[0],
                   xn_off=64, gate=gate, gate_stride=gate.strides[0], n_stream=n_stream, n=n,
                   count=STEP_N_ROWS, tmp_scratch=1 << 15)  # fmt: skip
    np.testing.assert_array_equal(rows, np.repeat(out.expected(mixed), copies, axis=0))


def test_low_and_mix_count_the_wanted_rows():
    team, step, low = Team((2,)), Step(5, out_rows=[1, 4]), rows_of(np.random.default_rng(0), 2, 32)
    out = Planes(32, ("F32",))
    rows = run_act(team, "hc_low", step, out, 2, low=low, low_stride=low.strides[0], n=32, count=STEP_N_OUT,
                   tmp_scratch=TMP)  # fmt: skip
    np.testing.assert_array_equal(rows, out.expected(silu_f32(low)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, 0.0, -0.0])
def test_extreme_values_stay_visible(value):
    """Factors of 0 and 2 at the ends of the range; a NaN is lost nowhere."""
    block, inject = floats(1, 16, fill=1), floats(1, 6, fill=value)
    streams = Streams((1,), 1, 4, 16, np.ones((1, 4, 16), np.float32))
    streams.combine(Step(1), block, inject)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = ref.combine(np.ones((4, 16), np.float32), block[0], inject[0, 2:])
    np.testing.assert_array_equal(streams.found(1)[0, 0], expected)
