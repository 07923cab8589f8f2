"""Quantisers of weights: compiled against twin bit for bit, and their errors beside llama.cpp's."""

import gguf
import numpy as np
import pytest

from strata_jit.gguf.quants import dequantize
from strata_jit.gguf.types import GGMLType
from strata_jit.kernels.quantizers import LARGEST, TYPES, WORK_BYTES, quantizer
from strata_jit.kernels.ref.quantizers import quantize
from tests.kernels.quantizer_data import KINDS, REFERENCE, relative_rmse, weights
from tests.kernels.quantizer_data import TYPES as COMPARED

GUARD = 0xA5
BLOCKS = [name for name in TYPES if GGMLType[name].block_size > 1]


def run(name, x):
    """(result, rows as the kernel wrote them, sums of squares and of squared errors)."""
    kind = GGMLType[name]
    memory = np.full(x.size // kind.block_size * kind.type_size + 64, GUARD, np.uint8)
    work = np.zeros(WORK_BYTES // 8)
    result = quantizer(name)(
        x.ctypes.data, x.size // kind.block_size, memory.ctypes.data, work.ctypes.data
    )
    assert (memory[-64:] == GUARD).all()
    return result, memory[:-64].reshape(len(x), -1), work[:2]


def values(name, rows, n_cols):
    return dequantize(GGMLType[name], rows, n_cols)


def awkward():
    """float32[n, 256]: rows that reach the ends of scales, codes and f16."""
    rng = np.random.default_rng(11)
    noise = rng.standard_normal(256)
    columns = np.arange(256)
    rows = [
        np.zeros(256),
        np.full(256, -0.0),
        np.where(columns == 100, 1.0, 0.0),
        np.where(columns < 32, 0.0, noise),  # an empty sub-block
        noise * np.where(columns // 32 == 3, 1.0, 1e-6),  # scales that round to 0
        np.where(columns % 2 == 0, 1.0, -1.0),  # the peak has both signs
        np.linspace(-1, 1, 256),
        np.full(256, 3e-8),  # just above and below what f16 can scale
        np.full(256, 2.9e-8),
        np.full(256, 1e-30),
        noise * 1e-7,
        noise * 1e-40,
        np.clip(noise, -1, 1) * 7e6,  # d beyond f16 for IQ4_NL and Q8_0, were it not for the limit
        np.where(columns == 7, 1e6, noise),
        (columns - 128) / 128,
        np.where(columns % 16 == 0, -1.0, 31 / 32),
    ]
    return np.ascontiguousarray(rows, np.float32)


@pytest.mark.parametrize("name", TYPES)
def test_quantizer_matches_ref_on_awkward_rows(name):
    x = awkward()
    if name == "F16":
        x = np.clip(x, -65504, 65504)
    result, rows, _ = run(name, x)
    assert result == -1
    np.testing.assert_array_equal(rows, quantize(name, x))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "huge"])
@pytest.mark.parametrize("name", TYPES)
def test_quantizer_matches_ref(name, kind):
    x = weights(kind)[:12]
    result, rows, sums = run(name, x)
    assert result == -1
    np.testing.assert_array_equal(rows, quantize(name, x))
    wrong = x.astype(np.float64) - values(name, rows, x.shape[1])
    np.testing.assert_allclose(sums, [(x.astype(np.float64) ** 2).sum(), (wrong**2).sum()], rtol=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_largest_values_are_held(name):
    """The limit itself, with either sign, comes out finite, and as close as the codes allow."""
    for sign in (1, -1):
        x = np.full((1, 256), sign * LARGEST[name], np.float32)
        x[0, ::2] = np.nextafter(np.float32(0), np.float32(sign))
        result, rows, _ = run(name, x)
        assert result == -1
        np.testing.assert_array_equal(rows, quantize(name, x))
        np.testing.assert_allclose(values(name, rows, 256)[0, 1::2], x[0, 1::2], rtol=0.01)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, "beyond"])
@pytest.mark.parametrize("name", TYPES)
def test_values_that_cannot_be_held_are_found(name, bad):
    if bad == "beyond" and name == "F32":
        pytest.skip("nothing is beyond float32")
    if bad == "beyond":
        bad = np.nextafter(np.float32(LARGEST[name]), np.float32(np.inf))
    for at in (0, 31, 256, 300, 767):
        x = np.full((3, 256), 0.5, np.float32)
        x.reshape(-1)[at] = bad
        assert run(name, x)[0] == at


def test_nothing_is_nothing():
    for name in TYPES:
        result, rows, sums = run(name, np.zeros((1, 0), np.float32))
        assert (result, rows.size, sums.tolist()) == (-1, 0, [0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_no_larger_than_those_of_llama_cpp(kind):
    x = weights(kind)
    for name, reference in zip(COMPARED, REFERENCE[kind], strict=True):
        _, rows, _ = run(name, x)
        assert relative_rmse(x, values(name, rows, x.shape[1])) <= reference, name


@pytest.mark.parametrize("name", BLOCKS)
def test_what_the_type_can_hold_comes_back(name):
    """Values that are on the codes of one scale each, as after another quantisation, are found again."""
    rng = np.random.default_rng(3)
    kind = gguf.GGMLQuantizationType[name]
    codes = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    if name.startswith("IQ4"):
        x = codes[rng.permuted(np.tile(np.arange(16), (8, 16)), axis=1)] / 64
    elif name == "Q6_K":
        x = rng.integers(-32, 32, (8, 256)) / 64
        x[:, ::16] = -0.5
    else:
        x = rng.integers(-127, 128, (8, 256)) / 64
        x[:, ::32] = 127 / 64
    x = np.ascontiguousarray(x, np.float32)
    _, rows, sums = run(name, x)
    assert sums[1] <= 1e-7 * sums[0]  # d, or d times a sub-scale, need not be a float exactly
    np.testing.assert_array_equal(gguf.quants.dequantize(rows, kind), values(name, rows, 256))


def test_float_types_round_as_numpy_and_gguf_do():
    x = np.concatenate([weights("student_t"), weights("tiny")])
    np.testing.assert_array_equal(run("F16", x)[1].view(np.float16), x.astype(np.float16))
    np.testing.assert_array_equal(
        run("BF16", x)[1], gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16)
    )
    np.testing.assert_array_equal(run("F32", x)[1].view(np.float32), x)
