"""`linear` against the dot twin, bit for bit, over forms, rows, segments, threads, nodes and slices."""

import numpy as np
import pytest

from strata_jit.kernels import abi
from strata_jit.kernels.dot import many_scratch_bytes
from strata_jit.kernels.ref.activations import KIND_OF_TYPE, quantize_activation
from strata_jit.kernels.ref.dot import dot
from strata_jit.kernels.ref.mathx import sigmoid_f32
from strata_jit.kernels.scratch import DOT_SCRATCH_BYTES, ROW_BLOCK, tmp_scratch_bytes
from tests.kernels.harness import Matrix, Step, Team, Vector, aligned, even_slices, floats

N_COLS = 64
TMP, ACT = 0, (tmp_scratch_bytes() + 63) // 64 * 64
TEAMS = [((1,), "even"), ((3,), "even"), ((2, 1), "uneven"), ((1, 2, 1), "empty")]


def file_rows(rng, type_name, n_rows):
    """uint8[n_rows, row bytes] of random weights."""
    if type_name == "F32":
        return rng.standard_normal((n_rows, N_COLS)).astype(np.float32).view(np.uint8)
    blocks = rng.integers(0, 256, (n_rows, N_COLS // 32, 34), np.uint8)
    scales = rng.uniform(-0.01, 0.01, blocks.shape[:2]).astype(np.float16)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return blocks.reshape(n_rows, -1)


def slices_of(n_rows, n_nodes, how):
    """Row ranges: "even", "uneven" (the first node has one octet) or "empty" (the first has none)."""
    if how == "even" or n_nodes == 1:
        return even_slices(n_rows, n_nodes)
    first = min(abi.ROW_GROUP, n_rows) if how == "uneven" else 0
    return [(0, first), *((a + first, b + first) for a, b in even_slices(n_rows - first, n_nodes - 1))]


class Rows:
    """Activations of n rows in both kinds, in a shared buffer and, for one row, in every thread's scratch."""

    def __init__(self, rng, n_rows):
        x = rng.standard_normal((n_rows, N_COLS)).astype(np.float32)
        self.twins = {kind: [quantize_activation(kind, row) for row in x] for kind in ("F32", "Q32")}
        self.offset = {"F32": 64, "Q32": 64 + 4 * N_COLS}
        self.stride = self.offset["Q32"] + len(self.twins["Q32"][0].row())
        self.memory = aligned(n_rows * self.stride).reshape(n_rows, -1)
        for kind, twins in self.twins.items():
            for row, twin in zip(self.memory, twins, strict=True):
                row[self.offset[kind] :][: len(twin.row())] = twin.row()


def run(rows, step, threads, segments, count=abi.STEP_N_ROWS, order=None):
    team = Team(threads, scratch_bytes=ACT + rows.stride)
    for scratch in team.scratch:
        scratch[ACT:] = rows.memory[0]
    shared = rows.memory if len(rows.memory) > 1 else np.zeros(1)
    team.run(
        "linear", step, segments=segments, order=order,
        act_scratch=ACT, act_shared=shared, act_stride=rows.stride, count=count, tmp_scratch=TMP,
        n_segments=len(segments),
    )  # fmt: skip
    return team


def segment(rows, matrix, out, out_offset=0, add=0, bias=0, scale=1.0, sigmoid=0):
    return {
        "tensor": matrix, "act_off": rows.offset[KIND_OF_TYPE[matrix.type_name]], "out": out,
        "out_stride": out.strides[0], "out_offset": out_offset, "add": add, "bias": bias, "scale": scale,
        "sigmoid": sigmoid,
    }  # fmt: skip


def expected(rows, type_name, weights, n_rows, before=None, bias=None, scale=1.0):
    twins = rows.twins[KIND_OF_TYPE[type_name]][:n_rows]
    y = np.stack([dot(type_name, weights, N_COLS, twin) for twin in twins])
    y = y if bias is None else y + bias
    y = y * np.float32(scale)
    return y if before is None else before + y


@pytest.mark.parametrize(("threads", "how"), TEAMS)
@pytest.mark.parametrize("n_rows", [1, 2, 7, 70])
def test_linear_matches_dot(threads, how, n_rows):
    """Three segments of two types in one buffer row, the matrices' ends inside octets."""
    rng = np.random.default_rng(n_rows)
    rows = Rows(rng, n_rows)
    shapes = [("F32", 333, 0), ("Q8_0", 21, 336), ("F32", 4, 360)]
    weights = [file_rows(rng, name, n) for name, n, _ in shapes]
    out = floats(n_rows, 376)
    segments = []
    for (name, n, column), w in zip(shapes, weights, strict=True):
        matrix = Matrix(name, w, N_COLS, slices_of(n, len(threads), how))
        segments.append(segment(rows, matrix, out, 4 * column))
    run(rows, Step(n_rows), threads, segments)
    for (name, n, column), w in zip(shapes, weights, strict=True):
        np.testing.assert_array_equal(out[:, column : column + n], expected(rows, name, w, n_rows))
    beside = [*range(333, 336), *range(357, 360), *range(364, 376)]
    assert np.isnan(out[:, beside]).all(), "wrote beside a segment"


@pytest.mark.parametrize("n_rows", [1, ROW_BLOCK - 1, ROW_BLOCK + 1])
@pytest.mark.parametrize(("add", "scale", "has_bias"), [(1, 1.0, False), (0, 0.3, False), (1, 0.3, True)])
def test_linear_scales_biases_and_adds(n_rows, add, scale, has_bias):
    rng = np.random.default_rng(1)
    rows, weights = Rows(rng, n_rows), file_rows(rng, "F32", 45)
    before = rng.standard_normal((n_rows, 45)).astype(np.float32)
    bias = rng.standard_normal(45).astype(np.float32) if has_bias else None
    out = floats(n_rows, 45, fill=0)
    out[:] = before if add else np.nan
    matrix = Matrix("F32", weights, N_COLS, slices_of(45, 2, "uneven"))
    record = Vector(bias) if has_bias else 0
    run(rows, Step(n_rows), (1, 2), [segment(rows, matrix, out, add=add, bias=record, scale=scale)])
    twin = expected(rows, "F32", weights, n_rows, before if add else None, bias, scale)
    np.testing.assert_array_equal(out, twin)


@pytest.mark.parametrize("n_rows", [1, 5])
@pytest.mark.parametrize("add", [0, 1])
def test_linear_takes_the_sigmoid_before_it_adds(n_rows, add):
    rng = np.random.default_rng(5)
    rows, weights = Rows(rng, n_rows), file_rows(rng, "F32", 21)
    out = floats(n_rows, 21, fill=3)
    matrix = Matrix("F32", weights, N_COLS, [(0, 21)])
    run(rows, Step(n_rows), (2,), [segment(rows, matrix, out, add=add, scale=0.5, sigmoid=1)])
    y = sigmoid_f32(expected(rows, "F32", weights, n_rows, scale=0.5))
    np.testing.assert_array_equal(out, np.float32(3) + y if add else y)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("n_rows", [1, 3])
def test_linear_is_the_same_whoever_claims(order, n_rows):
    rng = np.random.default_rng(2)
    rows, weights = Rows(rng, n_rows), file_rows(rng, "Q8_0", 400)
    out = floats(n_rows, 400)
    matrix = Matrix("Q8_0", weights, N_COLS, [(0, 400)])
    run(rows, Step(n_rows), (3,), [segment(rows, matrix, out)], order=order)
    np.testing.assert_array_equal(out, expected(rows, "Q8_0", weights, n_rows))


@pytest.mark.parametrize(("tasks", "n_claims"), [(1, 4), (5, 5), (4096, 50)])
def test_linear_is_cut_into_as_many_runs_as_asked_for(tasks, n_claims):
    """Of 50 octets; a run has 16 at most."""
    rng = np.random.default_rng(4)
    rows, weights = Rows(rng, 1), file_rows(rng, "Q8_0", 400)
    out = floats(1, 400)
    step = Step(1)
    step.block[abi.STEP_TASKS] = tasks
    matrix = Matrix("Q8_0", weights, N_COLS, [(0, 400)])
    team = run(rows, step, (1,), [segment(rows, matrix, out)])
    np.testing.assert_array_equal(out, expected(rows, "Q8_0", weights, 1))
    assert team.claims[0][0] == n_claims


@pytest.mark.parametrize("n_out", [1, 2])
def test_linear_counts_the_rows_whose_logits_are_wanted(n_out):
    rng = np.random.default_rng(3)
    rows, weights = Rows(rng, n_out), file_rows(rng, "F32", 16)
    out = floats(4, 16)
    matrix = Matrix("F32", weights, N_COLS, [(0, 16)])
    step = Step(4, out_rows=range(n_out))
    run(rows, step, (2,), [segment(rows, matrix, out)], count=abi.STEP_N_OUT)
    np.testing.assert_array_equal(out[:n_out], expected(rows, "F32", weights, n_out))
    assert np.isnan(out[n_out:]).all()


def test_dot_scratch_suffices():
    assert many_scratch_bytes(ROW_BLOCK) <= DOT_SCRATCH_BYTES
