"""Files into arenas: slices, experts, pairs, types, faults; compared with octets made by NumPy."""

import numpy as np
import pytest
from programs import make_op, make_spec

from strata_jit.errors import ModelError
from strata_jit.gguf.quants import dequantize
from strata_jit.gguf.types import GGMLType
from strata_jit.kernels.layout import octet_bytes
from strata_jit.placement import cut_rows
from strata_jit.pool.arena import plan_arena, settle_store_types
from strata_jit.pool.host import Pool
from strata_jit.pool.program import PoolSpec, TensorSpec

START = 96
"""Bytes of the file before the first tensor: no multiple of a page."""


class Writer:
    """Puts tensors in a file and describes them."""

    def __init__(self, path):
        self.path = path
        self.data = bytearray(START)
        self.tensors = []

    def add(self, array, role="matrix", file_type="F32", store_type="auto-f32", **options):
        """`array`: [n_expert, n_rows, n_cols] or fewer dimensions, as it lies in the file."""
        rows = array.reshape((1,) * (3 - array.ndim) + array.shape)
        n_cols = options.pop("n_cols", rows.shape[2])
        row_bytes = rows.shape[2] * rows.itemsize
        tensor = TensorSpec(
            len(self.tensors), f"t{len(self.tensors)}", role, file_type, store_type, n_cols, rows.shape[1],
            options.pop("n_expert", rows.shape[0]), 0, len(self.data), row_bytes, row_bytes * rows.shape[1],
            **options,
        )  # fmt: skip
        self.tensors.append(tensor)
        self.data += rows.tobytes()
        return tensor

    def spec(self, program_ops, buffers, threads, **options):
        self.path.write_bytes(self.data)
        shares = list(threads)
        matrices = [t for t in self.tensors if t.role == "matrix"]
        ranges = [{t.id: cut_rows(t.n_rows, shares)[node] for t in matrices} for node in range(len(threads))]
        files = [self.path]
        return make_spec(program_ops, buffers, threads, self.tensors, files, row_ranges=ranges, **options)


