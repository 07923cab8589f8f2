"""Which type each tensor gets: the rules, what stands in for what, and the user's own choice."""

from pathlib import Path

import numpy as np
import pytest

from strata_jit.engine.quantize_types import TARGETS, choose_types, parse_overrides, target_type
from strata_jit.errors import UsageError
from strata_jit.gguf.reader import GGUFFile, TensorInfo
from strata_jit.gguf.types import GGMLType

N_LAYER = 16


def file_of(shapes, *, n_expert=128, n_head=32, n_head_kv=8, source=GGMLType.BF16):
    """A file with these tensors (name -> shape), 16 layers."""
    metadata = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": N_LAYER,
        "qwen3moe.expert_count": n_expert,
        "qwen3moe.attention.head_count": n_head,
        "qwen3moe.attention.head_count_kv": n_head_kv,
    }
    tensors = {name: TensorInfo(name, shape, source, 0, 0, 0) for name, shape in shapes.items()}
    return GGUFFile(Path("x"), (Path("x"),), 3, 32, metadata, tensors)


def chosen(name, target, overrides=(), shape=(512, 64), others=(), **geometry):
    file = file_of({name: shape, **dict.fromkeys(others, (512, 8))}, **geometry)
    return choose_types(file, target, parse_overrides(overrides))[name].name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("output_norm.weight", (512,)),
        ("blk.0.attn_norm.weight", (512, 2)),
        ("blk.0.attn_q.bias", (512, 2)),
        ("blk.0.ffn_gate_inp.weight", (512, 128)),
        ("blk.0.ffn_gate_inp_shexp.weight", (512,)),
        ("blk.0.ssm_conv1d.weight", (4, 512)),
        ("blk.0.indexer.q_proj.weight", (512, 64)),
        ("blk.0.indexer.k_proj.weight", (512, 64)),
    ],
)
def test_small_tensors_stay(name, shape, target):
    assert chosen(name, target, shape=shape, source=GGMLType.F32) == "F32"


@pytest.mark.parametrize(
    ("name", "target", "expected"),
    [
        ("blk.9.ffn_up_exps.weight", "IQ4_XS", "IQ4_XS"),
        ("blk.1.ffn_down_exps.weight", "IQ4_XS", "Q6_K"),
        ("blk.1.ffn_down_exps.weight", "IQ4_NL", "Q6_K"),
        ("blk.1.ffn_down_exps.weight", "Q8_0", "Q8_0"),
        ("blk.2.ffn_down_exps.weight", "IQ4_XS", "IQ4_XS"),
        ("blk.1.ffn_down_shexp.weight", "IQ4_XS", "Q6_K"),
        ("blk.9.attn_v.weight", "IQ4_XS", "Q6_K"),
        ("blk.9.attn_qkv.weight", "IQ4_XS", "Q6_K"),
        ("blk.9.attn_v.weight", "Q6_K", "Q6_K"),
        ("blk.9.attn_v.weight", "Q8_0", "Q8_0"),
        ("blk.9.attn_v.weight", "BF16", "BF16"),
        ("blk.9.attn_k.weight", "IQ4_XS", "IQ4_XS"),
        ("blk.9.attn_output.weight", "IQ4_XS", "IQ4_XS"),
        ("output.weight", "IQ4_XS", "Q6_K"),
        ("output.weight", "IQ4_NL", "Q6_K"),
        ("output.weight", "Q6_K", "Q6_K"),
        ("output.weight", "Q8_0", "Q8_0"),
        ("output.weight", "F16", "F16"),
        ("token_embd.weight", "IQ4_XS", "Q6_K"),  # tied
    ],
)
def test_rules(name, target, expected):
    assert chosen(name, target) == expected


def test_token_embd_beside_an_output_matrix_is_as_any_other():
    assert chosen("token_embd.weight", "IQ4_XS", others=["output.weight"]) == "IQ4_XS"


def test_value_matrices_of_few_query_heads_stay_small():
    assert chosen("blk.9.attn_v.weight", "IQ4_XS", n_head_kv=16) == "IQ4_XS"
    assert chosen("blk.9.attn_v.weight", "IQ4_XS", n_head=np.array([32, 32]), n_head_kv=np.array([0, 8])) == (
        "IQ4_XS"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [("attn_v", "Q8_0"), ("attn_k", "Q8_0"), ("attn_output", "Q6_K"), ("attn_q", "IQ4_XS")],
)
def test_eight_experts(name, expected):
    assert chosen(f"blk.9.{name}.weight", "IQ4_XS", n_expert=8) == expected


@pytest.mark.parametrize(
    ("target", "n_cols", "expected"),
    [
        ("IQ4_XS", 512, "IQ4_XS"),
        ("IQ4_XS", 480, "IQ4_NL"),
        ("IQ4_XS", 36, "F16"),
        ("Q6_K", 480, "Q8_0"),
        ("Q6_K", 36, "F16"),
        ("IQ4_NL", 36, "F16"),
        ("Q8_0", 36, "F16"),
        ("BF16", 36, "BF16"),
        ("F32", 35, "F32"),
    ],
)
def test_rows_that_blocks_do_not_divide(target, n_cols, expected):
    assert chosen("blk.9.ffn_up_exps.weight", target, shape=(n_cols, 8, 4)) == expected


@pytest.mark.parametrize("target", ["IQ4_XS", "IQ4_NL", "Q6_K", "Q8_0"])
def test_output_rows_that_256_does_not_divide(target):
    assert chosen("output.weight", target, shape=(480, 64)) == "Q8_0"


def test_overrides_win_and_the_last_of_them():
    name = "blk.1.ffn_down_exps.weight"
    assert chosen(name, "IQ4_XS", ["ffn_down=Q8_0"]) == "Q8_0"
    assert chosen(name, "IQ4_XS", ["ffn_down=Q8_0", r"blk\.1\.=bf16"]) == "BF16"
    assert chosen(name, "IQ4_XS", [r"blk\.1\.=bf16", "ffn_(up|down)=q8_0"]) == "Q8_0"
    assert chosen(name, "IQ4_XS", ["^blk.[0-9].ffn=Q6_K"], shape=(480, 8)) == "Q8_0"
    assert chosen("output.weight", "IQ4_XS", ["output=IQ4_XS"]) == "IQ4_XS"


@pytest.mark.parametrize("pattern", ["attn_out", "output_norm", "ffn_gate_inp"])
def test_pattern_that_matches_nothing(pattern):
    file = file_of(
        {"output_norm.weight": (512,), "blk.0.ffn_gate_inp.weight": (512, 8), "output.weight": (512, 8)}
    )
    with pytest.raises(UsageError, match=rf"pattern '{pattern}', expected part of the name of one of the 1"):
        choose_types(file, "Q8_0", parse_overrides([f"{pattern}=F16"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ffn_down", "expected PATTERN=TYPE"),
        ("=Q8_0", "expected PATTERN=TYPE"),
        ("ffn(=Q8_0", "no regular expression"),
        ("a=b=Q4_1", r"found type 'Q4_1', expected one of IQ4_XS, IQ4_NL, Q6_K, Q8_0, BF16, F16, F32"),
    ],
)
def test_options_that_cannot_be(text, message):
    with pytest.raises(UsageError, match=message):
        parse_overrides([text])


def test_target_types_are_listed():
    assert target_type("iq4_xs", "TYPE") == "IQ4_XS"
    with pytest.raises(UsageError, match="TYPE: found type 'Q5_K', expected one of IQ4_XS"):
        target_type("Q5_K", "TYPE")
