"""Variants of feed-forwards in files: merged gate and up, biases, shared experts, groups; and refusals."""

import gguf
import numpy as np
import pytest

import strata_jit
from tests.engine.judge import kl
from tests.engine.rewrite import quantized, read_tensors, write

TOKENS = list(range(7, 31))
QUANTISATION_KL = 0.05
N_EMBD, N_FF, N_EXPERT, LAYERS = 256, 64, 16, (1, 2)


@pytest.fixture(scope="module")
def source(request_golden):
    return request_golden("glm4moe") / "model.gguf"


@pytest.fixture(scope="module")
def tensors(source):
    return read_tensors(source)


def logits(path, **options):
    with strata_jit.load(path, ctx=32, **({"chunk": 16} | options)) as model:
        return model.logits(TOKENS)


@pytest.fixture(scope="module")
def plain(source):
    return logits(source)


def check_layouts(path):
    """Logits of any chunk and slices are the same bits, and near the float path's."""
    found = logits(path)
    np.testing.assert_array_equal(logits(path, chunk=1, workers=1), found)
    np.testing.assert_array_equal(logits(path, chunk=5, workers=2, numa_pool="test", test_slices=3), found)
    assert kl(logits(path, reference=True), found).mean() < QUANTISATION_KL
    return found


def merged(tensors):
    """Gate and up of each layer in one tensor, gate first."""
    changed = dict(tensors)
    for layer in LAYERS:
        kind, gate, shape = changed.pop(f"blk.{layer}.ffn_gate_exps.weight")
        _, up, _ = changed.pop(f"blk.{layer}.ffn_up_exps.weight")
        rows = np.concatenate([gate, up], axis=1)
        changed[f"blk.{layer}.ffn_gate_up_exps.weight"] = kind, rows, [shape[0], 2 * shape[1], shape[2]]
    return changed


def test_merged_gate_and_up(tmp_path, source, tensors, plain):
    path = write(tmp_path / "merged.gguf", source, merged(tensors))
    np.testing.assert_array_equal(logits(path), plain)
    np.testing.assert_array_equal(logits(path, workers=2, numa_pool="test", test_slices=2), plain)


def biases(rng, is_merged):
    found = {}
    for layer in LAYERS:
        for role, n in (("gate", N_FF), ("up", N_FF), ("down", N_EMBD)):
            found[f"blk.{layer}.ffn_{role}_exps.bias"] = quantized(rng, "F32", (N_EXPERT, n), scale=0.5)
        if is_merged:
            kind, gate, _ = found.pop(f"blk.{layer}.ffn_gate_exps.bias")
            _, up, _ = found.pop(f"blk.{layer}.ffn_up_exps.bias")
            both = np.concatenate([gate, up], axis=1)
            found[f"blk.{layer}.ffn_gate_up_exps.bias"] = kind, both, [N_EXPERT, 2 * N_FF]
    return found


def test_biases_of_experts(tmp_path, source, tensors, plain):
    first = write(tmp_path / "biases.gguf", source, tensors | biases(np.random.default_rng(0), False))
    second = write(tmp_path / "both.gguf", source, merged(tensors) | biases(np.random.default_rng(0), True))
    found = check_layouts(first)
    assert kl(plain, found).mean() > QUANTISATION_KL, "the biases have no effect"
    np.testing.assert_array_equal(logits(second), found)


def test_shared_expert_with_a_weight(tmp_path, source, tensors, plain):
    gates = {
        f"blk.{layer}.ffn_gate_inp_shexp.weight": quantized(np.random.default_rng(1), "F32", (N_EMBD,), 0.3)
        for layer in LAYERS
    }
    found = check_layouts(write(tmp_path / "weight.gguf", source, tensors | gates))
    assert kl(plain, found).mean() > 1e-4


def test_no_shared_expert(tmp_path, source, tensors, plain):
    changed = {name: tensor for name, tensor in tensors.items() if "_shexp" not in name}
    found = check_layouts(write(tmp_path / "routed.gguf", source, changed))
    assert kl(plain, found).mean() > 1e-4


@pytest.mark.parametrize("gating", [1, 3])
def test_other_gating(tmp_path, source, tensors, plain, gating):
    found = check_layouts(write(tmp_path / "g.gguf", source, tensors, {"glm4moe.expert_gating_func": gating}))
    assert kl(plain, found).mean() > 1e-4


