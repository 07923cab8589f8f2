"""qwen4exp: the same bits for every layout, clean starts, padded downs, and what is refused."""

import gguf
import numpy as np
import pytest

import strata_jit
from strata_jit.gguf.reader import open_gguf
from strata_jit.models import build
from strata_jit.models.language_model import StepLimits
from tests.engine.judge import Golden
from tests.engine.rewrite import read_tensors, write


@pytest.fixture(scope="module")
def golden(request_golden):
    return Golden(request_golden("qwen4exp-qsa"))


@pytest.fixture(scope="module")
def tensors(golden):
    return read_tensors(golden.model)


def logits(path, tokens, ctx=64, **options):
    with strata_jit.load(path, ctx=ctx, **options) as model:
        return model.logits(tokens).view(np.uint32)


LAYOUTS = [
    {"workers": 0, "chunk": 1},
    {"workers": 2, "chunk": 1},
    {"workers": 1, "chunk": 7},
    {"workers": 4, "chunk": 64},
    {"workers": 1, "chunk": 5, "isa": "portable"},
    {"workers": 2, "chunk": 1, "numa_pool": "test", "test_slices": 3},
    {"workers": 4, "chunk": 6, "numa_pool": "test", "test_slices": 2},
]


def test_every_layout_gives_the_same_bits(golden):
    """Text with an end of turn; from position 19 on, attention is sparse."""
    expected = logits(golden.model, golden.tokens[1], workers=0, chunk=64)
    for options in LAYOUTS:
        found = logits(golden.model, golden.tokens[1], **options)
        np.testing.assert_array_equal(found, expected, str(options))


def test_longer_than_a_kv_block(golden):
    """300 positions: choices in two KV blocks, on one node and on two."""
    tokens = np.resize(golden.tokens[0], 300)
    expected = logits(golden.model, tokens, ctx=304, workers=0, chunk=300)
    for options in ({"workers": 1, "chunk": 1}, {"workers": 2, "chunk": 64, "numa_pool": "test"}):
        found = logits(golden.model, tokens, ctx=304, **options)
        np.testing.assert_array_equal(found, expected, str(options))


def test_every_generation_starts_clean(golden):
    tokens = golden.tokens[0].tolist()
    with strata_jit.load(golden.model, ctx=64, chunk=8, workers=1) as model:
        first = model.logits(tokens)
        model.logits(golden.tokens[1])
        np.testing.assert_array_equal(model.logits(tokens), first)
        generation = model.generate(golden.tokens[1].tolist()[:20], max_tokens=8)
        next(generation)
        generation.close()
        np.testing.assert_array_equal(model.logits(tokens), first)


def test_a_generation_goes_on_where_the_prompt_ends(golden):
    """Greedy tokens are those of the logits of prompt and answer in one go."""
    prompt = golden.tokens[0].tolist()[:21]
    with strata_jit.load(golden.model, ctx=64, chunk=8, workers=1) as model:
        generation = model.generate(prompt, max_tokens=12)
        for _ in generation:
            pass
        answer = list(generation.result.token_ids)
        whole = model.logits(prompt + answer[:-1])
    assert len(answer) > 1
    np.testing.assert_array_equal(whole[len(prompt) - 1 :].argmax(axis=1), answer)


def test_down_rows_padded_with_zeros_change_nothing(golden, tensors, tmp_path):
    """As files have them whose types need blocks of 256."""
    padded, changed = dict(tensors), 0
    for name, (kind, data, shape) in tensors.items():
        if ".ffn_down_" in name:
            wide = np.zeros((*data.shape[:-1], 4 * data.shape[-1]), np.uint8)
            wide[..., : data.shape[-1]] = data
            padded[name] = kind, wide, [*shape[:-1], 256]
            changed += 1
    assert changed == 4
    path = write(tmp_path / "padded.gguf", golden.model, padded)
    tokens = golden.tokens[0][:20]
    expected = logits(golden.model, tokens, workers=1, chunk=8)
    np.testing.assert_array_equal(logits(path, tokens, workers=1, chunk=8), expected)
    np.testing.assert_array_equal(logits(path, tokens, workers=0, chunk=1), expected)


def test_small_matrices_may_have_any_type(golden, tensors, tmp_path):
    """Those of mixes and of the n-gram embedding as BF16, and the same values as F32."""
    types, f32 = gguf.GGMLQuantizationType, gguf.quants.dequantize
    bf16, wide, changed = dict(tensors), dict(tensors), 0
    for name, (kind, data, shape) in tensors.items():
        if ("hc_" in name or "ple_" in name) and len(shape) == 2 and "conv" not in name:
            narrow = gguf.quants.quantize(f32(data, kind), types.BF16)
            bf16[name], wide[name] = (types.BF16, narrow, shape), (types.F32, f32(narrow, types.BF16), shape)
            changed += 1
    assert changed == 2 * 2 * 3 + 2 + 2
    paths = [
        write(tmp_path / f"{name}.gguf", golden.model, t) for name, t in (("bf16", bf16), ("f32", wide))
    ]
    first, second = (logits(path, golden.tokens[0][:24], workers=1, chunk=8) for path in paths)
    np.testing.assert_array_equal(first, second)


ARCH = "qwen4exp"
REFUSED = [
    ({"ple.layers": [0, 1]}, "ple.layers.*found 0, 1.*one layer of 2"),
    ({"ple.layers": [2]}, "ple.layers.*found 2"),
    ({"ple.head_offsets": [0, 503, 1012]}, "ple.head_offsets.*4 whole numbers"),
    ({"ple.head_offsets": [0, 503, 1012, 1600]}, "ple.head_vocab_sizes.*523 from 1600 on"),
    ({"ple.head_vocab_sizes": [503, 0, 521, 523]}, "ple.head_vocab_sizes.*found 0 from 503"),
    ({"ple.layer_multipliers": [1, 2, 3]}, "ple.layer_multipliers.*2 whole numbers"),
    ({"ple.layer_multipliers": [1, -2]}, "ple.layer_multipliers.*from 0 on"),
    ({"attention.compress_ratios": [0, 3]}, "compress_ratios.*found 3.*one of 4, 8, 16, 32"),
    ({"attention.compress_ratios": [4]}, "compress_ratios.*1 items"),
    ({"attention.indexer.top_k": 18}, "indexer.top_k.*multiple of 4"),
    ({"attention.indexer.key_length": 8}, "indexer.key_length.*32 or more"),
    ({"hyper_connection.count": 0}, "hyper_connection.count.*found 0.*positive"),
    ({"hyper_connection.low_rank": 12}, "hyper_connection.low_rank.*multiple of 8"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_numbers_that_do_not_fit_are_refused(golden, tensors, tmp_path, keys, message):
    changes = {f"{ARCH}.{name}": value for name, value in keys.items()}
    path = write(tmp_path / "odd.gguf", golden.model, tensors, keys=changes)
    with pytest.raises(strata_jit.ModelError, match=message):
        build(open_gguf(path), StepLimits(max_rows=8, n_ctx=64))
