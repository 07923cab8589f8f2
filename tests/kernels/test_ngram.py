"""The n-gram embedding's ops against their twins, bit for bit, however a sequence is cut into steps."""

import numpy as np
import pytest

from strata_jit.kernels.ref import ngram as ref
from strata_jit.kernels.registry import ngram_scratch_bytes
from tests.kernels.harness import Step, Team, Vector, floats

EPS = 1e-6
N_STREAM, N, N_TAP, DILATION = 2, 40, 4, 3
WIDTH = N_STREAM * N
STREAMS, WORK = 0, 4 * WIDTH
MAX_ROWS = 16
N_RING = (N_TAP - 1) * DILATION + MAX_ROWS
LENGTH = 40


class Sequence:
    """What a sequence's ops see, and the twin's streams after them."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.streams = rng.standard_normal((LENGTH, N_STREAM, N)).astype(np.float32)
        self.key = rng.standard_normal((LENGTH, N_STREAM, N)).astype(np.float32)
        self.value = rng.standard_normal((LENGTH, N)).astype(np.float32)
        self.streams[3] = -self.key[3]
        self.streams[5], self.value[7] = 0, 0


class Weights:
    def __init__(self):
        rng = np.random.default_rng(99)
        self.key, self.query, self.conv_norm = rng.uniform(0.5, 2, (3, N_STREAM, N)).astype(np.float32)
        self.conv = rng.standard_normal((WIDTH, N_TAP)).astype(np.float32)

    def expected(self, s):
        streams, normed = np.empty_like(s.streams), np.empty_like(s.streams)
        for t in range(LENGTH):
            gates = ref.gate(s.streams[t], s.key[t], self.key, self.query, EPS)
            g, normed[t] = ref.gated(s.value[t], gates, self.conv_norm, EPS)
            streams[t] = s.streams[t] + g
        return streams + ref.conv(normed.reshape(LENGTH, -1), self.conv, DILATION).reshape(streams.shape)


WEIGHTS = Weights()


class Runner:
    """A team with the rings of two sequences."""

    def __init__(self, threads):
        self.team = Team(threads, scratch_bytes=WORK + ngram_scratch_bytes(N_STREAM, N))
        self.ring = floats(2, N_RING, WIDTH)

    def step(self, rows):
        """[len(rows), N_STREAM, N] for rows (Sequence, its number, position)."""
        n = len(rows)
        streams, kv = floats(n, WIDTH), floats(n, WIDTH + 8 + N)
        for i, (s, _, t) in enumerate(rows):
            streams[i], kv[i, :WIDTH], kv[i, WIDTH + 8 :] = s.streams[t].ravel(), s.key[t].ravel(), s.value[t]
        for scratch in self.team.scratch:
            scratch[STREAMS : STREAMS + 4 * WIDTH] = streams[0].view(np.uint8)
        step = Step(n, [(0, t, number, 0) for _, number, t in rows])
        common = {
            "streams_scratch": STREAMS, "streams": streams, "streams_stride": streams.strides[0],
            "n_stream": N_STREAM, "n": N, "ring": self.ring, "n_ring": N_RING, "work_scratch": WORK,
        }  # fmt: skip
        self.team.run(
            "ngram_gate", step, key_value=kv, key_value_stride=kv.strides[0], key_off=0,
            value_off=4 * (WIDTH + 8),
            key_norm=Vector(WEIGHTS.key.ravel()), query_norm=Vector(WEIGHTS.query.ravel()),
            conv_norm=Vector(WEIGHTS.conv_norm.ravel()), eps=EPS, **common,
        )  # fmt: skip
        conv = Vector(WEIGHTS.conv.ravel())
        self.team.run("ngram_conv", step, conv=conv, n_tap=N_TAP, dilation=DILATION, **common)
        if n > 1:
            return streams.reshape(n, N_STREAM, N)
        copies = [s[STREAMS : STREAMS + 4 * WIDTH].view(np.float32) for s in self.team.scratch]
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])
        return copies[0].reshape(1, N_STREAM, N).copy()


@pytest.mark.parametrize("threads", [(1,), (3,), (2, 1)])
@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_steps_of_any_size_give_the_twins_bits(threads, chunk):
    """The ring holds NaN at first: nothing before the sequence is read."""
    s, runner = Sequence(1), Runner(threads)
    parts = [
        runner.step([(s, 0, t) for t in range(first, min(first + chunk, LENGTH))])
        for first in range(0, LENGTH, chunk)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), WEIGHTS.expected(s))


def test_a_second_sequence_starts_clean():
    first, second, runner = Sequence(1), Sequence(2), Runner((2,))
    for t in range(LENGTH):
        runner.step([(first, 0, t)])
    found = [runner.step([(second, 0, t)])[0] for t in range(LENGTH)]
    np.testing.assert_array_equal(found, WEIGHTS.expected(second))


def test_two_sequences_do_not_meet():
    pair, runner = (Sequence(1), Sequence(2)), Runner((2, 1))
    found = [runner.step([(pair[0], 0, t), (pair[1], 1, t)]) for t in range(LENGTH)]
    for i, s in enumerate(pair):
        np.testing.assert_array_equal([f[i] for f in found], WEIGHTS.expected(s))


def test_rows_can_be_run_again():
    """A step may begin before the last one's end, within the ring: what was there is replaced."""
    s, other, runner = Sequence(1), Sequence(3), Runner((1,))
    runner.step([(s, 0, t) for t in range(12)])
    runner.step([(other, 0, t) for t in range(12, 20)])
    found = runner.step([(s, 0, t) for t in range(12, 28)])
    np.testing.assert_array_equal(found, WEIGHTS.expected(s)[12:28])


def test_a_nan_stays_visible():
    s = Sequence(4)
    s.key[2, 1, 7] = np.nan
    found = Runner((1,)).step([(s, 0, t) for t in range(4)])
    assert np.isnan(found[2, 1]).all() and np.isfinite(found[2, 0]).all() and np.isfinite(found[:2]).all()
    np.testing.assert_array_equal(found, WEIGHTS.expected(s)[:4])
