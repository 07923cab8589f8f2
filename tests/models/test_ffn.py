"""Programs of feed-forwards: where the team meets, and where results go."""

import pytest

from strata_jit.gguf.reader import open_gguf
from strata_jit.kernels.registry import OPS
from strata_jit.models.experts import Target
from strata_jit.models.ffn import FFN_FEATURES, RoutedFfn
from strata_jit.models.language_model import StepLimits
from strata_jit.models.transformer import Transformer


@pytest.fixture
def transformer(data_dir):
    def make(name):
        file = open_gguf(data_dir / "golden" / name / "model.gguf")
        return Transformer(file, StepLimits(max_rows=8, n_ctx=64), FFN_FEATURES)

    return make


def ops_of(t, ffn, layer):
    """Ops of one layer, and of each the values by field."""
    first = t.b.n_ops
    ffn.add(layer)
    ops = t.b.finish(0).ops[first:]
    values = [dict(zip(OPS[op.name].fields, (value for _, value in op.args), strict=False)) for op in ops]
    return ops, values


def test_shared_expert_costs_no_barrier_of_a_one_row_step(transformer):
    counts = {}
    for name in ("llama", "glm4moe"):
        t = transformer(name)
        ops, _ = ops_of(t, RoutedFfn(t, norm="post_attention_norm" if name == "glm4moe" else "ffn_norm"), 1)
        counts[name] = sum(op.barrier_one for op in ops)
    assert counts == {"llama": 3, "glm4moe": 3}


def test_dense_layer_meets_twice(transformer):
    t = transformer("glm4moe")
    ops, _ = ops_of(t, RoutedFfn(t, norm="post_attention_norm"), 0)
    assert [op.name for op in ops] == ["norm_quant", "linear", "glu_quant", "linear"]
    assert sum(op.barrier_one for op in ops) == 2


@pytest.mark.parametrize("layer", [0, 1])
def test_result_can_go_to_a_buffer_of_its_own(transformer, layer):
    t = transformer("glm4moe")
    buffer = t.b.buffer("out", 8 * t.x_stride)
    target = Target(buffer, t.x_stride, add=False)
    ops, values = ops_of(t, RoutedFfn(t, norm="post_attention_norm", target=target), layer)
    names = ("moe_down", "moe_combine")
    written = [(v["x"], v["add"]) for op, v in zip(ops, values, strict=True) if op.name in names]
    # after the shared expert, which sets it in a step of many rows, the routed ones add
    assert written == ([] if layer == 0 else [(buffer, 0), (buffer, 1)])
