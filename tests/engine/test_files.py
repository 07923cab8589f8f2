"""Variants of model files: split, tied, mixed types, nextn layers, and those that are refused."""

import numpy as np
import pytest

import strata_jit
from strata_jit.kernels.layout import FILE_TYPES
from tests.engine.judge import kl
from tests.engine.rewrite import quantized, read_tensors, write

TOKENS = list(range(7, 31))
QUANTISATION_KL = 0.05
"""Fast path against the float path on random weights: what 8-bit activations cost."""


@pytest.fixture(scope="module")
def source(request_golden):
    return request_golden("qwen3moe-nl") / "model.gguf"


@pytest.fixture(scope="module")
def tensors(source):
    return read_tensors(source)


def logits(path, **options):
    with strata_jit.load(path, ctx=32, chunk=16, **options) as model:
        return model.logits(TOKENS)


@pytest.fixture(scope="module")
def plain(source):
    return logits(source)


def test_split_file_by_any_part(tmp_path, source, tensors, plain):
    parts = write(tmp_path / "model.gguf", source, tensors, parts=3)
    for part in parts:
        np.testing.assert_array_equal(logits(part), plain)


def test_missing_part_is_named(tmp_path, source, tensors):
    parts = write(tmp_path / "model.gguf", source, tensors, parts=3)
    parts[1].unlink()
    with pytest.raises(strata_jit.ModelError, match="00002-of-00003"):
        strata_jit.load(parts[0])


def test_version_2(tmp_path, source, plain):
    data = bytearray(source.read_bytes())
    data[4:8] = (2).to_bytes(4, "little")
    (tmp_path / "v2.gguf").write_bytes(data)
    np.testing.assert_array_equal(logits(tmp_path / "v2.gguf"), plain)


def test_tied_embeddings(tmp_path, source, tensors):
    tied = {k: v for k, v in tensors.items() if k != "output.weight"}
    copied = tensors | {"output.weight": tensors["token_embd.weight"]}
    first = logits(write(tmp_path / "tied.gguf", source, tied))
    second = logits(write(tmp_path / "copied.gguf", source, copied))
    np.testing.assert_array_equal(first, second)


def test_nextn_layers_are_skipped_with_a_note(tmp_path, source, tensors, plain):
    extra = {k.replace("blk.2.", "blk.3."): v for k, v in tensors.items() if k.startswith("blk.2.")}
    extra["blk.3.nextn.eh_proj.weight"] = quantized(np.random.default_rng(0), "Q8_0", (256, 512))
    keys = {"qwen3moe.block_count": 4, "qwen3moe.nextn_predict_layers": 1}
    path = write(tmp_path / "nextn.gguf", source, tensors | extra, keys)
    np.testing.assert_array_equal(logits(path), plain)
    with strata_jit.load(path) as model:
        assert any("multi-token prediction" in warning for warning in model.info.warnings)


MIXES = [
    ("IQ4_XS", "Q5_K", "IQ4_NL"),
    ("Q8_0", "Q6_K", "Q8_0"),
    ("BF16", "F32", "F16"),
    ("Q4_K", "IQ4_NL", "BF16"),
    ("Q6_K", "Q6_K", "F32"),
    ("F16", "F16", "Q8_0"),
    ("Q4_0", "Q4_0", "Q5_1"),
    ("Q2_K", "Q2_K", "Q4_1"),
    ("Q3_K", "Q3_K", "Q5_0"),
    ("IQ3_XXS", "IQ3_XXS", "MXFP4"),
    ("IQ3_S", "Q2_K", "Q4_0"),
]


@pytest.mark.parametrize(("gate", "up", "down"), MIXES)
def test_experts_of_any_types(tmp_path, source, tensors, gate, up, down):
    rng = np.random.default_rng(1)
    mixed = dict(tensors)
    for layer in range(3):
        for role, kind, shape in (("gate", gate, (10, 160, 256)), ("up", up, (10, 160, 256)),
                                  ("down", down, (10, 256, 160))):  # fmt: skip
            mixed[f"blk.{layer}.ffn_{role}_exps.weight"] = quantized(rng, kind, shape)
    path = write(tmp_path / "mixed.gguf", source, mixed)
    fast = logits(path, workers=1)
    assert kl(logits(path, reference=True), fast).mean() < QUANTISATION_KL
    np.testing.assert_array_equal(logits(path, numa_pool="test", test_slices=3, workers=2), fast)


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_attention_and_embedding_of_any_type(tmp_path, source, tensors, kind):
    rng = np.random.default_rng(2)
    changed = dict(tensors)
    for part, rows in (("q", 256), ("k", 64), ("v", 64), ("output", 256)):
        changed[f"blk.1.attn_{part}.weight"] = quantized(rng, kind, (rows, 256), scale=0.06)
    changed["token_embd.weight"] = quantized(rng, kind, tensors["token_embd.weight"][2])
    path = write(tmp_path / "attention.gguf", source, changed)
    fast = logits(path)
    assert kl(logits(path, reference=True), fast).mean() < QUANTISATION_KL
    np.testing.assert_array_equal(logits(path, numa_pool="test", test_slices=2, workers=1), fast)


def test_unsupported_type_is_named(tmp_path, source, tensors):
    changed = dict(tensors)
    changed["blk.0.attn_q.weight"] = quantized(np.random.default_rng(0), "TQ2_0", (256, 256))
    path = write(tmp_path / "odd.gguf", source, changed)
    with pytest.raises(strata_jit.ModelError, match=r"blk\.0\.attn_q\.weight.*TQ2_0 is not supported"):
        strata_jit.load(path)


