"""Rotary frequencies and magnitudes: linear scaling, YaRN, frequency factors; correctly rounded."""

import math

import numpy as np
import pytest

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.deepseek2 import score_scale
from strata_jit.models.gpt_oss import check_base, sliding_windows
from strata_jit.models.rotary import Rope, Yarn, inverse_frequencies, magnitude, read_rope, yarn_scale

GPT_OSS = {
    "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}


def file_of(keys):
    """A file of architecture x with nothing but metadata."""
    metadata = {"general.architecture": "x", "x.context_length": 131072}
    metadata |= {f"x.{key}": value for key, value in keys.items()}
    return GGUFFile(path="m.gguf", parts=("m.gguf",), version=3, alignment=32, metadata=metadata, tensors={})


def yarn_f64(base, n, factor, n_ctx, fast, slow, ext):
    """The definition in float64, with NumPy's own functions."""
    i = np.arange(n // 2)
    plain = base ** (-2.0 * i / n)
    low, high = (n * math.log(n_ctx / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), n - 1)
    mix = (1 - np.clip((i - low) / max(high - low, 0.001), 0, 1)) * ext
    return plain / factor * (1 - mix) + plain * mix


def test_frequencies_without_scaling():
    expected = 10000.0 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(inverse_frequencies(Rope(128, 10000.0)), expected, rtol=1e-15)
    assert inverse_frequencies(Rope(4, 10000.0)).tolist() == [1.0, 0.01]


def test_frequencies_linear_and_with_factors():
    plain = inverse_frequencies(Rope(8, 10000.0))
    np.testing.assert_array_equal(inverse_frequencies(Rope(8, 10000.0, factor=4.0)), plain / 4)
    factors = [1.0, 2.0, 4.0, 8.0]
    np.testing.assert_array_equal(inverse_frequencies(Rope(8, 10000.0), factors), plain / factors)


@pytest.mark.parametrize(
    ("base", "n", "factor", "n_ctx", "fast", "slow", "ext"),
    [
        (150000.0, 64, 32.0, 4096, 32.0, 1.0, 1.0),
        (10000.0, 32, 40.0, 4096, 32.0, 1.0, 1.0),
        (10000.0, 64, 40.0, 4096, 32.0, 1.0, 0.5),
        (1e6, 128, 4.0, 32768, 32.0, 1.0, 1.0),
        (10000.0, 64, 8.0, 4096, 1.0, 1.0, 1.0),
        (10000.0, 64, 8.0, 2, 32.0, 1.0, 1.0),
        (10000.0, 64, 8.0, 4096, 32.0, 1.0, 0.0),
    ],
)
def test_frequencies_of_yarn(base, n, factor, n_ctx, fast, slow, ext):
    found = inverse_frequencies(Rope(n, base, factor, yarn=Yarn(n_ctx, fast, slow, ext)))
    np.testing.assert_allclose(found, yarn_f64(base, n, factor, n_ctx, fast, slow, ext), rtol=1e-14)


def test_yarn_keeps_fast_dimensions_and_interpolates_slow_ones():
    rope = read_rope(file_of(GPT_OSS), 64)
    found, plain = inverse_frequencies(rope), inverse_frequencies(Rope(64, 150000.0))
    np.testing.assert_array_equal(found[:8], plain[:8])
    np.testing.assert_array_equal(found[20:], plain[20:] / 32)
    assert (np.diff(found) < 0).all()


def test_magnitudes():
    rope = read_rope(file_of(GPT_OSS), 64)
    assert magnitude(rope) == pytest.approx(1 + 0.1 * math.log(32), rel=1e-15)
    doubled = read_rope(file_of(GPT_OSS | {"rope.scaling.attn_factor": 2.0}), 64)
    assert magnitude(doubled) == 2 * magnitude(rope)
    assert magnitude(read_rope(file_of(GPT_OSS | {"rope.scaling.yarn_ext_factor": 0.0}), 64)) == 1
    assert magnitude(read_rope(file_of({"rope.scaling.factor": 4.0}), 64)) == 1
    assert yarn_scale(1.0, 0.1) == yarn_scale(0.5, 0.1) == 1


def test_scores_of_deepseek():
    """With a log multiplier the magnitude of cosines and sines is 1 and the scores have it, squared."""
    rope = Rope(64, 10000.0, 40.0, yarn=Yarn(4096))
    expected = (1 + 0.1 * math.log(40)) ** 2 / math.sqrt(192)
    assert score_scale(rope, 1.0, 0.1, 192) == pytest.approx(expected, rel=1e-15)
    assert score_scale(rope, magnitude(rope), 0.0, 192) == pytest.approx(expected, rel=1e-15)
    assert score_scale(Rope(64, 10000.0), 1.0, 0.0, 192) == pytest.approx(192**-0.5, rel=1e-15)


def test_read_rope_defaults():
    assert read_rope(file_of({}), 64) == Rope(64, 10000.0)
    assert read_rope(file_of({"rope.scaling.factor": 4.0}), 64) == Rope(64, 10000.0, 4.0)
    assert read_rope(file_of({"rope.scale_linear": 4.0}), 64) == Rope(64, 10000.0, 4.0)
    none = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    assert read_rope(file_of(none), 64) == Rope(64, 10000.0)
    without_context = {k: v for k, v in GPT_OSS.items() if "original" not in k}
    assert read_rope(file_of(without_context), 64).yarn == Yarn(131072)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "longrope"),
        ("rope.freq_base", 1.0),
        ("rope.freq_base", float("nan")),
        ("rope.scaling.factor", 0.0),
        ("rope.scaling.factor", float("inf")),
        ("rope.scaling.attn_factor", -1.0),
        ("rope.scaling.original_context_length", 0),
        ("rope.scaling.original_context_length", -4096),
        ("rope.scaling.yarn_beta_fast", 0.0),
        ("rope.scaling.yarn_beta_slow", float("nan")),
        ("rope.scaling.yarn_ext_factor", 1.5),
    ],
)
def test_read_rope_refuses(key, value):
    with pytest.raises(ModelError, match=f"x.{key}"):
        read_rope(file_of(GPT_OSS | {key: value}), 64)


WINDOW = "attention.sliding_window"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({WINDOW: 128}, [0, 2, 4]),
        ({WINDOW: 128, f"{WINDOW}_pattern": 3}, [0, 1, 3, 4]),
        ({WINDOW: 128, f"{WINDOW}_pattern": 1}, []),
        ({WINDOW: 128, f"{WINDOW}_pattern": 0}, [0, 1, 2, 3, 4]),
        ({WINDOW: 128, f"{WINDOW}_pattern": np.array([True, False, False, True, True])}, [0, 3, 4]),
        ({WINDOW: 0}, []),
    ],
)
def test_sliding_windows(keys, expected):
    assert sliding_windows(file_of(keys), "x", 5) == dict.fromkeys(expected, 128)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {WINDOW: -1},
        {WINDOW: 128, f"{WINDOW}_pattern": -2},
        {WINDOW: 128, f"{WINDOW}_pattern": "even"},
        {WINDOW: 128, f"{WINDOW}_pattern": np.array([True])},
    ],
)
def test_sliding_windows_refuses(keys):
    with pytest.raises(ModelError, match=WINDOW):
        sliding_windows(file_of(keys), "x", 5)


def test_another_base_for_windows_is_refused():
    check_base(file_of({"rope.freq_base": 150000.0, "rope.freq_base_swa": 150000.0}), "x")
    with pytest.raises(ModelError, match="freq_base_swa"):
        check_base(file_of({"rope.freq_base": 150000.0, "rope.freq_base_swa": 10000.0}), "x")
