"""Small models of every architecture against llama.cpp's logits."""

import numpy as np
import pytest

import strata_jit
from tests.engine.judge import REFERENCE_KL, Golden, judge, kl

MODELS = [
    "deepseek2", "glm4moe", "gpt-oss", "granitemoe", "llama", "olmoe", "qwen2moe", "qwen35moe", "qwen3moe",
    "qwen3moe-nl", "qwen3next", "qwen4exp", "qwen4exp-qsa",
]  # fmt: skip


@pytest.fixture(params=MODELS)
def golden(request, request_golden):
    return Golden(request_golden(request.param))


@pytest.mark.parametrize("isa", ["auto", "portable"])
def test_fast_kernels_match(golden, isa):
    with strata_jit.load(golden.model, isa=isa, ctx=64, chunk=16) as model:
        for prompt, tokens in enumerate(golden.tokens):
            assert judge(golden, prompt, model.logits(tokens)) == []
        variants = {use.op: use.variant for use in model.info.kernels}
        assert variants, "no kernels are listed"
        assert set(variants.values()) <= {"avx512vnni", "avxvnni", "avx2", "portable", "vector"}


def test_float_path_matches(golden):
    with strata_jit.load(golden.model, reference=True, ctx=64, chunk=16) as model:
        logits = model.logits(golden.tokens[0])
    expected = golden.logits_float[0]
    divergence = kl(expected, logits[-len(expected) :])
    judged = np.isin(np.arange(len(logits))[-len(expected) :], golden.positions)
    assert judged.any()
    assert divergence[judged].mean() <= REFERENCE_KL


def test_judge_notices_a_wrong_model(golden):
    wrong = np.roll(golden.logits.astype(np.float32), 1, axis=2)
    assert judge(golden, 0, wrong[0])
    assert judge(golden, 1, wrong[1])
