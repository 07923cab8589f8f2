"""The contract of a loaded model: one sequence at a time, closed is closed, options are checked."""

import pytest

import strata_jit

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def path(request_golden):
    return request_golden("qwen3moe-nl") / "model.gguf"


@pytest.fixture(scope="module")
def model(path):
    with strata_jit.load(path, ctx=64) as model:
        yield model


def test_a_second_generation_ends_the_first(model):
    first = model.generate(PROMPT, max_tokens=20)
    next(first)
    second = "".join(model.generate(PROMPT, max_tokens=20))
    with pytest.raises(strata_jit.UsageError, match="another generation"):
        list(first)
    assert second == "".join(model.generate(PROMPT, max_tokens=20))


def test_logits_end_a_generation(model):
    first = model.generate(PROMPT, max_tokens=20)
    next(first)
    model.logits(PROMPT)
    with pytest.raises(strata_jit.UsageError, match="another generation"):
        list(first)


def test_closed_model_says_so(path):
    model = strata_jit.load(path, ctx=64)
    model.close()
    model.close()
    with pytest.raises(strata_jit.UsageError, match="closed"):
        model.generate(PROMPT)
    with pytest.raises(strata_jit.UsageError, match="closed"):
        model.logits(PROMPT)


def test_two_models_at_once(path, model):
    with strata_jit.load(path, ctx=64, workers=0) as other:
        first, second = model.generate(PROMPT, max_tokens=12), other.generate(PROMPT, max_tokens=12)
        pieces = list(zip(first, second, strict=True))
        assert pieces
        assert all(a == b for a, b in pieces)


def test_sampled_generation_tells_its_seed(model):
    sampling = strata_jit.Sampling(temp=1.5)
    generation = model.generate(PROMPT, max_tokens=12, sampling=sampling)
    text = "".join(generation)
    again = strata_jit.Sampling(temp=1.5, seed=generation.result.seed)
    assert "".join(model.generate(PROMPT, max_tokens=12, sampling=again)) == text
    greedy = model.generate(PROMPT, max_tokens=1)
    list(greedy)
    assert greedy.result.seed is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctx": 0}, "ctx: found 0"),
        ({"ctx": 10**9}, "expected 1 to 4096"),
        ({"chunk": 0}, "chunk: found 0"),
        ({"workers": -1}, "workers: found -1"),
        ({"spin_us": -1}, "spin_us: found -1"),
        ({"arena": "heap"}, "arena: found 'heap', expected memfd or anon"),
        ({"isa": "mmx"}, "mmx"),
        ({"numa_pool": "2"}, "found '2'"),
    ],
)
def test_options_are_checked(path, options, message):
    with pytest.raises(strata_jit.UsageError, match=message):
        strata_jit.load(path, **options)


@pytest.mark.parametrize("prompt", [[], "", list(range(65))])
def test_prompts_are_checked(model, prompt):
    with pytest.raises(strata_jit.UsageError, match="prompt"):
        model.generate(prompt)


@pytest.mark.parametrize("token", [-1, 2048, 10**12])
def test_token_ids_are_checked(model, token):
    with pytest.raises(strata_jit.UsageError, match=f"token id {token}: expected 0 to 2047"):
        model.logits([5, token])
    assert model.logits(PROMPT).shape == (4, 2048), "the model is still usable"