def octets_f32(rows):
    """F32 octets of float32[n_rows, n_cols]: per column eight rows, missing ones zero."""
    padded = np.zeros((-(-len(rows) // 8) * 8, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return padded.reshape(-1, 8, rows.shape[1]).transpose(0, 2, 1)


def octets_bf16(rows):
    """BF16 octets: per pair of columns eight words, the first column in the low half."""
    halves = octets_f32(rows).view(np.uint32) >> 16
    return halves[:, 0::2] | halves[:, 1::2] << 16


@pytest.fixture
def writer(tmp_path):
    return Writer(tmp_path / "weights.bin")


def copy_op(tensor, buffer, store_type, expert=0):
    size = octet_bytes(store_type, tensor.n_cols)
    return make_op("copy_octets", ("t", tensor.id), ("b", buffer), ("i", size), ("i", expert))


@pytest.mark.parametrize(
    ("threads", "arena"), [((1,), "memfd"), ((2,), "anon"), ((1, 1), "anon"), ((2, 1, 1), "memfd")], ids=str
)
def test_slices_make_the_whole(writer, rng, threads, arena):
    exact = rng.standard_normal((100, 64), np.float32)
    short = (rng.standard_normal((20, 3000), np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    tensors = [writer.add(exact), writer.add(short)]
    ops = [copy_op(tensors[0], 0, "F32"), copy_op(tensors[1], 1, "BF16")]
    spec = writer.spec(ops, (13 * 8 * 64 * 4, 3 * 8 * 3000 * 2), threads, arena=arena, spin_us=0)
    with Pool(spec) as pool:
        pool.run(0, 2, 1, 0)
        assert np.array_equal(pool.buffer(0, "f4"), octets_f32(exact).reshape(-1))
        assert np.array_equal(pool.buffer(1, "u4"), octets_bf16(short).reshape(-1))
        assert [t.store_type for t in pool.spec.program.tensors] == ["F32", "BF16"]
        assert sum(node.arena_bytes for node in pool.nodes) == spec_bytes(spec)


def spec_bytes(spec):
    program = settle_store_types(spec.program, spec.files, reference=False)
    return sum(plan_arena(program, node.row_ranges).nbytes for node in spec.nodes)


def test_chosen_experts_and_alternating_pairs(writer, rng):
    gate, up = (rng.standard_normal((5, 24, 32), np.float32) for _ in range(2))
    chosen = (4, 1)
    first = writer.add(gate, n_expert=2, experts=chosen)
    second = writer.add(up, n_expert=2, experts=chosen, pair=first.id)
    size = 24 * 32 * 4
    ops = [copy_op(t, 2 * i + e, "F32", e) for i, t in enumerate((first, second)) for e in range(2)]
    with Pool(writer.spec(ops, (size,) * 4, (1, 1))) as pool:
        pool.run(0, 4, 1, 0)
        for i, weights in enumerate((gate, up)):
            for e, expert in enumerate(chosen):
                expected = octets_f32(weights[expert]).reshape(-1)
                assert np.array_equal(pool.buffer(2 * i + e, "f4"), expected)


def test_pairs_alternate_and_split_up_where_types_differ(writer, rng):
    exact = rng.standard_normal((16, 32), np.float32)
    short = np.ones((16, 32), np.float32)
    writer.add(exact)
    writer.add(exact, pair=0)
    writer.add(exact)
    writer.add(short, pair=2)
    spec = writer.spec([], (), (1,))
    program = settle_store_types(spec.program, spec.files, reference=False)
    assert [t.pair for t in program.tensors] == [None, 0, None, None]
    placed = plan_arena(program, spec.nodes[0].row_ranges).placed
    size = octet_bytes("F32", 32)
    assert [p.octet_stride for p in placed] == [2 * size, 2 * size, size, octet_bytes("BF16", 32)]
    assert placed[1].offset - placed[0].offset == size
    paired = settle_store_types(spec.program, spec.files, reference=True)
    assert [t.pair for t in paired.tensors] == [None, 0, None, 2]


def test_vectors_are_float32_on_every_node(writer, rng):
    values = rng.standard_normal(70).astype(np.float16)
    vector = writer.add(values, "vector", "F16", "F32")
    ops = [make_op("copy_vector", ("t", vector.id), ("b", 0), ("i", 35))]
    with Pool(writer.spec(ops, (280,), (1, 1))) as pool:
        pool.run(0, 1, 1, 0)
        assert np.array_equal(pool.buffer(0, "f4"), values.astype(np.float32))
        assert all(node.arena_bytes >= 280 for node in pool.nodes)


def test_reference_stores_what_dequantising_gives(writer, rng):
    row_bytes = GGMLType.Q8_0.row_bytes(64)
    blocks = rng.integers(0, 100, (20, row_bytes), np.uint8)
    tensor = writer.add(blocks, file_type="Q8_0", store_type="Q8_0", n_cols=64)
    ops = [copy_op(tensor, 0, "F32")]
    with Pool(writer.spec(ops, (24 * 64 * 4,), (2,), reference=True)) as pool:
        pool.run(0, 1, 1, 0)
        expected = octets_f32(dequantize(GGMLType.Q8_0, blocks, 64))
        assert np.array_equal(pool.buffer(0, "f4"), expected.reshape(-1))


def test_loading_reports_its_bytes(writer, rng):
    writer.add(rng.standard_normal((64, 64), np.float32))
    reports = []
    with Pool(writer.spec([], (), (1, 1)), lambda *report: reports.append(report)):
        pass
    loads = [report for report in reports if report[0] == "load"]
    assert loads[0] == ("load", 0, 64 * 64 * 4) and loads[-1] == ("load", 64 * 64 * 4, 64 * 64 * 4)
    assert [done for _, done, _ in loads] == sorted(done for _, done, _ in loads)


def test_a_short_file_is_a_model_error(writer, rng):
    writer.add(rng.standard_normal((64, 64), np.float32))
    spec = writer.spec([], (), (2,))
    with open(writer.path, "r+b") as file:
        file.truncate(5000)
    with pytest.raises(ModelError, match=r"weights.bin: t0: found the end of the file at byte 5000"):
        Pool(spec)


def test_spec_survives_json(writer, rng):
    writer.add(rng.standard_normal((3, 24, 32), np.float32), n_expert=1, experts=(2,))
    spec = writer.spec([make_op("nothing", ("i", 3), ("f", 0.5))], (64,), (2, 1), pinned=True)
    assert PoolSpec.from_json(spec.to_json()) == spec
