"""Perplexity against llama.cpp's figures and against logits; divergences against their definition."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata_jit
from strata_jit.engine.kl_file import REST, BaseHeader, BaseReader, BaseWriter, Kept, keep
from strata_jit.engine.perplexity import divergence_from, log_softmax, measure, windows_of
from strata_jit.errors import StrataError, UsageError
from strata_jit.gguf.tokenizer import Tokenizer
from tests.engine.judge import kl as exact_kl
from tests.gguf import vocabularies as make

DATA = Path(__file__).parents[1] / "data"
TEXT = (DATA / "perplexity.txt").read_text("utf-8").removesuffix("\n")
LLAMA_CPP = json.loads((DATA / "perplexity.json").read_text())["cases"]
MODEL = DATA / "golden" / "qwen3moe-nl" / "model.gguf"
TOLERANCE = 0.005


@pytest.fixture(scope="module")
def model() -> Any:
    with strata_jit.load(MODEL, workers=1, ctx=128, chunk=50) as model:
        yield model


# --- against llama.cpp -------------------------------------------------------------------------------------


def check_against_llama_cpp(path: Path, case: dict[str, Any]) -> None:
    with strata_jit.load(path, ctx=case["ctx"]) as model:
        result = model.perplexity(TEXT, n_ctx=case["ctx"])
    assert result.n_windows == case["windows"]
    assert result.perplexity == pytest.approx(case["perplexity"], rel=TOLERANCE)
    assert result.perplexity_stderr == pytest.approx(case["stderr"], rel=4 * TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LLAMA_CPP if name.startswith("golden/")])
def test_small_model_is_as_in_llama_cpp(name: str) -> None:
    check_against_llama_cpp(DATA / name / "model.gguf", LLAMA_CPP[name])


@pytest.mark.slow
def test_real_model_is_as_in_llama_cpp(models_dir: Path) -> None:
    name = "smollm2-moe-iq4_xs.gguf"
    check_against_llama_cpp(models_dir / name, LLAMA_CPP[name])


# --- what is scored ----------------------------------------------------------------------------------------


def test_scores_are_those_of_the_logits(model: Any) -> None:
    ids = model.tokenizer.encode(TEXT)[:30]
    result = model.perplexity(ids, n_ctx=10)
    assert result.positions.tolist() == [6, 7, 8, 9, 16, 17, 18, 19, 26, 27, 28, 29]
    assert result.token_ids.tolist() == [ids[place] for place in result.positions]
    for start in (0, 10, 20):
        log_p = [log_softmax(row) for row in model.logits(ids[start : start + 10])]
        expected = [-log_p[i - 1][ids[start + i]] for i in range(6, 10)]
        places = slice(start // 10 * 4, start // 10 * 4 + 4)
        assert result.token_nll[places].tolist() == expected
    assert result.nll == pytest.approx(np.mean(result.token_nll))
    assert result.nll_stderr == pytest.approx(np.std(result.token_nll, ddof=1) / math.sqrt(12))
    assert result.perplexity == pytest.approx(math.exp(result.nll))


def test_same_bits_for_every_chunk_and_split(model: Any) -> None:
    with strata_jit.load(MODEL, workers=2, ctx=128, chunk=7, numa_pool="test", test_slices=2) as other:
        split = other.perplexity(TEXT[:2000], n_ctx=40)
    assert (model.perplexity(TEXT[:2000], n_ctx=40).token_nll == split.token_nll).all()


def test_windows_are_reported(model: Any) -> None:
    seen: list[tuple[int, int, float]] = []
    result = model.perplexity(TEXT[:600], n_ctx=64, on_window=lambda *values: seen.append(values))
    assert [(done, total) for done, total, _ in seen] == [
        (i + 1, result.n_windows) for i in range(result.n_windows)
    ]
    assert seen[-1][2] == pytest.approx(result.perplexity)


class Recorded:
    """Logits that say which tokens were read: the next token of each is token + 1."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab, self.calls = n_vocab, []

    def __call__(self, tokens: list[int], first: int) -> Any:
        self.calls.append(tokens)
        logits = np.zeros((len(tokens) - first, self.n_vocab + 3), np.float32)  # 3 rows of padding
        logits[np.arange(len(logits)), [token + 1 for token in tokens[first:]]] = 20
        return [logits[:1], logits[1:]]


