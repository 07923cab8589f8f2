"""Logits are the same bits for every worker count, slice count, chunk size and start."""

import itertools

import numpy as np
import pytest

import strata_jit
from tests.engine.judge import Golden

CARRIED = ["qwen3moe-nl", "llama", "qwen3next"]
"""Models that the project carries."""
COMPARISONS = []
"""One entry per comparison of whole logit arrays; the last test counts them."""


@pytest.fixture(scope="module", params=CARRIED)
def golden(request, request_golden):
    return Golden(request_golden(request.param))


@pytest.fixture(scope="module")
def baseline(golden):
    return logits(golden, workers=0, chunk=64)


def logits(golden, **options):
    """float32[48, n_vocab] of prompt 1, as bits."""
    with strata_jit.load(golden.model, ctx=64, **options) as model:
        return model.logits(golden.tokens[1]).view(np.uint32)


def compare(golden, baseline, **options):
    found = logits(golden, **options)
    differing = np.flatnonzero((found != baseline).any(axis=1))
    assert not differing.size, f"{options}: logits differ at positions {differing}"
    COMPARISONS.append((golden.path.name, tuple(sorted(options.items()))))


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_workers_and_chunks(golden, baseline, workers, chunk):
    compare(golden, baseline, workers=workers, chunk=chunk)


SLICES = [(2, 0, 1), (2, 1, 7), (2, 4, 64), (3, 2, 1), (3, 4, 7), (4, 3, 64), (4, 4, 1)]


@pytest.mark.parametrize(("slices", "workers", "chunk"), SLICES)
def test_slices(golden, baseline, slices, workers, chunk):
    compare(golden, baseline, workers=workers, chunk=chunk, numa_pool="test", test_slices=slices)


@pytest.mark.parametrize("start", range(10))
def test_starts(golden, baseline, start):
    compare(golden, baseline, workers=1, chunk=[1, 7, 64][start % 3])


def test_portable_kernels(golden, baseline):
    compare(golden, baseline, workers=1, chunk=7, isa="portable")


def test_private_arena(golden, baseline):
    compare(golden, baseline, workers=1, chunk=7, arena="anon")


@pytest.mark.parametrize("tasks", [1, 5, 4096])
def test_pieces_of_a_one_row_op(golden, baseline, tasks):
    compare(golden, baseline, workers=1, chunk=1, pool_tasks=tasks)


LAYOUTS = [
    {"workers": 1, "chunk": 1},
    {"workers": 0, "chunk": 1, "pool_tasks": 5},
    {"workers": 2, "chunk": 7, "numa_pool": "test", "test_slices": 3},
    {"workers": 4, "chunk": 64, "numa_pool": "test", "test_slices": 4},
    {"workers": 1, "chunk": 7, "isa": "portable"},
]


@pytest.mark.parametrize("name", ["deepseek2", "glm4moe", "gpt-oss", "granitemoe", "olmoe", "qwen2moe"])
def test_other_families(request_golden, name):
    """The parts that the two models above do not have."""
    golden = Golden(request_golden(name))
    baseline = logits(golden, workers=0, chunk=64)
    for options in LAYOUTS:
        found = logits(golden, **options)
        np.testing.assert_array_equal(found, baseline, err_msg=f"{options}")


def compare_over_blocks(golden):
    """300 positions: two KV blocks, on one node and on two; windows that cross chunks and blocks."""
    tokens = np.resize(golden.tokens[0], 300)
    found = []
    for options in ({"workers": 0, "chunk": 300}, {"workers": 1, "chunk": 1},
                    {"workers": 2, "chunk": 64, "numa_pool": "test"}):  # fmt: skip
        with strata_jit.load(golden.model, ctx=304, **options) as model:
            found.append(model.logits(tokens).view(np.uint32))
    for first, second in itertools.pairwise(found):
        np.testing.assert_array_equal(first, second)
        COMPARISONS.append((golden.path.name, "longer"))


def test_longer_than_a_kv_block(golden):
    compare_over_blocks(golden)


@pytest.mark.parametrize("name", ["deepseek2", "gpt-oss"])
def test_other_attention_longer_than_a_kv_block(request_golden, name):
    compare_over_blocks(Golden(request_golden(name)))


def test_number_of_comparisons():
    """Runs last in this file: nothing above may have been skipped silently."""
    carried = [entry for entry in COMPARISONS if entry[0] in CARRIED]
    assert len(carried) == len(CARRIED) * (12 + 7 + 10 + 2 + 3 + 2)
