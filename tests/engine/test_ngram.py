"""Which rows of an n-gram table a token gets: against plain integers, and whatever the steps."""

from types import SimpleNamespace

import numpy as np
import pytest

from strata_jit.engine.ngram import NgramRows, row_ids
from strata_jit.gguf.quants import dequantize
from strata_jit.gguf.tensors import TensorInfo
from strata_jit.gguf.types import GGMLType
from strata_jit.models.language_model import NgramTable

EOS = 2
MASK = 2**64 - 1


def table(multipliers, per_ngram=2, sizes=None, rows=None):
    """`sizes`: of the heads; else primes near a thousand."""
    n_head = (len(multipliers) - 1) * per_ngram
    sizes = sizes or (997, 1009, 1013, 1019, 1021, 1031)[:n_head]
    offsets = tuple(int(n) for n in np.cumsum([0, *sizes])[:-1])
    return NgramTable(
        rows=rows or TensorInfo("t", (8, sum(sizes)), GGMLType.F32, 0, 0, 32 * sum(sizes)),
        buffer=0, stride=0, multipliers=multipliers, head_offsets=offsets, head_vocab_sizes=tuple(sizes),
        eos=EOS,
    )  # fmt: skip


def plain(table, tokens, position):
    """Rows of one token, in Python's own integers."""
    window = [tokens[position]]
    for back in range(1, table.ngram_size):
        before = tokens[position - back] if position >= back else EOS
        window.append(EOS if EOS in window[1:] else before)
    rows, per_ngram = [], len(table.head_offsets) // (table.ngram_size - 1)
    for n in range(2, table.ngram_size + 1):
        number = 0
        for token, multiplier in zip(window[:n], table.multipliers, strict=False):
            number ^= token * multiplier & MASK
        for head in range((n - 2) * per_ngram, (n - 1) * per_ngram):
            rows.append(number % table.head_vocab_sizes[head] + table.head_offsets[head])
    return rows


SMALL = table((5785490113355, 10390223290163, 4605856429559))
WRAPPING = table((2**64 - 1, 2**63 + 12345678901234567, 0x9E3779B97F4A7C15))
PAIRS = table((3, 2**64 - 59), per_ngram=3)
FOURS = table((7, 2**61 - 1, 2**53 + 1, 2**64 - 3), per_ngram=1)


@pytest.mark.parametrize("t", [SMALL, WRAPPING, PAIRS, FOURS])
@pytest.mark.parametrize("kind", ["random", "many ends", "only ends", "largest"])
def test_rows_are_those_of_plain_integers(t, kind):
    rng = np.random.default_rng(1)
    tokens = {
        "random": rng.integers(0, 250_000, 200),
        "many ends": rng.choice([EOS, 5, 77, 200_001], 200),
        "only ends": np.full(9, EOS),
        "largest": np.full(9, 2**31 - 1),
    }[kind].tolist()
    expected = [plain(t, tokens, p) for p in range(len(tokens))]
    np.testing.assert_array_equal(row_ids(t, [], tokens), np.array(expected, np.uint64))


def test_the_products_do_wrap():
    """Else the test above would hold no wrapping."""
    assert 250_000 * WRAPPING.multipliers[1] > MASK


@pytest.mark.parametrize("t", [SMALL, PAIRS, FOURS])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 17])
def test_steps_give_the_rows_of_the_whole(t, cut):
    tokens = np.random.default_rng(2).choice([EOS, 5, 77, 9000], 40).tolist()
    whole = row_ids(t, [], tokens)
    parts = [row_ids(t, tokens[:i], tokens[i : i + cut]) for i in range(0, len(tokens), cut)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    late = [row_ids(t, tokens[max(i - 3, 0) : i], tokens[i : i + cut]) for i in range(0, len(tokens), cut)]
    np.testing.assert_array_equal(np.concatenate(late), whole)


def test_an_end_of_turn_hides_what_is_before_it_but_not_itself():
    same = row_ids(SMALL, [8, 9, EOS], [5, 6])
    np.testing.assert_array_equal(same, row_ids(SMALL, [1, EOS], [5, 6]))
    np.testing.assert_array_equal(same, row_ids(SMALL, [], [5, 6]))
    assert (row_ids(SMALL, [5, 6], [EOS]) != row_ids(SMALL, [5, 7], [EOS])).all()


def test_sizes_and_offsets_beyond_32_bits():
    t = table((2**64 - 1, 3), per_ngram=2, sizes=(2**33 + 17, 2**34 + 25))
    expected = np.array(plain(t, [11, 12, 13], 2), np.uint64)
    np.testing.assert_array_equal(row_ids(t, [11], [12, 13])[1], expected)


def test_rows_are_read_from_the_file_and_put_side_by_side(tmp_path):
    rng = np.random.default_rng(3)
    sizes = (13, 17, 11, 19)
    blocks = rng.integers(0, 256, (sum(sizes), 34), np.uint8)
    blocks[:, :2] = np.float16(0.5).tobytes()[0], np.float16(0.5).tobytes()[1]
    path = tmp_path / "rows"
    path.write_bytes(b"header" + blocks.tobytes())
    info = TensorInfo("t", (32, sum(sizes)), GGMLType.Q8_0, 0, 6, blocks.nbytes)
    t = table((2**63 + 5, 77, 2**40 + 1), sizes=sizes, rows=info)
    rows = NgramRows(SimpleNamespace(parts=[path]), t)
    tokens, out = [4, 5, EOS, 6], np.full((4, 4 * 32 + 8), np.nan, np.float32)
    rows.fill([9], tokens, out)
    values = dequantize(GGMLType.Q8_0, blocks, 32)
    expected = values[row_ids(t, [9], tokens).astype(np.int64)].reshape(4, -1)
    np.testing.assert_array_equal(out[:, :128], expected)
    assert np.isnan(out[:, 128:]).all()
    rows.close()
    rows.close()
