"""The expert ops against their twins; one row against many, over teams, slices and types, bit for bit."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from strata_jit.kernels import abi
from strata_jit.kernels.grouping import group_entries
from strata_jit.kernels.ref import moe
from strata_jit.kernels.ref.activations import KIND_OF_TYPE, quantize_activation
from strata_jit.kernels.ref.dot import dot
from strata_jit.kernels.registry import GLU_SWIGLU, GLU_SWIGLU_OAI
from strata_jit.kernels.scratch import list_scratch_bytes, route_scratch_bytes, tmp_scratch_bytes
from tests.kernels.harness import Matrix, Step, Team, Vector, aligned, even_slices, floats, pair

OUT_TOLERANCE = 1e-4
TEAMS = [((1,), "even"), ((4,), "even"), ((2, 1), "even"), ((1, 2, 1), "uneven"), ((2, 3), "uneven")]


def file_experts(rng, type_name, *shape):
    """uint8[n_expert, n_rows, row bytes] of random weights."""
    if type_name == "F32":
        return rng.standard_normal(shape).astype(np.float32).view(np.uint8)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32, 34), np.uint8)
    blocks[..., :2] = rng.uniform(-0.01, 0.01, blocks.shape[:-1]).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def slices_of(n_rows, n_nodes, how):
    """Row ranges: "even", or "uneven": the first node has none."""
    if how == "even" or n_nodes == 1:
        return even_slices(n_rows, n_nodes)
    return [(0, 0), *even_slices(n_rows, n_nodes - 1)]


def planes(type_name, x):
    """uint8[n, stride] activation rows of float32[n, n_cols], and their twins."""
    twins = [quantize_activation(KIND_OF_TYPE[type_name], row) for row in x]
    rows = [t.row() for t in twins]
    memory = aligned(len(x) * len(rows[0])).reshape(len(x), -1)
    memory[:] = rows
    return memory, twins


@dataclass(frozen=True)
class Block:
    """Weights of a block of experts, as in the file and as each node stores them."""

    n_expert: int
    n_embd: int
    n_ff: int
    weights: tuple
    gate: Matrix
    up: Matrix
    down: Matrix
    biases: tuple = (None, None, None)
    """Of gate, up and down, float32[n_expert, n_rows]."""
    activation: int = GLU_SWIGLU
    shared: Matrix | None = None
    """Down matrix of a shared expert."""
    shared_weights: np.ndarray | None = None


def make_block(rng, n_expert, n_embd, n_ff, types, n_nodes=1, how="even", n_ff_shared=0, **options):
    shapes = [(n_expert, n_ff, n_embd), (n_expert, n_ff, n_embd), (n_expert, n_embd, n_ff)]
    weights = tuple(file_experts(rng, name, *shape) for name, shape in zip(types, shapes, strict=True))
    gate, up, down = (
        Matrix(name, w, shape[2], slices_of(shape[1], n_nodes, how))
        for name, w, shape in zip(types, weights, shapes, strict=True)
    )
    if types[0] == types[1]:
        pair(gate, up)
    if n_ff_shared:
        w = file_experts(rng, "Q8_0", n_embd, n_ff_shared)
        shared = Matrix("Q8_0", w, n_ff_shared, slices_of(n_embd, n_nodes, how))
        options |= {"shared": shared, "shared_weights": w}
    return Block(n_expert, n_embd, n_ff, weights, gate, up, down, **options)


def make_biases(rng, n_expert, n_embd, n_ff):
    """Large enough for the limits of gpt-oss's activation to matter."""
    return tuple(5 * rng.standard_normal((n_expert, n)).astype(np.float32) for n in (n_ff, n_ff, n_embd))


def bias_of(block, role):
    """Argument of an op."""
    biases = block.biases[role]
    return 0 if biases is None else Vector(biases)