def test_missing_tensor_is_named(tmp_path, source, tensors):
    changed = {k: v for k, v in tensors.items() if k != "blk.1.ffn_down_exps.weight"}
    with pytest.raises(strata_jit.ModelError, match=r"blk\.1\.ffn_down_exps\.weight"):
        strata_jit.load(write(tmp_path / "gone.gguf", source, changed))


def test_leftover_tensor_is_refused(tmp_path, source, tensors):
    extra = {"blk.0.attn_sinks.weight": tensors["blk.0.attn_q_norm.weight"]}
    with pytest.raises(strata_jit.ModelError, match=r"blk\.0\.attn_sinks\.weight has no use"):
        strata_jit.load(write(tmp_path / "more.gguf", source, tensors | extra))


def test_wrong_shape_is_named(tmp_path, source, tensors):
    changed = tensors | {"blk.0.attn_q.weight": quantized(np.random.default_rng(0), "Q8_0", (128, 256))}
    with pytest.raises(
        strata_jit.ModelError, match=r"blk\.0\.attn_q\.weight: found shape 256 x 128, expected 256 x 256"
    ):
        strata_jit.load(write(tmp_path / "shape.gguf", source, changed))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"qwen3moe.attention.head_count_kv": 3}, "head_count_kv"),
        ({"qwen3moe.expert_used_count": 11}, "expert_used_count: found 11"),
        ({"qwen3moe.attention.key_length": 60}, "key_length: found 60, expected a multiple of 8"),
        ({"qwen3moe.block_count": 0}, "block_count: found 0, expected a positive number"),
        ({"qwen3moe.block_count": 10**9}, "block_count: found 1000000000"),
        ({"qwen3moe.block_count": 5}, r"blk\.3\."),
        ({"qwen3moe.attention.sliding_window": 128}, "sliding_window"),
        ({"qwen3moe.expert_count": None}, "dense qwen3moe model"),
        ({"qwen3moe.embedding_length": None}, "embedding_length"),
    ],
)
def test_bad_hparams_are_named(tmp_path, source, tensors, keys, message):
    with pytest.raises(strata_jit.ModelError, match=message):
        strata_jit.load(write(tmp_path / "bad.gguf", source, tensors, keys))


def test_unsupported_architecture_is_named(tmp_path, source):
    data = source.read_bytes().replace(b"qwen3moe", b"qwen9moe")
    (tmp_path / "arch.gguf").write_bytes(data)
    with pytest.raises(strata_jit.ModelError, match="architecture 'qwen9moe' is not supported"):
        strata_jit.load(tmp_path / "arch.gguf")


HOSTILE_NUMBERS = [
    ("qwen3moe.rope.freq_base", 0.0),
    ("qwen3moe.rope.freq_base", -1e6),
    ("qwen3moe.rope.freq_base", float("nan")),
    ("qwen3moe.rope.freq_base", float("inf")),
    ("qwen3moe.attention.layer_norm_rms_epsilon", float("nan")),
    ("qwen3moe.attention.layer_norm_rms_epsilon", -1.0),
    ("qwen3moe.expert_weights_scale", float("inf")),
    ("qwen3moe.context_length", 0),
    ("qwen3moe.expert_gating_func", 2),
    ("qwen3moe.expert_shared_count", 1),
]


@pytest.mark.parametrize(("key", "value"), HOSTILE_NUMBERS)
def test_hostile_numbers_are_named(tmp_path, source, tensors, key, value):
    with pytest.raises(strata_jit.ModelError, match=key):
        strata_jit.load(write(tmp_path / "odd.gguf", source, tensors, {key: value}))


@pytest.mark.parametrize("shape", [(2048, 1), (2048, 512), (1999, 256), (2, 2048, 256)])
def test_embedding_of_another_shape_is_named(tmp_path, source, tensors, shape):
    changed = tensors | {"token_embd.weight": quantized(np.random.default_rng(0), "F32", shape)}
    with pytest.raises(strata_jit.ModelError, match=r"token_embd\.weight|output\.weight"):
        strata_jit.load(write(tmp_path / "embd.gguf", source, changed))


def test_embedding_of_unsupported_type_is_named(tmp_path, source, tensors):
    changed = tensors | {"token_embd.weight": quantized(np.random.default_rng(0), "TQ2_0", (2048, 256))}
    with pytest.raises(strata_jit.ModelError, match=r"token_embd\.weight.*TQ2_0 is not supported"):
        strata_jit.load(write(tmp_path / "embd.gguf", source, changed))


def test_absurd_context_length_is_bounded(tmp_path, source, tensors):
    path = write(tmp_path / "long.gguf", source, tensors, {"qwen3moe.context_length": 2**32 - 1})
    with pytest.raises(strata_jit.UsageError, match="expected 1 to 16777216"):
        strata_jit.load(path, ctx=2**31)
    assert logits(path).shape == (len(TOKENS), 2048)


def test_a_vocabulary_alone_is_not_run(tmp_path, source):
    path = write(tmp_path / "vocabulary.gguf", source, {}, {})
    with pytest.raises(strata_jit.ModelError, match="no weights; it cannot be run"):
        strata_jit.load(path)
