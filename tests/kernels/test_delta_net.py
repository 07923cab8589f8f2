"""`delta_conv`, `delta_net` and `delta_norm` against their twins, bit for bit, and against float64.

A sequence is run row by row or in chunks of any size, by teams of any shape, from memory full of NaN.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from strata_jit.kernels.ref import delta_net as ref
from strata_jit.kernels.registry import (
    DELTA_COLUMNS,
    DELTA_TAPS,
    GATE_SIGMOID,
    GATE_SILU,
    delta_scratch_bytes,
    delta_state_bytes,
)
from tests.kernels.harness import Step, Team, Vector, aligned, floats
from tests.kernels.planes import Planes

EPS = 1e-6
F64_RTOL = 2e-5
F64_ATOL = 2e-6
N_LAYER = 2
LAYER = 1
WORK_SCRATCH = 0
TMP_SCRATCH = 1 << 16
ACT_SCRATCH = 1 << 17


@dataclass(frozen=True)
class Shape:
    """Heads of a layer, and how a row of projections is laid out."""

    n_k: int
    n_v: int
    d: int
    tiled: bool = False
    """k head of v head h: h % n_k, else h // (n_v / n_k)."""
    by_k_head: bool = False
    """q, k, v and z of a k head's group stand together, else all q, all k, all v, all z."""
    gates_by_k_head: bool = False
    sigmoid: bool = False

    @property
    def group(self):
        return self.n_v // self.n_k

    @property
    def channels(self):
        return (2 * self.n_k + self.n_v) * self.d

    @property
    def n_out(self):
        return self.n_v * self.d

    @property
    def q_scale(self):
        return np.float32(self.d**-0.5)

    @property
    def width(self):
        return self.channels + self.n_out + 2 * self.n_v

    @property
    def state_bytes(self):
        return delta_state_bytes(self.n_v, self.d)

    def k_head(self, head):
        return head % self.n_k if self.tiled else head // self.group

    def places(self):
        """Op arguments of the layout."""
        d, n_k, n_v = self.d, self.n_k, self.n_v
        together = {"gate_off": 4 * (self.channels + self.n_out), "k_run": 1 if self.tiled else self.group}
        together["gate_group"] = self.group if self.gates_by_k_head else n_v
        if self.by_k_head:
            stride, v = 8 * d * (1 + self.group), 8 * d
            starts = {"q_off": 0, "k_off": 4 * d, "v_off": v, "z_off": v + 4 * d * self.group}
            return together | starts | {"qk_stride": stride, "vz_stride": stride}
        starts = {"q_off": 0, "k_off": 4 * n_k * d, "v_off": 8 * n_k * d, "z_off": 4 * self.channels}
        return together | starts | {"qk_stride": 4 * d, "vz_stride": 4 * d * self.group}

    def columns(self):
        """Where q | k | v, z, beta and alpha stand in a row: float32 indices."""
        p, d = self.places(), self.d
        heads = [p["q_off"] // 4 + h * (p["qk_stride"] // 4) for h in range(self.n_k)]
        heads += [p["k_off"] // 4 + h * (p["qk_stride"] // 4) for h in range(self.n_k)]
        v = [h // self.group * (p["vz_stride"] // 4) + h % self.group * d for h in range(self.n_v)]
        qkv = np.array([*heads, *(p["v_off"] // 4 + start for start in v)])
        z = p["z_off"] // 4 + np.array(v)
        h, g = np.arange(self.n_v), p["gate_group"]
        beta = p["gate_off"] // 4 + h // g * 2 * g + h % g
        spread = np.arange(d)
        return (qkv[:, None] + spread).ravel(), (z[:, None] + spread).ravel(), beta, beta + g


REAL = Shape(1, 2, 128)
TILED = Shape(2, 6, 32, tiled=True, sigmoid=True)
GROUPED = Shape(2, 4, 32, gates_by_k_head=True)
LEGACY = Shape(2, 4, 16, by_k_head=True, gates_by_k_head=True)
WIDE = Shape(3, 3, 48)
SHAPES = [REAL, TILED, GROUPED, LEGACY, WIDE]


class Sequence:
    """Random projections of the positions of one sequence, and the twin's answers."""

    def __init__(self, shape, n, seed=0):
        rng = np.random.default_rng(seed)
        self.shape, self.n = shape, n
        self.proj = rng.standard_normal((n, shape.width)).astype(np.float32)

    def values(self, weights):
        """q, k, v for every v head, beta, decay, z: what the recurrence reads."""
        s = self.shape
        qkv, z, beta, alpha = (self.proj[:, columns] for columns in s.columns())
        q, k, v = np.split(ref.convolve(qkv, weights.taps), np.cumsum([s.n_k * s.d] * 2), axis=1)
        heads = [s.k_head(h) for h in range(s.n_v)]
        q = ref.normalise_length(q.reshape(self.n, -1, s.d), EPS, s.q_scale)[:, heads]
        k = ref.normalise_length(k.reshape(self.n, -1, s.d), EPS)[:, heads]
        gates = ref.gates(beta, alpha, weights.dt, weights.a)
        return q, k, v.reshape(self.n, -1, s.d), *gates, z.reshape(self.n, -1, s.d)

    def expected(self, weights):
        """float32[n, n_out] by the twin."""
        *inputs, z = self.values(weights)
        o = ref.recurrence(*inputs)
        return ref.gated_norm(o, z, weights.norm, EPS, sigmoid=self.shape.sigmoid).reshape(self.n, -1)


class Weights:
    """Of one layer."""

    def __init__(self, shape, seed=9):
        rng = np.random.default_rng(seed)
        self.taps = rng.standard_normal((shape.channels, DELTA_TAPS)).astype(np.float32)
        self.dt = rng.uniform(-4, 1, shape.n_v).astype(np.float32)
        self.a = -np.exp(rng.uniform(-3, 1, shape.n_v)).astype(np.float32)
        self.norm = rng.uniform(0.5, 2, shape.d).astype(np.float32)


class Layer:
    """State and history of a team, and the ops that run over them."""

    def __init__(self, sequences, threads):
        self.sequences, self.shape = sequences, sequences[0].shape
        self.weights = Weights(self.shape)
        s = self.shape
        assert delta_scratch_bytes(s.d) <= TMP_SCRATCH
        self.planes = Planes(s.n_out, ("F32", "Q32") if s.n_out % 32 == 0 else ("F32",))
        self.team = Team(
            threads,
            scratch_bytes=ACT_SCRATCH + self.planes.stride,
            state_bytes=len(sequences) * N_LAYER * s.state_bytes,
        )
        self.history = floats(len(sequences), N_LAYER, DELTA_TAPS, s.channels)

    def run(self, rows, order=None):
        """Run (sequence, position) rows; float32[n_rows, n_out] from the F32 plane, and the planes' bytes."""
        s, n = self.shape, len(rows)
        proj = floats(n, -(-s.width // 16) * 16)
        for i, (sequence, position) in enumerate(rows):
            proj[i, : s.width] = self.sequences[sequence].proj[position]
        out, gates = floats(n, 2, s.n_out), floats(n, s.n_v, 2)
        shared = aligned(n * self.planes.stride).reshape(n, -1)
        step = Step(n, rows=[(0, position, sequence, 0) for sequence, position in rows])
        weights = self.weights
        common = s.places() | {
            "proj": proj,
            "proj_stride": proj.strides[0],
            "n_head_k": s.n_k,
            "n_head_v": s.n_v,
            "head_dim": s.d,
            "conv": Vector(weights.taps.ravel()),
            "dt": Vector(weights.dt),
            "a": Vector(weights.a),
            "history": self.history,
            "history_off": LAYER * self.history.strides[1],
            "history_stride": self.history.strides[0],
            "eps": EPS,
            "q_scale": s.q_scale,
            "gates": gates,
        }
        recurrence = {
            "state_off": LAYER * s.state_bytes,
            "state_stride": N_LAYER * s.state_bytes,
            "z_mode": GATE_SIGMOID if s.sigmoid else GATE_SILU,
            "work_scratch": WORK_SCRATCH,
        }
        target = {"out": out, "out_stride": out.strides[0]}
        norm = {"n_head": s.n_v, "head_dim": s.d, "norm": Vector(weights.norm), "eps": EPS}
        self.team.run("delta_conv", step, order=order, **common)
        self.team.run("delta_net", step, order=order, **common, **recurrence, **target)
        planes = self.planes.fields(ACT_SCRATCH, shared)
        self.team.run("delta_norm", step, order=order, **target, **norm, tmp_scratch=TMP_SCRATCH, **planes)
        if n > 1:
            return shared[:, self.planes.used]
        copies = [scratch[ACT_SCRATCH:][: self.planes.stride] for scratch in self.team.scratch]
        for copy in copies:
            np.testing.assert_array_equal(copy[self.planes.used], copies[0][self.planes.used])
        return copies[0][None, self.planes.used]


def in_chunks(layer, chunks, sequence=0):
    """The sequence's rows from position 0 on, in chunks of the given sizes."""
    position, parts = 0, []
    for chunk in chunks:
        parts.append(layer.run([(sequence, p) for p in range(position, position + chunk)]))
        position += chunk
    return np.concatenate(parts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", [[1] * 9, [9], [2, 1, 1, 5], [4, 3, 2]])
def test_any_chunks_match_ref(shape, chunks):
    sequence = Sequence(shape, 9)
    layer = Layer([sequence], (2,))
    expected = layer.planes.expected(sequence.expected(layer.weights))
    np.testing.assert_array_equal(in_chunks(layer, chunks), expected)


@pytest.mark.parametrize("threads", [(1,), (5,), (1, 1), (2, 1), (1, 2, 3), (7, 8)])
@pytest.mark.parametrize("shape", [TILED, GROUPED, LEGACY])
def test_any_team_gives_the_same(shape, threads):
    """Also of more threads than units."""
    sequence = Sequence(shape, 7, seed=1)
    layer = Layer([sequence], threads)
    expected = layer.planes.expected(sequence.expected(layer.weights))
    np.testing.assert_array_equal(in_chunks(layer, [1, 3, 1, 1, 1]), expected)


def test_any_order_of_threads_gives_the_same():
    sequence = Sequence(GROUPED, 6, seed=2)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        layer = Layer([sequence], (3, 2))
        expected = layer.planes.expected(sequence.expected(layer.weights))
        found = [layer.run([(0, p)], order=order) for p in range(6)]
        np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_recurrence_is_near_float64(shape):
    sequence, weights = Sequence(shape, 40, seed=3), Weights(shape)
    *inputs, _ = sequence.values(weights)
    np.testing.assert_allclose(
        ref.recurrence(*inputs), ref.recurrence_f64(*inputs), rtol=F64_RTOL, atol=F64_ATOL
    )


def test_position_0_begins_anew():
    """A second sequence in the same place: nothing of the first is left, a NaN neither."""
    first, second = Sequence(TILED, 8, seed=4), Sequence(TILED, 8, seed=5)
    first.proj[5] = np.nan
    layer = Layer([first], (2, 1))
    in_chunks(layer, [8])
    layer.sequences[0] = second
    expected = layer.planes.expected(second.expected(layer.weights))
    np.testing.assert_array_equal(in_chunks(layer, [1, 1, 6]), expected)


def test_sequences_do_not_meet():
    """Two sequences, their rows in the same steps."""
    sequences = [Sequence(GROUPED, 6, seed=6), Sequence(GROUPED, 6, seed=7)]
    layer = Layer(sequences, (2, 1))
    parts = [layer.run([(s, p) for s in (0, 1) for p in positions]) for positions in ([0, 1], [2], [3, 4, 5])]
    for number, sequence in enumerate(sequences):
        expected = layer.planes.expected(sequence.expected(layer.weights))
        found = np.concatenate([np.split(part, 2)[number] for part in parts])
        np.testing.assert_array_equal(found, expected)


def test_only_the_layers_own_memory_is_written():
    layer = Layer([Sequence(GROUPED, 3)], (2, 2))
    in_chunks(layer, [1, 2])
    s = layer.shape
    touched = [state.reshape(N_LAYER, s.state_bytes) for state in layer.team.state]
    assert all((state[1 - LAYER] == 0xFF).all() for state in touched)
    units = s.n_out // DELTA_COLUMNS
    written = np.stack([(state[LAYER] != 0xFF).reshape(units, -1).any(axis=1) for state in touched])
    assert (written.sum(axis=0) == 1).all()  # each unit on one node
    assert np.isnan(layer.history[:, 1 - LAYER]).all()


def test_gates_at_their_ends():
    """Full decay and none, beta 0 and 1: no NaN, and the twin's bits."""
    sequence = Sequence(GROUPED, 4, seed=8)
    _, _, beta, alpha = GROUPED.columns()
    sequence.proj[:, beta] = np.array([[-200, 200, -np.inf, np.inf]]).astype(np.float32)
    sequence.proj[:, alpha] = np.array([[1e30, -1e30, np.inf, -np.inf]]).astype(np.float32)
    layer = Layer([sequence], (1, 1))
    expected = sequence.expected(layer.weights)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(in_chunks(layer, [1, 3]), layer.planes.expected(expected))


def test_inputs_of_zero_and_nan():
    """Heads of length 0 stay 0; a NaN is seen in its own sequence's rows from then on."""
    sequence = Sequence(GROUPED, 4, seed=9)
    sequence.proj[1] = 0
    sequence.proj[3, 0] = np.nan
    layer = Layer([sequence], (1,))
    expected = sequence.expected(layer.weights)
    assert np.isfinite(expected[:3]).all() and np.isnan(expected[3]).any()
    found = in_chunks(layer, [2, 1, 1])[:, : 4 * GROUPED.n_out].copy().view(np.float32)
    np.testing.assert_array_equal(found, expected)