def test_begin_token_takes_the_first_place(tmp_path: Path) -> None:
    data = make.byte_level(["<s>"], [make.CONTROL], bos_token_id=256, add_bos_token=True)
    tokenizer = Tokenizer.from_gguf(make.written(tmp_path / "v.gguf", data))
    logits = Recorded(257)
    result = measure(logits, tokenizer, list(range(20)), 8)
    assert logits.calls == [[256, *range(1, 7)], [256, *range(9, 15)]]
    assert (result.token_nll < 1e-5).all() and result.token_ids.tolist() == [5, 6, 7, 13, 14, 15]


def test_control_tokens_are_text(tmp_path: Path) -> None:
    from strata_jit.engine.perplexity import text_ids

    data = make.byte_level(["<s>"], [make.CONTROL], bos_token_id=256, add_bos_token=True)
    tokenizer = Tokenizer.from_gguf(make.written(tmp_path / "v.gguf", data))
    assert text_ids(tokenizer, "<s>a") == [256, *b"<s>a"]


@pytest.mark.parametrize("n_ctx", [3, 31])
def test_windows_of_refuses(n_ctx: int) -> None:
    with pytest.raises(UsageError):
        windows_of(range(30), n_ctx)


def test_window_beyond_the_context_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="at most the context, 128"):
        model.perplexity(TEXT, n_ctx=129)


# --- divergence --------------------------------------------------------------------------------------------


def test_model_is_no_way_from_itself(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "base"
    base = model.perplexity(TEXT[:1500], n_ctx=50, kl_base=path)
    same = model.perplexity(TEXT[:1500], kl=path, n_ctx=50)
    assert (same.token_nll == base.token_nll).all() and base.divergence is None
    kl = same.divergence
    assert kl.max < 1e-6 and kl.same_top == 1.0
    assert kl.base_nll == pytest.approx(base.nll, rel=1e-6)


def test_divergence_is_that_of_the_logits(model: Any, tmp_path: Path) -> None:
    path, ids = tmp_path / "base", model.tokenizer.encode(TEXT)[:40]
    with strata_jit.load(MODEL, workers=1, ctx=64, reference=True) as base:
        base.perplexity(ids, n_ctx=40, kl_base=path)
        p = base.logits(ids)[20:39]
    found = model.perplexity(ids, n_ctx=40, kl=path).divergence
    q = model.logits(ids)[20:39]
    exact = exact_kl(p, q)
    assert (found.kl <= exact + 1e-6).all()
    assert found.mean == pytest.approx(exact.mean(), rel=0.03)
    assert found.median == np.median(found.kl) and found.max == found.kl.max()
    assert found.same_top == np.mean(p.argmax(axis=1) == q.argmax(axis=1))


def test_keep_leaves_little_out() -> None:
    rng = np.random.default_rng(7)
    for scale in (0.0, 1.0, 5.0, 100.0):
        log_p = log_softmax((scale * rng.standard_normal(3000)).astype(np.float32))
        kept = keep(log_p, 7)
        mass = np.exp(kept.log_p.astype(np.float64)).sum()
        assert mass + 1e-6 >= 1 - REST and mass - np.exp(kept.log_p[-1]) < 1 - REST + 1e-6
        assert math.exp(kept.log_rest) == pytest.approx(1 - mass, abs=1e-6)
        assert kept.ids[0] == log_p.argmax() and (np.diff(kept.log_p) <= 0).all()
        assert kept.log_next == log_p[7]
        assert divergence_from(kept, log_p) < 1e-6


def test_others_count_as_one() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.25, 0.5])
    base = Kept(np.array([0], np.uint32), np.log(p[:1]).astype(np.float32), math.log(0.5), 0.0)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence_from(base, np.log(q)) == pytest.approx(expected, rel=1e-6)


HEADER = BaseHeader(9, "ab" * 32, np.arange(8, dtype=np.int32).reshape(2, 4))


def write(path: Path, n: int) -> None:
    with BaseWriter(path, HEADER) as writer:
        for i in range(n):
            ids = np.arange(i + 1, dtype=np.uint32)
            writer.write(Kept(ids, 0 - ids.astype(np.float32), -1.5 * i, -0.25))


