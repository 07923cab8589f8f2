"""A real model: the greedy answers that llama.cpp gives come out, and its logits match."""

import json

import numpy as np
import pytest

import strata_jit
from tests.engine.judge import kl

N_CASES = 3
TOP_1 = 0.93


@pytest.fixture(scope="module")
def golden(request):
    path = request.config.getoption("--golden")
    if path is None:
        pytest.skip("no --golden DIR given")
    return path / "smollm2-moe"


@pytest.fixture(scope="module")
def cases(golden):
    return json.loads((golden / "meta.json").read_text())["cases"]


@pytest.fixture(scope="module")
def model(request):
    path = request.config.getoption("--models")
    if path is None:
        pytest.skip("no --models DIR given")
    with strata_jit.load(path / "smollm2-moe-iq4_xs.gguf", ctx=512) as model:
        yield model


@pytest.mark.parametrize("case", range(N_CASES))
def test_greedy_answer(model, cases, case):
    expected = cases[case]
    system = [m["content"] for m in expected["messages"] if m["role"] == "system"]
    user = [m["content"] for m in expected["messages"] if m["role"] == "user"]
    if len(system) + len(user) != len(expected["messages"]) or len(user) != 1:
        prompt = model.tokenizer.encode(expected["prompt"])
    else:
        prompt = model.chat(user[0], system[0] if system else None)
    assert len(prompt) == expected["prompt_tokens"]
    generation = model.generate(prompt, max_tokens=len(expected["continuation_ids"]) + 1)
    text = "".join(generation)
    sure = expected["sure_tokens"]
    assert list(generation.result.token_ids[:sure]) == expected["continuation_ids"][:sure]
    assert text == generation.result.text
    assert "<|im_end|>" not in text
    assert "\ufffd" not in text


@pytest.mark.parametrize("case", range(N_CASES))
def test_logits(model, golden, cases, case):
    tokens = np.load(golden / f"tokens_{case}.npy")
    top_ids = np.load(golden / f"top_ids_{case}.npy")
    found = model.logits(tokens)
    assert (found.argmax(axis=1) == top_ids[:, 0]).mean() >= TOP_1
    positions = cases[case]["logits_positions"]
    divergence = kl(np.load(golden / f"logits_{case}.npy"), found[positions])
    assert divergence.mean() <= 3 * cases[case]["float_vs_one"]["mean_kl"]


def test_generation_after_an_interrupted_one(model, monkeypatch):
    """An interrupt may come while a step runs: the next generation is not disturbed by it."""
    prompt = model.chat("Name three rivers.")
    truth = "".join(model.generate(prompt, max_tokens=8))

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model._pool, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            "".join(model.generate(prompt, max_tokens=8))
    assert "".join(model.generate(prompt, max_tokens=8)) == truth
