"""`attn_prepare`, `attention` and `attn_merge` against their twins, bit for bit, and against float64.

A sequence is run row by row or in chunks of any size, by teams of any shape: the outputs of all rows are the
twin's bits, and the KV blocks hold the same bytes. With a window, or with sinks, likewise.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from strata_jit.kernels.abi import KV_BLOCK
from strata_jit.kernels.ref import attention as ref
from strata_jit.kernels.ref.mathx import sigmoid_f32
from strata_jit.kernels.ref.norm import rms_norm
from strata_jit.kernels.ref.rope import rope_angles, rotate
from strata_jit.kernels.registry import ROPE_NEOX, ROPE_NORM, attention_scratch_bytes
from tests.kernels.harness import Step, Team, Vector, aligned, floats
from tests.kernels.planes import Planes

F64_RTOL = 2e-5
F64_ATOL = 2e-6
EPS = 1e-6
WORK_SCRATCH = 0
N_LAYER = 2
LAYER = 1


@dataclass(frozen=True)
class Shape:
    """Heads of an attention layer."""

    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    mode: int = ROPE_NEOX
    norm: str | None = "head"
    """The norm of q and k: over each head, over all heads together, or none."""
    value_dim: int = 0
    """0: head_dim."""
    window: int = 0
    sinks: tuple[float, ...] | None = None
    gated: bool = False
    """Behind each query head stands a gate of its output."""
    ratio: int = 0
    """Positions of an index block, of which some are selected; 0: all are."""

    def __post_init__(self):
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def parts(self):
        """Elements of a row's q, k and v."""
        n_q = self.n_head * self.query_stride
        return n_q, self.n_head_kv * self.head_dim, self.n_head_kv * self.value_dim

    @property
    def query_stride(self):
        """Elements from a query head to the next."""
        return (1 + self.gated) * self.head_dim

    @property
    def width(self):
        return sum(self.parts)

    @property
    def n_out(self):
        return self.n_head * self.value_dim

    @property
    def sink_values(self):
        """float32[n_head] or None."""
        return None if self.sinks is None else np.array(self.sinks, np.float32)

    @property
    def scale(self):
        return self.head_dim**-0.5


QWEN = Shape(8, 1, 128, 128)
SMOL = Shape(9, 3, 64, 64, ROPE_NORM, norm=None)
MHA = Shape(2, 2, 32, 32, ROPE_NEOX, norm=None)
PARTIAL = Shape(6, 1, 40, 20, ROPE_NORM)
JOINT = Shape(6, 3, 40, 40, ROPE_NEOX, norm="joint")
WINDOW = Shape(6, 2, 32, 32, ROPE_NEOX, norm=None, window=40)
"""Of 530 positions the last two blocks are seen, of 257 the last one and the end of the one before."""
SINKS = Shape(4, 2, 32, 32, ROPE_NEOX, norm=None, window=300, sinks=(0.5, -np.inf, 1e30, -1e30))
LATENT = Shape(5, 1, 96, 32, ROPE_NORM, norm=None, value_dim=72)
GATED = Shape(6, 2, 48, 16, gated=True)
SPARSE = Shape(5, 1, 48, 16, norm=None, ratio=4)
SPARSE_32 = Shape(4, 2, 32, 32, norm=None, ratio=32)
SHAPES = [SPARSE, SPARSE_32, GATED, QWEN, SMOL, MHA, PARTIAL, JOINT, WINDOW, SINKS, LATENT]


