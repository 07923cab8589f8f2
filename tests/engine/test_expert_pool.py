"""The expert pool against the dequantised weights in float64, and its contract."""

import numpy as np
import pytest

import strata_jit
from strata_jit.gguf.quants import dequantize
from strata_jit.gguf.reader import open_gguf

RELATIVE_ERROR = 0.03
"""What 8-bit activations cost, relative to the result's norm."""


@pytest.fixture(scope="module")
def path(request_golden):
    return request_golden("qwen3moe-nl") / "model.gguf"


@pytest.fixture(scope="module")
def pool(path):
    with strata_jit.ExpertPool(path, max_tokens=8) as pool:
        yield pool


def expert_weights(path, layer, role, kind="weight"):
    """float64[n_expert, n_rows, n_cols]; of biases [n_expert, n]; 0 where there are none."""
    file = open_gguf(path)
    name = f"blk.{layer}.ffn_{role}_exps.{kind}"
    if name not in file.tensors:
        return np.zeros((file.tensor(name.replace("bias", "weight")).n_expert, 1))
    info = file.tensor(name)
    data = np.fromfile(file.parts[info.part], np.uint8, info.nbytes, offset=info.offset)
    rows = data.reshape(*info.shape[2:], info.n_rows, info.row_bytes)
    return dequantize(info.type, rows, info.n_cols).astype(np.float64)


def swiglu(g, u):
    return g / (1 + np.exp(-g)) * u


def swiglu_oai(g, u):
    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    return g / (1 + np.exp(-1.702 * g)) * (u + 1)


def expected(path, layer, x, ids, weights, resident=(), activation=swiglu):
    gate, up, down = (expert_weights(path, layer, role) for role in ("gate", "up", "down"))
    gate_b, up_b, down_b = (expert_weights(path, layer, role, "bias") for role in ("gate", "up", "down"))
    y = np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            if expert < 0 or expert in resident:
                continue
            ff = activation(gate[expert] @ row + gate_b[expert], up[expert] @ row + up_b[expert])
            y[t] += weight * (down[expert] @ ff + down_b[expert])
    return y


def batch(n, rng=None, n_expert=10, n_used=4, n_embd=256):
    rng = rng or np.random.default_rng(n)
    x = rng.standard_normal((n, n_embd)).astype(np.float32)
    ids = (
        np.stack([rng.permutation(n_expert)[:n_used] for _ in range(n)]) if n else np.zeros((0, n_used), int)
    )
    return x, ids, rng.uniform(0.1, 1, (n, n_used)).astype(np.float32)


def assert_close(found, truth):
    assert np.linalg.norm(found - truth) <= RELATIVE_ERROR * np.linalg.norm(truth)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_matches_float_weights(pool, path, n):
    x, ids, weights = batch(n)
    for layer in pool.layers:
        assert_close(pool.run(layer, x, ids, weights), expected(path, layer, x, ids, weights))


def test_one_row_and_many_give_the_same_bits(pool):
    x, ids, weights = batch(8)
    together = pool.run(1, x, ids, weights)
    for t in range(8):
        alone = pool.run(1, x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
        np.testing.assert_array_equal(alone[0], together[t])


def test_minus_one_contributes_nothing(pool, path):
    x, ids, weights = batch(3)
    ids[0, 1] = ids[2, 3] = -1
    assert_close(pool.run(0, x, ids, weights), expected(path, 0, x, ids, weights))
    np.testing.assert_array_equal(pool.run(0, x, np.full_like(ids, -1), weights), np.zeros_like(x))


def test_residents_are_not_served(path):
    resident = {0: {1, 4}, 2: range(10)}
    x, ids, weights = batch(4)
    ids[0, 0] = 1
    with strata_jit.ExpertPool(path, resident, max_tokens=4) as pool:
        truth = expected(path, 0, x, ids, weights, resident[0])
        assert_close(pool.run(0, x, ids, weights), truth)
        assert_close(pool.run(1, x, ids, weights), expected(path, 1, x, ids, weights))
        np.testing.assert_array_equal(pool.run(2, x, ids, weights), np.zeros_like(x))


FAMILIES = {"glm4moe": swiglu, "granitemoe": swiglu, "gpt-oss": swiglu_oai}


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families(request_golden, name):
    """Dense layers and shared experts are not the pool's; scales of the residual stream neither."""
    path = request_golden(name) / "model.gguf"
    with strata_jit.ExpertPool(path, {2: {0, 3}}, max_tokens=4) as pool:
        n_dense = open_gguf(path).get(f"{name}.leading_dense_block_count", int, 0)
        assert pool.layers[0] == n_dense
        x, ids, weights = batch(4, None, pool.n_expert, pool.n_expert_used, pool.n_embd)
        ids[0, 0] = 3
        for layer, resident in ((1, ()), (2, (0, 3))):
            truth = expected(path, layer, x, ids, weights, resident, FAMILIES[name])
            found = pool.run(layer, x, ids, weights)
            assert_close(found, truth)
            np.testing.assert_array_equal(pool.run(layer, x[:1], ids[:1], weights[:1])[0], found[0])


def test_slices_give_the_same_bits(pool, path):
    x, ids, weights = batch(5)
    with strata_jit.ExpertPool(path, numa_pool="test", test_slices=3, max_tokens=8) as split:
        np.testing.assert_array_equal(split.run(0, x, ids, weights), pool.run(0, x, ids, weights))


def test_host_can_work_between_submit_and_wait(pool):
    x, ids, weights = batch(2)
    truth = pool.run(0, x, ids, weights)
    pool.submit(0, x, ids, weights)
    x_copy = x.copy()
    x[:] = 0  # the pool has taken its own copy
    np.testing.assert_array_equal(pool.wait(), truth)
    np.testing.assert_array_equal(pool.run(0, x_copy, ids, weights), truth)


def test_no_tokens(pool):
    x, ids, weights = batch(0)
    assert pool.run(0, x, ids, weights).shape == (0, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 7}, "layer 7"),
        ({"ids": np.full((1, 4), 10)}, "expert id 10: expected 0 to 9"),
        ({"ids": np.full((1, 4), -2)}, "expert id -2"),
        ({"ids": np.zeros((1, 4))}, "dtype float64"),
        ({"x": np.zeros((1, 255), np.float32)}, r"x: found shape \(1, 255\), expected \(1, 256\)"),
        ({"weights": np.zeros((1, 3), np.float32)}, "weights: found shape"),
    ],
)
def test_wrong_arguments_are_refused(pool, change, message):
    x, ids, weights = batch(1)
    arguments = {"layer": 0, "x": x, "ids": ids, "weights": weights} | change
    with pytest.raises(strata_jit.UsageError, match=message):
        pool.run(**arguments)


def test_submit_and_wait_come_in_pairs(pool):
    x, ids, weights = batch(1)
    with pytest.raises(strata_jit.UsageError, match="nothing was submitted"):
        pool.wait()
    pool.submit(0, x, ids, weights)
    with pytest.raises(strata_jit.UsageError, match="was not waited for"):
        pool.submit(0, x, ids, weights)
    pool.wait()


def test_unknown_residents_are_refused(path):
    with pytest.raises(strata_jit.UsageError, match="resident expert 10"):
        strata_jit.ExpertPool(path, {0: [10]})
    with pytest.raises(strata_jit.UsageError, match="layer 9"):
        strata_jit.ExpertPool(path, {9: [0]})
