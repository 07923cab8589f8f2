"""Numbers in a file's metadata that make no sense: one ModelError that names the key, before any work."""

import dataclasses

import numpy as np
import pytest

from strata_jit import models
from strata_jit.errors import ModelError
from strata_jit.gguf.reader import open_gguf
from strata_jit.models.language_model import StepLimits

LIMITS = StepLimits(max_rows=4, n_ctx=64)
HUGE = (1 << 64) - 1
NANS = np.full(4, np.nan, np.float32)

BAD = [
    ("llama", "block_count", HUGE, "expected at most"),
    ("qwen3next", "block_count", 1 << 31, "expected at most"),
    ("gpt-oss", "block_count", 1 << 40, "expected at most"),
    ("deepseek2", "block_count", HUGE, "expected at most"),
    ("llama", "nextn_predict_layers", -(1 << 63), "expected 0 or more"),
    ("llama", "attention.head_count_kv", NANS, "float32, expected whole numbers"),
    ("llama", "attention.key_length", 0, "a multiple of 8"),
    ("llama", "attention.key_length", -8, "a multiple of 8"),
    ("llama", "attention.key_length", 1 << 20, "a multiple of 8 up to"),
    ("granitemoe", "logit_scale", 1e-40, "found 1e-40, expected 1e-06 to 1e"),
    ("granitemoe", "residual_scale", float("nan"), "found nan"),
    ("deepseek2", "attention.key_length_mla", 0, "a positive number"),
    ("deepseek2", "attention.value_length_mla", -64, "a positive number"),
    ("qwen4exp-qsa", "attention.compress_ratios", NANS, "whole numbers"),
    ("qwen4exp-qsa", "ple.layers", NANS[:1], "whole numbers"),
    ("qwen4exp-qsa", "ple.head_offsets", NANS, "whole numbers"),
    ("qwen4exp-qsa", "ple.eos_token_id", -1, "found -1, expected a token id"),
]


def build(path, name, value):
    file = open_gguf(path)
    arch = file.metadata["general.architecture"]
    return models.build(dataclasses.replace(file, metadata=file.metadata | {f"{arch}.{name}": value}), LIMITS)


@pytest.mark.parametrize(("model", "name", "value", "message"), BAD)
def test_bad_number_is_named(request_golden, model, name, value, message):
    with pytest.raises(ModelError, match=message) as found:
        build(request_golden(model) / "model.gguf", name, value)
    assert f".{name}: " in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        ("gpt-oss", "attention.sliding_window", HUGE),
        ("llama", "expert_group_used_count", HUGE),
        ("llama", "expert_weights_scale", 0.0),
    ],
)
def test_number_that_changes_nothing_is_taken(request_golden, model, name, value):
    """Arguments of ops are words of 64 bits, with a sign."""
    program = build(request_golden(model) / "model.gguf", name, value).program
    words = [value for op in program.ops for kind, value in op.args if kind != "f"]
    assert max(words) < 1 << 63
