"""Variants of files that concern attention: frequency factors, scaling, DeepSeek's lite and older forms."""

import gguf
import numpy as np
import pytest

import strata_jit
from tests.engine.judge import kl
from tests.engine.rewrite import quantized, read_tensors, write

TOKENS = list(range(7, 31))


def logits(path, **options):
    with strata_jit.load(path, ctx=32, chunk=16, **options) as model:
        return model.logits(TOKENS)


class Source:
    """A golden model to be changed."""

    def __init__(self, folder):
        self.path = folder / "model.gguf"
        self.tensors = read_tensors(self.path)

    def write(self, path, tensors=None, keys=None):
        return write(path, self.path, self.tensors if tensors is None else tensors, keys or {})


@pytest.fixture(scope="module")
def llama(request_golden):
    return Source(request_golden("llama"))


@pytest.fixture(scope="module")
def deepseek2(request_golden):
    return Source(request_golden("deepseek2"))


def with_factors(source, factors):
    data = np.asarray(factors, np.float32)
    return source.tensors | {"rope_freqs.weight": (gguf.GGMLQuantizationType.F32, data, [len(data)])}


def test_frequency_factors_divide_frequencies(tmp_path, llama):
    """Factors of 2 throughout are linear scaling by 2; factors of 1 are none."""
    n = 16
    ones = logits(llama.write(tmp_path / "ones.gguf", with_factors(llama, np.ones(n))))
    np.testing.assert_array_equal(ones, logits(llama.path))
    twos = logits(llama.write(tmp_path / "twos.gguf", with_factors(llama, np.full(n, 2))))
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    np.testing.assert_array_equal(twos, logits(llama.write(tmp_path / "linear.gguf", keys=keys)))
    assert (twos != ones).any()


@pytest.mark.parametrize("factors", [np.ones(15), np.zeros(16), np.full(16, np.nan), -np.ones(16)])
def test_odd_frequency_factors_are_refused(tmp_path, llama, factors):
    path = llama.write(tmp_path / "odd.gguf", with_factors(llama, factors))
    with pytest.raises(strata_jit.ModelError, match=r"rope_freqs\.weight"):
        strata_jit.load(path)


def test_deepseek_lite_has_no_latent_of_queries(tmp_path, deepseek2):
    rng = np.random.default_rng(0)
    tensors = {k: v for k, v in deepseek2.tensors.items() if ".attn_q_" not in k}
    tensors |= {f"blk.{i}.attn_q.weight": quantized(rng, "Q5_K", (384, 256), scale=0.06) for i in range(3)}
    keys = {"deepseek2.attention.q_lora_rank": None, "deepseek2.expert_gating_func": None}
    path = deepseek2.write(tmp_path / "lite.gguf", tensors, keys)
    fast = logits(path)
    assert kl(logits(path, reference=True), fast).mean() < 0.05
    np.testing.assert_array_equal(logits(path, numa_pool="test", test_slices=2, workers=1), fast)


def test_deepseek_of_the_older_form_is_refused(tmp_path, deepseek2):
    tensors = {k: v for k, v in deepseek2.tensors.items() if "attn_k_b" not in k and "attn_v_b" not in k}
    rng = np.random.default_rng(0)
    tensors |= {f"blk.{i}.attn_kv_b.weight": quantized(rng, "Q8_0", (512, 256)) for i in range(3)}
    path = deepseek2.write(tmp_path / "old.gguf", tensors)
    with pytest.raises(strata_jit.ModelError, match=r"attn_kv_b.*convert the model again"):
        strata_jit.load(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.head_count_kv": 4}, "head_count_kv: found 4, expected 1"),
        ({"attention.key_length": 192}, "key_length: found 192, expected 288"),
        ({"attention.key_length_mla": None}, "key_length_mla"),
        ({"attention.key_length_mla": 32}, "key_length_mla: found 0"),
        ({"attention.value_length_mla": 60}, "value_length_mla: found 60"),
        ({"rope.scaling.type": "linear"}, "scaling.type"),
        ({"rope.scaling.yarn_log_multiplier": float("nan")}, "yarn_log_multiplier"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_deepseek_of_another_geometry_is_refused(tmp_path, deepseek2, keys, message):
    path = deepseek2.write(tmp_path / "odd.gguf", keys={f"deepseek2.{k}": v for k, v in keys.items()})
    with pytest.raises(strata_jit.ModelError, match=message):
        strata_jit.load(path)
