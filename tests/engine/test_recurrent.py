"""Models with recurrent layers: state from step to step, forms of the file, and what is refused."""

import gguf
import numpy as np
import pytest

import strata_jit
from strata_jit.gguf.quants import dequantize
from strata_jit.gguf.reader import open_gguf
from strata_jit.gguf.types import GGMLType
from tests.engine.rewrite import read_tensors, write

N_K, N_V, DIM = 2, 4, 32
"""Heads of the delta nets of the golden model."""


@pytest.fixture(scope="module")
def source(request_golden):
    return request_golden("qwen3next") / "model.gguf"


@pytest.fixture(scope="module")
def tensors(source):
    return read_tensors(source)


@pytest.fixture(scope="module")
def model(source):
    with strata_jit.load(source, ctx=64, chunk=8, workers=1) as loaded:
        yield loaded


def logits(path, tokens=range(7, 31), **options):
    with strata_jit.load(path, ctx=64, chunk=8, workers=1, **options) as loaded:
        return loaded.logits(list(tokens))


# --- state --------------------------------------------------------------------------------------------------


def test_every_generation_starts_clean(model):
    """The same answer after another prompt, after an interrupted generation, and after one of one token."""
    tokens = list(range(20, 40))
    first = model.logits(tokens)
    model.logits(list(range(900, 930)))
    np.testing.assert_array_equal(model.logits(tokens), first)
    generation = model.generate(tokens, max_tokens=8)
    next(generation)
    generation.close()
    model.logits([5])
    np.testing.assert_array_equal(model.logits(tokens), first)


def test_a_generation_goes_on_where_the_prompt_ends(model):
    """Greedy tokens are those of the logits of prompt and answer in one go."""
    prompt = list(range(300, 311))
    generation = model.generate(prompt, max_tokens=12)
    for _ in generation:
        pass
    answer = list(generation.result.token_ids)
    assert len(answer) == 12
    whole = model.logits(prompt + answer)
    assert whole[len(prompt) - 1 : -1].argmax(axis=1).tolist() == answer


@pytest.mark.parametrize("position", [1, 7, 9])
def test_a_step_that_does_not_go_on_is_refused(model, position):
    stepper, user = model._stepper, object()
    stepper.begin(user)
    stepper.step(user, list(range(8)), 0, [])
    with pytest.raises(strata_jit.PoolError, match=rf"position {position}: .* expect 0 or 8"):
        stepper.step(user, [3], position, [0])
    stepper.step(user, [3], 8, [0])
    stepper.step(user, [3], 0, [0])


# --- forms of the file --------------------------------------------------------------------------------------


def test_layers_by_array_or_by_interval(tmp_path, source, tensors):
    keys = {"attention.recurrent_layers": [True, True, True, False], "full_attention_interval": 1}
    path = write(tmp_path / "array.gguf", source, tensors, {f"qwen3next.{k}": v for k, v in keys.items()})
    np.testing.assert_array_equal(logits(path), logits(source))


def test_key_heads_by_layer(tmp_path, source, tensors):
    key = "qwen3next.attention.head_count_kv"
    path = write(tmp_path / "heads.gguf", source, tensors, {key: [0, 0, 0, 2]})
    np.testing.assert_array_equal(logits(path), logits(source))
    path = write(tmp_path / "mixed.gguf", source, tensors, {key: [0, 0, 1, 2]})
    with pytest.raises(strata_jit.ModelError, match=r"head_count_kv.*2 different numbers"):
        strata_jit.load(path)


def floats(source, tensors, name):
    """(gguf type, float32[n_rows, n_cols], shape) of a matrix, dequantised."""
    _, data, shape = tensors[name]
    kind = GGMLType[open_gguf(source).tensors[name].type.name]
    values = dequantize(kind, data.reshape(shape[0], -1), shape[1]).astype(np.float32)
    return gguf.GGMLQuantizationType.F32, values, shape


def test_first_files_of_the_architecture(tmp_path, source, tensors):
    """One matrix `ssm_in`, for each k head its q, k, v and z, instead of attn_qkv and attn_gate."""
    apart, together = dict(tensors), dict(tensors)
    for layer in range(3):
        names = [f"blk.{layer}.attn_qkv.weight", f"blk.{layer}.attn_gate.weight"]
        for name in names:
            apart[name] = floats(source, tensors, name)
            del together[name]
        q, k, v = np.split(apart[names[0]][1], [N_K * DIM, 2 * N_K * DIM])
        parts = [part.reshape(N_K, -1, part.shape[1]) for part in (q, k, v, apart[names[1]][1])]
        rows = np.concatenate(parts, axis=1).reshape(-1, q.shape[1])
        together[f"blk.{layer}.ssm_in.weight"] = gguf.GGMLQuantizationType.F32, rows, list(rows.shape)
    expected = logits(write(tmp_path / "apart.gguf", source, apart))
    np.testing.assert_array_equal(logits(write(tmp_path / "in.gguf", source, together)), expected)


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("ssm.conv_kernel", 3, "expected 4"),
        ("ssm.state_size", 24, "expected a multiple of 16"),
        ("ssm.group_count", 0, "expected a positive number"),
        ("ssm.time_step_rank", 5, "expected a multiple of group_count 2"),
        ("ssm.inner_size", 64, "expected time_step_rank 4 x state_size 32"),
        ("full_attention_interval", 0, "expected 1 or more"),
        ("attention.recurrent_layers", [True, False], "2 items, expected one for each of 4 layers"),
    ],
)
def test_shapes_that_are_refused(tmp_path, source, tensors, key, value, expected):
    path = write(tmp_path / "model.gguf", source, tensors, {f"qwen3next.{key}": value})
    with pytest.raises(strata_jit.ModelError, match=expected) as caught:
        strata_jit.load(path)
    assert f"qwen3next.{key}" in str(caught.value)


def test_a_tensor_of_another_shape_is_named(tmp_path, source, tensors):
    kind, data, shape = tensors["blk.0.ssm_conv1d.weight"]
    changed = tensors | {"blk.0.ssm_conv1d.weight": (kind, data[:, :3].copy(), [shape[0], 3])}
    with pytest.raises(strata_jit.ModelError, match=r"ssm_conv1d.weight.*3 x 256.*4 x 256"):
        strata_jit.load(write(tmp_path / "model.gguf", source, changed))
