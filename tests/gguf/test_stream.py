"""Streaming: whole characters only, nothing for control tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata_jit.gguf.stream import StreamDecoder
from strata_jit.gguf.tokenizer import Tokenizer
from tests.gguf import vocabularies as make

END = 256
THINK = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    data = make.byte_level(["<|im_end|>", "<think>"], [make.CONTROL, make.USER_DEFINED])
    return Tokenizer.from_gguf(make.written(tmp_path_factory.mktemp("stream") / "vocab.gguf", data))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"ab", ["a", "b", ""]),
        ("é!".encode(), ["", "é", "!", ""]),
        ("😀".encode(), ["", "", "", "😀", ""]),
        ("😀".encode()[:3], ["", "", "", ""]),  # cut by the end: dropped
        (b"a\xff", ["a", "\ufffd", ""]),  # can never become a character
        (b"\xe2\x82a", ["", "", "\ufffda", ""]),
        (b"\x80", ["\ufffd", ""]),
    ],
)
def test_push_gives_whole_characters(tokenizer: Tokenizer, data: bytes, pieces: list[str]) -> None:
    assert streamed(tokenizer, list(data)) == pieces


def test_push_hides_control_tokens(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, [97, END, 98, END]) == ["a", "", "b", "", ""]
    assert streamed(tokenizer, [THINK, 97]) == ["<think>", "a", ""]


def test_flush_begins_anew(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(0xE2) == ""
    assert decoder.flush() == ""
    assert decoder.push(0x61) == "a"


@given(text=st.text(st.characters(codec="utf-8")))
def test_stream_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    pieces = streamed(tokenizer, tokenizer.encode(text, special=False))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(data=st.binary(max_size=30))
@example(data=b"\xed\xa0")
def test_stream_of_any_bytes_is_what_decode_gives(tokenizer: Tokenizer, data: bytes) -> None:
    text = "".join(streamed(tokenizer, list(data)))
    whole = tokenizer.decode(data)
    # The incomplete end is dropped: one U+FFFD, or two where it is the beginning of a surrogate, which
    # Python's incremental decoder takes for incomplete.
    assert whole in (text, text + "\ufffd", text + 2 * "\ufffd")
    assert text.encode().decode() == text


def test_smollm_emoji(data_dir: Path) -> None:
    tokenizer = Tokenizer.from_gguf(data_dir / "smollm2-vocab.gguf")
    pieces = streamed(tokenizer, tokenizer.encode("x😀y"))
    assert "".join(pieces) == "x😀y"
    assert "😀" in pieces