class Sequence:
    """Random q, k, v of the positions of one sequence, and the twin's answers."""

    def __init__(self, shape, n_positions, seed=0):
        rng = np.random.default_rng(seed)
        self.shape, self.n = shape, n_positions
        self.qkv = rng.standard_normal((n_positions, shape.width)).astype(np.float32)
        heads = (shape.n_head, shape.n_head_kv) if shape.norm == "joint" else (1, 1)
        self.q_weight, self.k_weight = (
            rng.uniform(0.5, 2, n * shape.head_dim).astype(np.float32) for n in heads
        )
        freqs = 1e4 ** (-np.arange(shape.n_rot // 2) / (shape.n_rot // 2))
        self.angles = rope_angles(np.arange(n_positions), freqs, 1.0)

    def words(self, position):
        """int64[n_blocks]: random choices; none of whole blocks, the own one often among them."""
        rng, n_bits = np.random.default_rng(position), KV_BLOCK // (self.shape.ratio or KV_BLOCK)
        kinds = rng.choice([0, 0.03, 0.5, 1], position // KV_BLOCK + 1)
        bits = rng.random((len(kinds), n_bits)) < kinds[:, None]
        n_complete = (position + 1) // self.shape.ratio
        bits.ravel()[rng.integers(n_complete) if n_complete else 0] = True
        bits.ravel()[position // self.shape.ratio + 1 :] = False
        weights = np.uint64(1) << np.arange(n_bits, dtype=np.uint64)
        return (bits * weights).sum(axis=1, dtype=np.uint64).view(np.int64)

    def selected(self, position):
        """bool[position + 1], or None where there is no choice."""
        if not self.shape.ratio:
            return None
        bits = np.arange(KV_BLOCK // self.shape.ratio, dtype=np.uint64)
        chosen = self.words(position).view(np.uint64)[:, None] >> bits & np.uint64(1)
        return np.repeat(chosen.ravel() != 0, self.shape.ratio)[: position + 1]

    def heads(self):
        """(q float32, k float16, v float16), each [n_positions, heads, head_dim], as attention reads them."""
        s = self.shape
        q, k, v = np.split(self.qkv, np.cumsum(s.parts)[:2], axis=1)
        q, k = (part.reshape(self.n, -1, s.head_dim) for part in (q, k))
        q = q[:, :: 1 + s.gated]
        v = v.reshape(self.n, -1, s.value_dim)
        if s.norm:
            q, k = self._normed(q, self.q_weight), self._normed(k, self.k_weight)
        q, k = self._rotated(q), self._rotated(k)
        return q, k.astype(np.float16), v.astype(np.float16)

    def _normed(self, heads, weight):
        return rms_norm(heads.reshape(-1, len(weight)), weight, EPS).reshape(heads.shape)

    def _rotated(self, heads):
        s = self.shape
        return np.stack([rotate(x, a, s.n_rot, s.mode) for x, a in zip(heads, self.angles, strict=True)])

    def expected(self, positions, attend=ref.attend):
        """[len(positions), n_out] by a twin."""
        (q, k, v), s = self.heads(), self.shape
        rows = ((p, q[p], k[: p + 1], v[: p + 1]) for p in positions)
        seen = {"window": s.window, "sinks": s.sink_values}
        out = np.stack(
            [attend(*row, s.scale, **seen, selected=self.selected(p)).ravel() for p, *row in rows]
        )
        if not s.gated:
            return out
        gate = self.qkv[positions, : s.parts[0]].reshape(len(out), s.n_head, 2, s.head_dim)[:, :, 1]
        return out * sigmoid_f32(gate.reshape(out.shape))


class Layer:
    """The KV memory of a team, and the ops that run over it."""

    def __init__(self, sequences, threads, blocks_per_sequence=3):
        self.sequences, self.shape, self.n_blocks = sequences, sequences[0].shape, blocks_per_sequence
        s, n_nodes = self.shape, len(threads)
        self.layer_bytes = s.n_head_kv * KV_BLOCK * 2 * (s.head_dim + s.value_dim)
        self.slot_bytes = N_LAYER * self.layer_bytes
        self.table = self._slots(len(sequences), n_nodes)
        scratch = attention_scratch_bytes(s.n_head, s.n_head_kv, s.head_dim)
        self.planes = Planes(s.n_out, ("F32", "Q32") if s.n_out % 32 == 0 else ("F32",))
        self.out_scratch = WORK_SCRATCH + scratch + 64
        self.act_scratch = -(-(self.out_scratch + 4 * s.n_out) // 64) * 64
        self.mask_scratch = self.act_scratch + self.planes.stride
        self.team = Team(
            threads,
            scratch_bytes=self.mask_scratch + 8 * blocks_per_sequence,
            kv_bytes=(self.table.max() + 1) * self.slot_bytes,
        )
        for kv in self.team.kv:
            kv[:] = 0xFF  # a NaN wherever nothing was written

    def _slots(self, n_seq, n_nodes):
        """A scattered KV table; slots count from 0 on each block's own node."""
        table = np.zeros((n_seq, self.n_blocks), np.int64)
        for node in range(n_nodes):
            mine = [(s, b) for b in range(node, self.n_blocks, n_nodes) for s in range(n_seq)]
            for slot, place in enumerate(mine[::-1]):
                table[place] = slot
        return table

    def run(self, rows, order=None):
        """float32[len(rows), n_out] and the used bytes of its planes, for rows (sequence, position)."""
        s, n = self.shape, len(rows)
        step = Step(n, [(0, position, sequence, 0) for sequence, position in rows], kv_table=self.table)
        qkv, angles = floats(n, s.width + 16), floats(n, max(s.n_rot // 2, 1), 2)
        for i, (sequence, position) in enumerate(rows):
            qkv[i, : s.width] = self.sequences[sequence].qkv[position]
            angles[i] = self.sequences[sequence].angles[position]
        partial = floats(n, s.n_head, self.n_blocks, 8 + s.value_dim)
        first = self.sequences[0]
        fields = {
            "qkv": qkv,
            "qkv_stride": qkv.strides[0],
            "q_off": 0,
            "q_stride": 4 * s.query_stride,
            "k_off": 4 * s.parts[0],
            "v_off": 4 * (s.parts[0] + s.parts[1]),
            "q_norm": Vector(first.q_weight) if s.norm else 0,
            "k_norm": Vector(first.k_weight) if s.norm else 0,
            "eps": EPS,
            "angles": angles,
            "n_rot": s.n_rot,
            "rope_mode": s.mode,
            "n_head": s.n_head,
            "n_head_kv": s.n_head_kv,
            "head_dim": s.head_dim,
            "value_dim": s.value_dim,
            "layer_off": LAYER * self.layer_bytes,
            "slot_bytes": self.slot_bytes,
            "work_scratch": WORK_SCRATCH,
        }
        common = {"partial": partial, "partial_blocks": self.n_blocks}
        self.team.run("attn_prepare", step, order=order, **fields)
        common |= self._masks(rows)
        score = {"scale": s.scale, "window": s.window, "prepared": 0}
        self.team.run("attention", step, order=order, **fields, **common, **score)
        return self._merge(step, qkv, common, order)

    def _masks(self, rows):
        """What is selected: in the shared rows or, of a single one, in every thread's scratch."""
        masks = np.zeros((len(rows), self.n_blocks), np.int64)
        if self.shape.ratio:
            for mask, (sequence, position) in zip(masks, rows, strict=True):
                words = self.sequences[sequence].words(position)
                mask[: len(words)] = words
        for scratch in self.team.scratch:
            scratch[self.mask_scratch :][: masks[0].nbytes] = masks[0].view(np.uint8)
        if len(rows) == 1:
            masks[:] = 0
        place = {"mask_scratch": self.mask_scratch, "mask": masks, "mask_stride": masks.strides[0]}
        return place | {"ratio": self.shape.ratio}

    def _merge(self, step, qkv, common, order):
        s, planes, n = self.shape, self.planes, len(qkv)
        shared = aligned(n * planes.stride, fill=0xA5).reshape(n, planes.stride)
        self.team.run(
            "attn_merge",
            step,
            order=order,
            **common,
            n_head=s.n_head,
            value_dim=s.value_dim,
            window=s.window,
            sinks=0 if s.sinks is None else Vector(s.sink_values),
            gate=qkv,
            gate_row=qkv.strides[0],
            gate_off=4 * s.head_dim if s.gated else -1,
            gate_head=4 * s.query_stride,
            out_scratch=self.out_scratch,
            **planes.fields(self.act_scratch, shared),
        )
        if n == 1:
            copies = np.stack([x[self.act_scratch :][: planes.stride] for x in self.team.scratch])
            assert (copies[:, planes.used] == copies[0, planes.used]).all()
            shared = copies[:1]
        start = planes.offsets["F32"]
        out = shared[:, start : start + 4 * s.n_out].copy().view(np.float32)
        np.testing.assert_array_equal(shared[:, planes.used], planes.expected(out))
        return out

    def chunks(self, size, start=0, sequence=0):
        """Run a whole sequence in chunks; float32[n_positions - start, n_out]."""
        rows = [(sequence, p) for p in range(start, self.sequences[sequence].n)]
        return np.concatenate([self.run(rows[i : i + size]) for i in range(0, len(rows), size)])


def fill(layer, n, sequence=0):
    """Write the keys and values of the first n positions."""
    for start in range(0, n, 100):
        layer.run([(sequence, p) for p in range(start, min(start + 100, n))])


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_matches_ref_row_by_row_and_in_chunks(shape):
    sequence = Sequence(shape, 21)
    expected = sequence.expected(range(21))
    for size in (1, 2, 7, 21):
        found = Layer([sequence], (1,)).chunks(size)
        np.testing.assert_array_equal(found, expected, f"chunks of {size}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [256, 257, 530])
def test_attention_matches_ref_over_blocks(shape, n):
    sequence = Sequence(shape, n, seed=n)
    layer = Layer([sequence], (1,))
    fill(layer, n - 1)
    last = layer.run([(0, n - 1)])
    np.testing.assert_array_equal(last, sequence.expected([n - 1]))
    chunk = layer.run([(0, n - 2), (0, n - 1)])
    np.testing.assert_array_equal(chunk, sequence.expected([n - 2, n - 1]))


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_near_float64(shape):
    sequence = Sequence(shape, 530, seed=1)
    layer = Layer([sequence], (1,))
    fill(layer, 529)
    truth = sequence.expected([529], ref.attend_f64)
    np.testing.assert_allclose(layer.run([(0, 529)]), truth, rtol=F64_RTOL, atol=F64_ATOL)


@pytest.mark.parametrize("threads", [(2,), (1, 1), (2, 1), (1, 1, 1), (1, 2, 3)])
@pytest.mark.parametrize("shape", [QWEN, SMOL, JOINT, WINDOW, SINKS, GATED])
def test_attention_any_team_gives_the_same(shape, threads):
    sequence = Sequence(shape, 600, seed=3)
    alone, team = Layer([sequence], (1,)), Layer([sequence], threads)
    fill(alone, 594)
    fill(team, 594)
    for rows in ([594], [595, 596, 597, 598], [599]):
        rows = [(0, p) for p in rows]
        np.testing.assert_array_equal(team.run(rows), alone.run(rows))
    np.testing.assert_array_equal(kv_of(team), kv_of(alone))


def kv_of(layer):
    """uint8[n_blocks, slot_bytes] of sequence 0, wherever its blocks are."""
    n_nodes = len(layer.team.kv)
    memory = [kv.reshape(-1, layer.slot_bytes) for kv in layer.team.kv]
    return np.stack([memory[b % n_nodes][layer.table[0, b]] for b in range(layer.n_blocks)])


def test_attention_any_order_of_threads_gives_the_same():
    """Whoever claims what: one thread does nearly everything, or another."""
    sequence = Sequence(replace(SMOL, norm="head"), 300, seed=4)
    rows = [(0, p) for p in range(290, 300)]
    results = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], None):
        layer = Layer([sequence], (2, 2))
        fill(layer, 290)
        results.append(layer.run(rows, order))
        results.append(layer.run(rows[-1:], order))
    for many, one in zip(results[2::2], results[3::2], strict=True):
        np.testing.assert_array_equal(many, results[0])
        np.testing.assert_array_equal(one, results[1])
        np.testing.assert_array_equal(one[0], many[-1])


def test_attention_rows_of_several_sequences():
    sequences = [Sequence(QWEN, n, seed=n) for n in (5, 300, 40)]
    for s in sequences[1:]:
        s.q_weight, s.k_weight = sequences[0].q_weight, sequences[0].k_weight
    layer = Layer(sequences, (1, 1))
    for i, s in enumerate(sequences):
        fill(layer, s.n - 1, i)
    found = layer.run([(i, s.n - 1) for i, s in enumerate(sequences)])
    expected = np.concatenate([s.expected([s.n - 1]) for s in sequences])
    np.testing.assert_array_equal(found, expected)


def test_attention_overwrites_rejected_positions():
    """A window may be run again from an earlier position: what lay behind it has no influence."""
    sequence, other = Sequence(SMOL, 270, seed=5), Sequence(SMOL, 270, seed=6)
    layer = Layer([other], (1, 1))
    fill(layer, 270)
    layer.sequences = [sequence]
    fill(layer, 250)
    np.testing.assert_array_equal(layer.run([(0, 250), (0, 251)]), sequence.expected([250, 251]))


def test_attention_writes_only_its_layer_and_slot():
    sequence = Sequence(MHA, 40)
    layer = Layer([sequence], (1,))
    layer.chunks(8)
    kv = kv_of(layer).reshape(layer.n_blocks, N_LAYER, MHA.n_head_kv, 2, KV_BLOCK * MHA.head_dim * 2)
    keys = kv[0, LAYER, :, 0].view(np.uint16).reshape(MHA.n_head_kv, KV_BLOCK // 8, MHA.head_dim, 8)
    values = kv[0, LAYER, :, 1].view(np.uint16).reshape(MHA.n_head_kv, KV_BLOCK, MHA.head_dim)
    _, k, v = sequence.heads()
    by_position = keys.transpose(0, 1, 3, 2).reshape(values.shape)
    np.testing.assert_array_equal(by_position[:, :40], k.transpose(1, 0, 2).view(np.uint16))
    np.testing.assert_array_equal(values[:, :40], v.transpose(1, 0, 2).view(np.uint16))
    assert (by_position[:, 40:] == 0xFFFF).all() and (values[:, 40:] == 0xFFFF).all()
    assert (kv[1:] == 0xFF).all() and (kv[:, 1 - LAYER] == 0xFF).all()


def test_attention_large_scores_do_not_overflow():
    """Scores in the thousands: the maximum is subtracted before exp, within blocks and between them."""
    sequence = Sequence(replace(QWEN, norm=None), 300, seed=8)
    sequence.qkv *= 30
    layer = Layer([sequence], (1, 1))
    fill(layer, 299)
    found = layer.run([(0, 299)])
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, sequence.expected([299]))


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 255, 256, 257, 258, 529, 530, 531])
def test_attention_window_edges(window):
    """The first visible position at the ends of octets and blocks; a window longer than the sequence."""
    sequence = Sequence(replace(WINDOW, window=window), 530, seed=9)
    layer = Layer([sequence], (1, 1))
    fill(layer, 524)
    chunk = list(range(524, 529))
    np.testing.assert_array_equal(layer.run([(0, p) for p in chunk]), sequence.expected(chunk))
    np.testing.assert_array_equal(layer.run([(0, 529)]), sequence.expected([529]))


def test_attention_chunk_with_rows_that_see_different_blocks():
    """Rows on both sides of a block's end: the first sees a block that the last does not, and vice versa."""
    sequence = Sequence(WINDOW, 310, seed=10)
    layer = Layer([sequence], (1, 1, 1))
    fill(layer, 250)
    rows = list(range(250, 310))
    np.testing.assert_array_equal(layer.run([(0, p) for p in rows]), sequence.expected(rows))


def test_attention_does_not_touch_what_the_window_hides():
    """Hidden positions may hold anything: here NaNs, as in the partial results of hidden blocks."""
    sequence = Sequence(replace(WINDOW, window=16), 600, seed=11)
    layer = Layer([sequence], (1,))
    fill(layer, 599)
    for position in range(600 - 16):
        erase(layer, position)
    np.testing.assert_array_equal(layer.run([(0, 599)]), sequence.expected([599]))


def erase(layer, position):
    """NaN as key and value of a position of sequence 0, in a team of one node."""
    s, (block, place) = layer.shape, divmod(position, KV_BLOCK)
    slot = layer.team.kv[0].reshape(-1, N_LAYER, s.n_head_kv, layer.layer_bytes // s.n_head_kv)
    heads = slot[layer.table[0, block], LAYER].view(np.uint16)
    keys, values = np.split(heads, [KV_BLOCK * s.head_dim], axis=1)
    keys.reshape(s.n_head_kv, KV_BLOCK // 8, s.head_dim, 8)[:, place // 8, :, place % 8] = 0xFFFF
    values.reshape(s.n_head_kv, KV_BLOCK, s.value_dim)[:, place] = 0xFFFF


def test_attention_sink_without_weight_and_sink_above_all():
    """-inf changes nothing; a sink far above all scores leaves nothing of the values."""
    sequence = Sequence(SINKS, 40, seed=12)
    found = Layer([sequence], (1,)).run([(0, p) for p in range(40)]).reshape(40, 4, -1)
    plain = replace(SINKS, sinks=None)
    sequence.shape = plain
    without = sequence.expected(range(40)).reshape(found.shape)
    np.testing.assert_array_equal(found[:, [1, 3]], without[:, [1, 3]])
    assert (found[:, 2] == 0).all() and (found[:, 0] != without[:, 0]).any()