def test_expert_groups(tmp_path, source, tensors, plain):
    keys = {"glm4moe.expert_group_count": 4, "glm4moe.expert_group_used_count": 4}
    same = write(tmp_path / "all.gguf", source, tensors, keys)
    np.testing.assert_array_equal(logits(same), plain)
    keys["glm4moe.expert_group_used_count"] = 1
    found = check_layouts(write(tmp_path / "one.gguf", source, tensors, keys))
    assert kl(plain, found).mean() > 1e-3


BAD_KEYS = [
    ({"expert_gating_func": 4}, "expert_gating_func: found 4, expected 1, 2 or 3"),
    ({"expert_group_count": 3}, "expert_group_count: found 3"),
    ({"expert_group_count": 16}, "expert_group_count: found 16"),
    ({"expert_group_count": 8, "expert_group_used_count": 1}, "expert_group_used_count: found 1, expected 2"),
    ({"expert_group_count": 4, "expert_group_used_count": 5}, "expert_group_used_count: found 5"),
    ({"leading_dense_block_count": 3}, "leading_dense_block_count: found 3"),
    ({"leading_dense_block_count": 2}, r"blk\.1\.ffn_gate\.weight"),
    ({"expert_weights_norm": 1}, "expert_weights_norm"),
    ({"residual_scale": 0.5}, "residual_scale: found 0.5"),
]


@pytest.mark.parametrize(("keys", "message"), BAD_KEYS)
def test_bad_keys_are_named(tmp_path, source, tensors, keys, message):
    keys = {f"glm4moe.{name}": value for name, value in keys.items()}
    with pytest.raises(strata_jit.ModelError, match=message):
        strata_jit.load(write(tmp_path / "bad.gguf", source, tensors, keys))


def narrow(tensors, n_ff, kind):
    """Experts of the first n_ff inner columns alone, and of all, the others being zero; in a float type."""
    cut, padded = dict(tensors), dict(tensors)
    for name, (file_type, data, shape) in tensors.items():
        if name.endswith(("_exps.weight", "_shexp.weight")) and "gate_inp" not in name:
            weights = gguf.quants.dequantize(data, file_type).reshape(shape)
            inner = (..., slice(n_ff)) if "down" in name else (..., slice(n_ff), slice(None))
            zeros = np.zeros_like(weights)
            zeros[inner] = weights[inner]
            for target, w in ((cut, weights[inner]), (padded, zeros)):
                quantised = gguf.quants.quantize(np.ascontiguousarray(w), gguf.GGMLQuantizationType[kind])
                target[name] = gguf.GGMLQuantizationType[kind], quantised, list(w.shape)
    return cut, padded


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_width_of_no_whole_octets(tmp_path, source, tensors, kind):
    cut, padded = narrow(tensors, 52, kind)
    found = check_layouts(write(tmp_path / "cut.gguf", source, cut))
    np.testing.assert_array_equal(logits(write(tmp_path / "padded.gguf", source, padded)), found)


def test_width_that_no_kernel_reads_is_named(tmp_path, source, tensors):
    path = write(tmp_path / "odd.gguf", source, narrow(tensors, 33, "F32")[0])
    with pytest.raises(strata_jit.ModelError, match=r"down_exps\.weight: found rows of 33, expected a mult"):
        strata_jit.load(path)


def test_experts_as_single_tensors_are_refused(tmp_path, source, tensors):
    changed = dict(tensors)
    kind, gate, shape = changed.pop("blk.1.ffn_gate_exps.weight")
    changed |= {f"blk.1.ffn_gate.{e}.weight": (kind, gate[e], shape[1:]) for e in range(N_EXPERT)}
    with pytest.raises(strata_jit.ModelError, match=r"blk\.1\.ffn_gate\.0\.weight.*convert the model again"):
        strata_jit.load(write(tmp_path / "old.gguf", source, changed))


def test_bias_of_another_shape_is_named(tmp_path, source, tensors):
    extra = {"blk.1.ffn_up_exps.bias": quantized(np.random.default_rng(0), "F32", (N_EXPERT, N_FF + 1))}
    with pytest.raises(strata_jit.ModelError, match=r"up_exps\.bias: found shape 65 x 16, expected 64 x 16"):
        strata_jit.load(write(tmp_path / "shape.gguf", source, tensors | extra))