class Run:
    """Runs gate/up, then down (and combine) for given ids and weights; keeps ff, the twins' inputs and x.

    `shared_ff`: float32[n_rows, n_ff_shared], inner values of the block's shared expert.
    """

    def __init__(self, block, threads, x, ids, weights, order=None, scale=1.0, add=1, shared_ff=None):
        self.block, self.order, self.scale, self.add = block, order, scale, add
        self.n_rows, self.n_used = ids.shape
        self.ids = aligned(8 * ids.size).view(np.int64).reshape(ids.shape)
        self.weights = floats(*ids.shape)
        self.ids[:], self.weights[:] = ids, weights
        self.step = Step(self.n_rows)
        self._lay_out(threads)
        self.ff = floats(ids.size, (block.n_ff + 7) // 8 * 8)
        self._gate_up(x)
        self.residual = floats(self.n_rows, block.n_embd + 1)
        if add:
            self.residual[:, : block.n_embd] = x
        self.shared_rows, self.shared_twins = (None, None)
        if shared_ff is not None:
            self.shared_rows, self.shared_twins = planes(block.shared.type_name, shared_ff)
        self._down(np.nan_to_num(self.ff[:, : block.n_ff]))

    def _lay_out(self, threads):
        lists = list_scratch_bytes(self.n_rows, self.n_used, self.block.n_expert)
        sizes = [tmp_scratch_bytes(), lists, route_scratch_bytes(self.block.n_expert, self.n_used)]
        self.tmp, self.lists, self.route, self.act = np.cumsum([0, *((s + 63) // 64 * 64 for s in sizes)])
        act_bytes = 8 * (self.block.n_embd + self.n_used * self.block.n_ff) + 1024 * self.n_used
        self.shared_act = int(self.act) + act_bytes
        self.team = Team(threads, scratch_bytes=self.shared_act + (1 << 14))
        routed = np.concatenate([self.ids[0].view(np.uint8), self.weights[0].view(np.uint8)])
        for scratch in self.team.scratch:
            scratch[self.route :][: len(routed)] = routed

    def _activations(self, memory):
        """One row reads its activations from the thread scratch, many rows from the shared buffer."""
        if self.n_rows == 1:
            for scratch in self.team.scratch:
                scratch[self.act :][: memory.size] = memory.ravel()
        shared = memory if self.n_rows > 1 else np.zeros(1)
        return {"act_scratch": self.act, "act_shared": shared, "act_stride": memory.shape[1]}

    def _scratch(self):
        return {
            "route_scratch": self.route, "ids": self.ids, "n_expert": self.block.n_expert,
            "n_used": self.n_used, "list_scratch": self.lists, "tmp_scratch": self.tmp,
        }  # fmt: skip

    def _gate_up(self, x):
        gate, up = self.block.gate, self.block.up
        gate_rows, self.gate_twins = planes(gate.type_name, x)
        up_rows, self.up_twins = planes(up.type_name, x)
        both = np.concatenate([gate_rows, up_rows], axis=1)
        memory = aligned(both.size).reshape(both.shape)
        memory[:] = both
        up_off = 0 if gate.type_name == up.type_name else gate_rows.shape[1]
        self.team.run(
            "moe_gate_up", self.step, order=self.order, **self._activations(memory), **self._scratch(),
            gate=gate, gate_off=0, gate_bias=bias_of(self.block, 0), up=up, up_off=up_off,
            up_bias=bias_of(self.block, 1), activation=self.block.activation, ff=self.ff,
            ff_stride=self.ff.strides[0],
        )  # fmt: skip

    def _shared(self, x, x_stride):
        """The shared expert: in the scratch for `moe_down` at one row, else by `linear_rows`."""
        shared, rows = self.block.shared, self.shared_rows
        if rows is None:
            return 0
        for scratch in self.team.scratch:
            scratch[self.shared_act :][: rows.shape[1]] = rows[0]
        segment = {"tensor": shared, "act_off": 0, "out": x, "out_stride": x_stride, "out_offset": 0,
                   "add": self.add, "bias": 0, "scale": self.scale, "sigmoid": 0}  # fmt: skip
        self.team.run(
            "linear_rows", self.step, order=self.order, segments=[segment], act_scratch=0, act_shared=rows,
            act_stride=rows.shape[1], count=abi.STEP_N_ROWS, tmp_scratch=self.tmp, n_segments=1,
        )  # fmt: skip
        return shared

    def _down(self, ff):
        memory, self.down_twins = planes(self.block.down.type_name, ff)
        d = floats(self.ids.size, (self.block.n_embd + 7) // 8 * 8)
        x, x_stride = self.residual, self.residual.strides[0]
        shared = self._shared(x, x_stride)
        target = {"x": x, "x_stride": x_stride, "scale": self.scale}
        self.team.run(
            "moe_down", self.step, order=self.order, **self._activations(memory), **self._scratch(),
            down=self.block.down, down_off=0, down_bias=bias_of(self.block, 2), shared=shared,
            shared_act=self.shared_act, weights=self.weights, add=self.add, d=d, d_stride=d.strides[0],
            **target,
        )  # fmt: skip
        self.team.run(
            "moe_combine", self.step, order=self.order, d=d, d_stride=d.strides[0], ids=self.ids,
            weights=self.weights, n_used=self.n_used, n_embd=self.block.n_embd,
            add=int(self.add or shared != 0), **target,
        )  # fmt: skip

    @property
    def out(self):
        return self.residual[:, : self.block.n_embd]


def biased(y, biases, expert):
    return y if biases is None else y + biases[expert]


def check_against_twins(run, x):
    """Everything bit for bit."""
    block, (gate_b, up_b, down_b) = run.block, run.block.biases
    (gate_w, up_w, down_w), n_used = block.weights, run.n_used
    for row, ids in enumerate(run.ids):
        d = np.zeros((n_used, block.n_embd), np.float32)
        for rank, expert in enumerate(ids):
            entry = row * n_used + rank
            if expert < 0:
                assert np.isnan(run.ff[entry]).all(), "wrote an entry without an expert"
                continue
            gates = dot(block.gate.type_name, gate_w[expert], block.n_embd, run.gate_twins[row])
            ups = dot(block.up.type_name, up_w[expert], block.n_embd, run.up_twins[row])
            expected = moe.glu(block.activation, biased(gates, gate_b, expert), biased(ups, up_b, expert))
            np.testing.assert_array_equal(run.ff[entry, : block.n_ff], expected)
            out = dot(block.down.type_name, down_w[expert], block.n_ff, run.down_twins[entry])
            d[rank] = biased(out, down_b, expert)
        shared = None
        if run.shared_twins is not None:
            shared = dot("Q8_0", block.shared_weights, block.shared.n_cols, run.shared_twins[row])
        expected = moe.combine(x[row] if run.add else None, d, ids, run.weights[row], run.scale, shared)
        np.testing.assert_array_equal(run.out[row], expected)
    assert np.isnan(run.residual[:, block.n_embd]).all(), "wrote past the row"


def random_step(rng, block, n_rows, n_used, hole=0.0):
    """x, ids (a share `hole` of them -1) and weights."""
    x = rng.standard_normal((n_rows, block.n_embd)).astype(np.float32)
    ids = np.stack([rng.permutation(max(block.n_expert, n_used))[:n_used] for _ in range(n_rows)])
    ids = np.where((rng.random(ids.shape) < hole) | (ids >= block.n_expert), -1, ids)
    return x, ids, rng.random(ids.shape).astype(np.float32)


@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("Q8_0", "Q8_0", "Q8_0"), ("F32", "Q8_0", "F32")])
@pytest.mark.parametrize("n_rows", [1, 2, 5])
def test_experts_match_twins(types, n_rows):
    rng = np.random.default_rng(n_rows)
    block = make_block(rng, 5, 64, 96, types, 2)
    x, ids, weights = random_step(rng, block, n_rows, 3, hole=0.2)
    run = Run(block, (2, 1), x, ids, weights)
    check_against_twins(run, x)


@pytest.mark.parametrize("activation", [GLU_SWIGLU, GLU_SWIGLU_OAI])
@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("Q8_0", "F32", "Q8_0")])
@pytest.mark.parametrize("n_rows", [1, 2, 5])
def test_experts_with_biases_match_twins(activation, types, n_rows):
    rng = np.random.default_rng(20)
    biases = make_biases(rng, 5, 64, 96)
    block = make_block(rng, 5, 64, 96, types, 3, "uneven", biases=biases, activation=activation)
    x, ids, weights = random_step(rng, block, n_rows, 3, hole=0.2)
    check_against_twins(Run(block, (2, 1, 1), x, ids, weights), x)


@pytest.mark.parametrize("n_rows", [1, 3])
def test_experts_with_biases_of_odd_widths(n_rows):
    rng = np.random.default_rng(21)
    biases = make_biases(rng, 3, 20, 12)
    block = make_block(rng, 3, 20, 12, ("F32",) * 3, biases=biases, activation=GLU_SWIGLU_OAI)
    x, ids, weights = random_step(rng, block, n_rows, 3)
    check_against_twins(Run(block, (2,), x, ids, weights), x)


@pytest.mark.parametrize("n_rows", [1, 2, 70])
@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("n_ff_shared", [0, 32])
def test_experts_shared_scaled_and_added_or_not(n_rows, add, n_ff_shared):
    rng = np.random.default_rng(22)
    block = make_block(rng, 5, 76, 96, ("F32", "F32", "Q8_0"), 2, n_ff_shared=n_ff_shared)
    x, ids, weights = random_step(rng, block, n_rows, 2, hole=0.3)
    ff = rng.standard_normal((n_rows, n_ff_shared)).astype(np.float32) if n_ff_shared else None
    run = Run(block, (2, 1), x, ids, weights, scale=0.22, add=add, shared_ff=ff)
    check_against_twins(run, x)


def test_experts_nan_stays_visible():
    """In the gate or in the up values, whatever the activation limits."""
    for activation, role in itertools.product((GLU_SWIGLU, GLU_SWIGLU_OAI), (0, 1)):
        rng = np.random.default_rng(23)
        biases = make_biases(rng, 2, 32, 32)
        biases[role][1, 7] = np.nan
        block = make_block(rng, 2, 32, 32, ("F32",) * 3, biases=biases, activation=activation)
        x, ids, weights = random_step(rng, block, 1, 2)
        run = Run(block, (1,), x, ids, weights)
        rank = int(np.flatnonzero(ids[0] == 1)[0])
        assert np.isnan(run.ff[rank]).tolist() == [column == 7 for column in range(32)]


def test_experts_match_twins_where_matrices_end_inside_an_octet():
    rng = np.random.default_rng(4)
    for n_rows in (1, 3):
        block = make_block(rng, 3, 20, 12, ("F32", "F32", "F32"))
        x, ids, weights = random_step(rng, block, n_rows, 2)
        check_against_twins(Run(block, (2,), x, ids, weights), x)


@pytest.mark.parametrize(
    ("n_expert", "n_used", "n_rows"), [(1, 1, 70), (2, 1, 3), (7, 10, 4), (16, 4, 33), (97, 10, 9)]
)
def test_experts_one_equals_many(n_expert, n_used, n_rows):
    rng = np.random.default_rng(n_expert)
    block = make_block(rng, n_expert, 32, 40, ("F32", "F32", "F32"))
    x, ids, weights = random_step(rng, block, n_rows, n_used, hole=0.1)
    many = Run(block, (2,), x, ids, weights)
    for row in range(n_rows):
        at = slice(row, row + 1)
        one = Run(block, (2,), x[at], ids[at], weights[at])
        np.testing.assert_array_equal(one.ff, many.ff.reshape(n_rows, n_used, -1)[row])
        np.testing.assert_array_equal(one.out[0], many.out[row])


@pytest.mark.parametrize("types", [("F32", "F32", "Q8_0"), ("Q8_0", "F32", "F32")])
@pytest.mark.parametrize("n_rows", [1, 6])
def test_experts_same_for_every_team_and_slice(types, n_rows):
    results = []
    for threads, how in TEAMS:
        rng = np.random.default_rng(7)
        block = make_block(rng, 6, 160, 224, types, len(threads), how)
        x, ids, weights = random_step(rng, block, n_rows, 4)
        for order in (None, range(sum(threads))[::-1]):
            run = Run(block, threads, x, ids, weights, order)
            results.append((run.ff, run.out))
    for ff, out in results[1:]:
        np.testing.assert_array_equal(ff, results[0][0])
        np.testing.assert_array_equal(out, results[0][1])


@pytest.mark.parametrize("n_rows", [1, 3])
def test_experts_paired_octets_change_nothing(n_rows):
    results = []
    for paired in (False, True):
        rng = np.random.default_rng(8)
        block = make_block(rng, 4, 64, 200, ("F32", "F32", "F32"))
        if not paired:
            for position, matrix in enumerate((block.gate, block.up)):
                matrix.memory = [m[:, :, position].copy() for m in matrix.memory]
                matrix.gap = matrix.offset = 0
        x, ids, weights = random_step(rng, block, n_rows, 2)
        results.append(Run(block, (3,), x, ids, weights).out)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("n_rows", [1, 2, 5])
def test_experts_without_any_id_leave_x(n_rows):
    rng = np.random.default_rng(9)
    block = make_block(rng, 3, 32, 32, ("F32", "F32", "F32"))
    x, ids, weights = random_step(rng, block, n_rows, 2, hole=2.0)
    run = Run(block, (2,), x, ids, weights)
    assert (run.ids == -1).all() and np.isnan(run.ff).all()
    np.testing.assert_array_equal(run.out, x)


def test_experts_all_rows_to_one_expert_more_than_a_block_of_rows():
    rng = np.random.default_rng(10)
    block = make_block(rng, 5, 32, 16, ("F32", "Q8_0", "F32"))
    x, ids, weights = random_step(rng, block, 140, 1)
    ids[:] = 3
    run = Run(block, (2,), x, ids, weights)
    check_against_twins(run, x)


def test_experts_twins_agree_on_the_whole_block():
    rng = np.random.default_rng(11)
    block = make_block(rng, 4, 32, 24, ("F32", "F32", "F32"))
    x, ids, weights = random_step(rng, block, 3, 2)
    run = Run(block, (1,), x, ids, weights)
    dense = [w.view(np.float32) for w in block.weights]
    for row in range(3):
        y = moe.experts(x[row], *dense, ids[row], weights[row])
        np.testing.assert_allclose(run.out[row] - x[row], y, rtol=0, atol=OUT_TOLERANCE * abs(y).max())


def test_grouping_lists_entries_in_order():
    rng = np.random.default_rng(12)
    for n_rows, n_used, n_expert in [(1, 1, 1), (70, 10, 97), (5, 3, 2), (4, 2, 40)]:
        ids = rng.integers(-2, n_expert + 2, n_rows * n_used)
        size = list_scratch_bytes(n_rows, n_used, n_expert)
        lists = aligned(size + 64, fill=0xFF).view(np.int64)
        n_active = group_entries(ids.ctypes.data, len(ids), n_expert, lists.ctypes.data)
        offsets, active, entries = np.split(lists, [n_expert + 2, 2 * n_expert + 2])
        present = [e for e in range(n_expert) if e in ids]
        assert active[:n_active].tolist() == present
        for expert in range(n_expert):
            found = entries[offsets[expert] : offsets[expert + 1]]
            np.testing.assert_array_equal(found, np.flatnonzero(ids == expert))
        assert (lists[size // 8 :] == -1).all(), "left its scratch"


def test_records_of_empty_slices_have_no_octets():
    rng = np.random.default_rng(13)
    block = make_block(rng, 2, 32, 32, ("F32", "F32", "F32"), 3, "uneven")
    assert block.gate.record(0)[abi.TENSOR_N_OCTETS] == 0
