"""What one prompt leaves in buffers, KV blocks, states and scratch is no part of the next one's logits."""

import gguf
import numpy as np
import pytest

import strata_jit
from tests.engine.rewrite import read_tensors, write

FAMILIES = ["glm4moe", "qwen3next", "deepseek2", "gpt-oss", "qwen4exp-qsa"]
NAN, INF = 5, 6
"""Tokens whose embeddings are no numbers."""


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, request_golden, tmp_path_factory):
    source = request_golden(request.param) / "model.gguf"
    tensors = read_tensors(source)
    kind, data, shape = tensors["token_embd.weight"]
    rows = gguf.quants.dequantize(data, kind).reshape(shape).astype(np.float32)
    rows[NAN], rows[INF] = np.nan, np.inf
    f32 = gguf.GGMLQuantizationType.F32, rows, shape
    return write(tmp_path_factory.mktemp("stale") / "m.gguf", source, tensors | {"token_embd.weight": f32})


@pytest.mark.parametrize("chunk", [1, 16])
def test_nothing_is_left_of_a_prompt_without_numbers(path, chunk):
    good = np.random.default_rng(2).integers(7, 2000, 60).tolist()
    bad = [NAN, INF, *good, INF, NAN, *good]
    with strata_jit.load(path, ctx=len(bad), chunk=chunk, workers=1) as model:
        first = model.logits(good)
        assert np.isfinite(first).all()
        assert not np.isfinite(model.logits(bad)).any()
        again = model.logits(good[:50])
    np.testing.assert_array_equal(again.view(np.uint32), first[:50].view(np.uint32))