def test_file_round_trip(tmp_path: Path) -> None:
    write(tmp_path / "b", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    with BaseReader(tmp_path / "b") as reader:
        assert (reader.header.n_vocab, reader.header.n_ctx) == (9, 4)
        assert (reader.header.tokens == HEADER.tokens).all()
        for i in range(3):
            kept = reader.read()
            assert kept.ids.tolist() == list(range(i + 1))
            assert kept.log_p.tolist() == [-float(j) for j in range(i + 1)]
            assert (kept.log_rest, kept.log_next) == (-1.5 * i, -0.25)
        with pytest.raises(UsageError, match="cut short"):
            reader.read()


def test_file_has_the_documented_layout(tmp_path: Path) -> None:
    write(tmp_path / "b", 1)
    data = (tmp_path / "b").read_bytes()
    head = b"STRATKL1" + np.array([9, 4, 2], "<u4").tobytes() + b"\xab" * 32 + HEADER.tokens.tobytes()
    record = np.array([1], "<u4").tobytes() + np.array([-0.0, -0.25], "<f4").tobytes()
    assert data == head + record + bytes(8)


def test_interrupted_file_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), BaseWriter(tmp_path / "b", HEADER):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [0, 1, 10_000])
def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Whether the system refuses at the first bytes, at those of a position, or at the end."""
    writer = BaseWriter(tmp_path / "b", HEADER)
    writer._file.close()
    writer._file = open("/dev/full", "wb", buffering=0 if n == 0 else 8192)  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left on device.*/b'"), writer:
        for _ in range(n):
            writer.write(Kept(np.zeros(1, np.uint32), np.zeros(1, np.float32), -math.inf, 0.0))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "", "/dev/null"):
        with pytest.raises(UsageError, match="not a regular file"):
            BaseWriter(path, HEADER)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_file_behind_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "b")
    write(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    BaseReader(tmp_path / "b")._file.close()


@pytest.mark.parametrize(
    ("log_p", "log_rest", "log_next"),
    [(-math.inf, -1, -1), (math.nan, -1, -1), (-1, 1000, -1), (-1, math.nan, -1), (-1, -1, math.nan)],
)
def test_position_of_no_distribution_is_refused(
    tmp_path: Path, log_p: float, log_rest: float, log_next: float
) -> None:
    with BaseWriter(tmp_path / "b", HEADER) as writer:
        writer.write(Kept(np.zeros(1, np.uint32), np.full(1, log_p, np.float32), log_rest, log_next))
    with BaseReader(tmp_path / "b") as reader, pytest.raises(UsageError, match="no distribution"):
        reader.read()


def test_output_that_is_no_number_is_refused(model: Any) -> None:
    rows = np.full((1, 31, model.tokenizer.n_vocab), np.nan, np.float32)
    ids = model.tokenizer.encode(TEXT[:2000])
    with pytest.raises(StrataError, match="the model's output is not a number"):
        measure(lambda tokens, first: rows, model.tokenizer, ids, 64)


def test_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write the base: .*none"):
        BaseWriter(tmp_path / "none" / "b", HEADER)


@pytest.mark.parametrize("data", [b"", b"STRATKL1", b"x" * 100, b"STRATKL1" + b"\xff" * 60])
def test_other_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "b").write_bytes(data)
    with pytest.raises(UsageError, match="expected one that --kl-base wrote"):
        BaseReader(tmp_path / "b")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the base"):
        BaseReader(tmp_path / "b")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (BaseHeader(8, "ab" * 32, HEADER.tokens), "another vocabulary"),
        (BaseHeader(9, "cd" * 32, HEADER.tokens), "another vocabulary"),
        (BaseHeader(9, "ab" * 32, HEADER.tokens.reshape(1, 8)), "give --ctx 4"),
        (BaseHeader(9, "ab" * 32, HEADER.tokens[:1]), "another text"),
        (BaseHeader(9, "ab" * 32, HEADER.tokens + 1), "another text"),
    ],
)
def test_other_base_is_refused(other: BaseHeader, message: str) -> None:
    HEADER.check(HEADER, Path("b"))
    with pytest.raises(UsageError, match=message):
        HEADER.check(other, Path("b"))
