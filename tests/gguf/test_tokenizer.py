"""Text to ids and back: against llama.cpp's ids, and case by case on small vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jit.errors import ModelError, UsageError
from strata_jit.gguf.pretokenizers import PRE_TOKENIZERS, word_splitter
from strata_jit.gguf.reader import open_gguf
from strata_jit.gguf.tokenizer import Tokenizer
from tests.gguf import vocabularies as make
from tests.gguf.vocabularies import CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "tokenizer.json").read_text())["cases"]
TokenizerMaker = Callable[[bytes], Tokenizer]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_gguf(DATA / "smollm2-vocab.gguf")


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    data = make.byte_level(merges=["Ġ a", "a b", "b a", "Ġ Ġ", "1 2"])
    return Tokenizer.from_gguf(make.written(tmp_path_factory.mktemp("letters") / "vocab.gguf", data))


@pytest.fixture
def tokenizer_of(tmp_path: Path) -> TokenizerMaker:
    return lambda data: Tokenizer.from_gguf(make.written(tmp_path / "vocab.gguf", data))


# Against llama.cpp


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: repr(case["text"])[:40])
def test_smollm_matches_golden(smollm: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm.encode(case["text"]) == case["ids"]
    assert smollm.encode(case["text"], special=False) == case["ids_plain"]


def test_model_matches_golden(golden_dir: Path, models_dir: Path) -> None:
    tokenizer = Tokenizer.from_gguf(models_dir / "smollm2-moe-iq4_xs.gguf")
    for case in json.loads((golden_dir / "tokenizer.json").read_text())["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], special=False) == case["ids_plain"], case["text"]


def test_all_vocabularies_match(tokenizers_dir: Path) -> None:
    n_strings = 0
    for path in sorted(tokenizers_dir.glob("*.gguf")):
        tokenizer = Tokenizer.from_gguf(path)
        inputs = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        outputs = Path(f"{path}.out").read_text().split("\n")
        assert len(inputs) == len(outputs)
        for text, line in zip(inputs, outputs, strict=True):
            ids = [int(token_id) for token_id in line.split()]
            assert tokenizer.encode(text, special=False, bos=False) == ids, (path.name, text)
            assert tokenizer.decode(ids) == text, (path.name, text)
            n_strings += 1
    assert n_strings > 0


# Special tokens and the beginning


SPECIAL = make.byte_level(
    ["<s>", "<|end|>", "<|end|>x", "<a>", "<?>"],
    [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, UNKNOWN],
    bos_token_id=256,
)
BOS, END, END_X, USER, UNK = range(256, 261)


def plain(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("text", "ids", "ids_plain"),
    [
        ("", [], []),
        ("a<s>b", [97, BOS, 98], plain("a<s>b")),
        ("<s><s>", [BOS, BOS], plain("<s><s>")),
        ("<<s>", [60, BOS], plain("<<s>")),
        ("a<a>b", [97, USER, 98], [97, USER, 98]),
        ("<|end|>x", [END_X], [END_X]),
        ("<|end|>y", [END, 121], plain("<|end|>y")),
        ("<|en", plain("<|en"), plain("<|en")),
        ("<?>", [UNK], plain("<?>")),
    ],
)
def test_encode_special(
    tokenizer_of: TokenizerMaker, text: str, ids: list[int], ids_plain: list[int]
) -> None:
    tokenizer = tokenizer_of(SPECIAL)
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, special=False) == ids_plain
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("keys", "added"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_encode_bos_follows_file(tokenizer_of: TokenizerMaker, keys: dict[str, Any], added: bool) -> None:
    tokenizer = tokenizer_of(make.byte_level(["<s>"], [CONTROL], bos_token_id=256, **keys))
    assert tokenizer.add_bos is added
    assert tokenizer.encode("a") == [256, 97] if added else [97]
    assert tokenizer.encode("a", bos=True) == [256, 97]
    assert tokenizer.encode("a", bos=False) == [97]


def test_encode_bos_is_not_doubled_unless_asked(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.byte_level(["<s>"], [CONTROL], bos_token_id=256, add_bos_token=True))
    assert tokenizer.encode("<s>a") == [256, 97]
    assert tokenizer.encode("<s>a", bos=True) == [256, 256, 97]
    assert tokenizer.encode("<s>", special=False) == [256, *plain("<s>")]
    assert tokenizer.encode("") == [256]


def test_encode_raises_on_bos_of_model_without(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.byte_level())
    assert tokenizer.bos_id is None
    with pytest.raises(UsageError, match="no begin-of-text token"):
        tokenizer.encode("a", bos=True)


def test_encode_raises_on_text_that_is_no_utf8(smollm: Tokenizer) -> None:
    with pytest.raises(UsageError, match="not valid UTF-8 at character 2"):
        smollm.encode("ab\udcff")


# Merges and decoding


def test_encode_merges_by_rank(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.byte_level(merges=["b c", "a b", "a bc", "Ġ a"]))
    assert tokenizer.encode("abc ab a") == [258, 32, 257, 259]


def test_encode_raw_words(tokenizer_of: TokenizerMaker) -> None:
    """Gemma 4's kind: no byte letters, spaces as U+2581, lines cut apart, bytes for other characters."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*bytes_, "<s>", SPACE, "a", "b", "\n", f"{SPACE}a", "\n\n", f"a{SPACE}a", "é"]
    types = [*[make.BYTE] * 256, CONTROL, *[NORMAL] * 8]
    merges = [f"{SPACE} a", "\n \n", f"a {SPACE}a"]
    keys = {"bos_token_id": 256, "add_bos_token": True}
    tokenizer = tokenizer_of(make.vocabulary(tokens, types, merges, model="gemma4", **keys))
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    expected = [f"a{SPACE}a", "\n\n", f"{SPACE}a", "é", "<0xC3>", "<0xBC>", SPACE, SPACE]
    assert tokenizer.encode("a a\n\n aéü  ") == [256, *(ids[token] for token in expected)]
    assert tokenizer.decode(tokenizer.encode("a a\n\n aéü  "), skip_special=True) == "a a\n\n aéü  "
    same = make.vocabulary(tokens, types, merges, model="gpt2", pre="sarvam-moe", **keys)
    assert tokenizer_of(same).encode(" aü") == tokenizer.encode(" aü")


def test_encode_whole_words_before_merges(tokenizer_of: TokenizerMaker) -> None:
    word = {"extra": ["abc"], "types": [NORMAL], "merges": ["b c"]}
    assert tokenizer_of(make.byte_level(**word)).encode("abc") == [97, 256]
    assert tokenizer_of(make.byte_level(**word, pre="glm4")).encode("abc") == [257]


def test_merges_of_no_token_are_left_out(tokenizer_of: TokenizerMaker) -> None:
    data = make.vocabulary(
        make.byte_letters(), [NORMAL] * 256, merges=["a b", "xy z"], model="gpt2", pre="gpt-2"
    )
    assert tokenizer_of(data).encode("ab") == [97, 98]


def test_bytes_without_token_are_dropped(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.vocabulary(["a", "b"], merges=["a b"], model="gpt2", pre="gpt-2"))
    assert tokenizer.encode("a\u00e9b") == [0, 1]


@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_byte_level_round_trip(letters: Tokenizer, text: str) -> None:
    assert letters.decode(letters.encode(text, special=False)) == text


def test_token_bytes(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.byte_level(["é<", "ab ▁", "<0x41>"], [CONTROL, NORMAL, make.BYTE]))
    assert tokenizer.n_vocab == 259
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes(256) == "é<".encode()
    assert tokenizer.token_bytes(257) == "ab ▁".encode()  # holds characters that are no byte letters
    assert tokenizer.token_bytes(258) == b"A"
    for token_id in (-1, 259):
        with pytest.raises(UsageError, match="not in the vocabulary of 259 tokens"):
            tokenizer.token_bytes(token_id)


def test_decode(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user\nÜber 😀<|im_end|>")
    assert smollm.decode(ids) == "<|im_start|>user\nÜber 😀<|im_end|>"
    assert smollm.decode(ids, skip_special=True) == "user\nÜber 😀"
    assert smollm.decode(smollm.encode("😀")[:-1]) == "\ufffd"
    assert smollm.decode([]) == ""


# Ends of generation


def test_eog_of_smollm(smollm: Tokenizer) -> None:
    assert {smollm.token_text(token_id) for token_id in smollm.eog_ids} == {"<|endoftext|>", "<|im_end|>"}
    assert (smollm.bos_id, smollm.eos_id, smollm.add_bos) == (1, 2, False)


@pytest.mark.parametrize(
    ("names", "types", "keys", "expected"),
    [
        (["x", "<|im_end|>"], [CONTROL, CONTROL], {}, {"<|im_end|>"}),
        (["x", "<|im_end|>"], [CONTROL, CONTROL], {"eos_token_id": 256}, {"x", "<|im_end|>"}),
        (["x", "y"], [CONTROL, CONTROL], {"eot_token_id": 256, "eom_token_id": 257}, {"x", "y"}),
        (["<|end|>", "<|return|>"], [CONTROL, CONTROL], {}, {"<|end|>", "<|return|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], [CONTROL] * 3, {}, {"<|return|>", "<|call|>"}),
        (["<end_of_turn>", "</s>"], [USER_DEFINED, NORMAL], {}, {"<end_of_turn>"}),
    ],
)
def test_eog_ids(
    tokenizer_of: TokenizerMaker, names: list[str], types: list[int], keys: dict[str, Any], expected: set[str]
) -> None:
    tokenizer = tokenizer_of(make.byte_level(names, types, **keys))
    assert {tokenizer.token_text(token_id) for token_id in tokenizer.eog_ids} == expected
    assert all(tokenizer.is_control(token_id) for token_id in tokenizer.eog_ids)


def test_is_control(tokenizer_of: TokenizerMaker) -> None:
    types = [NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED]
    tokenizer = tokenizer_of(make.byte_level(["aa", "bb", "cc", "dd", "ee"], types))
    assert [tokenizer.is_control(256 + i) for i in range(5)] == [False, True, True, False, True]


# Words


@pytest.mark.parametrize(
    ("names", "text", "words"),
    [
        ("gpt-2 olmo", "I'll go  12 ½", ["I", "'ll", " go", " ", " 12", " ½"]),
        ("smollm refact starcoder", "v12 ½", ["v", "1", "2", " ", "½"]),
        ("llama-bpe glm4 dbrx", "x12345!!\n\n I'LL", ["x", "123", "45", "!!\n\n", " I", "'LL"]),
        ("qwen2", "x123'S  y", ["x", "1", "2", "3", "'S", " ", " y"]),
        ("qwen2", "क्षि", ["क", "्ष", "ि"]),
        ("qwen35", "क्षि", ["क्षि"]),
        ("gpt-4o llama4", "HelloWorld's/\n", ["Hello", "World's", "/\n"]),
        ("tekken", "HelloWorld12", ["Hello", "World", "1", "2"]),
        ("kimi-k2", "你好World", ["你好", "World"]),
        ("deepseek-v3", "a1234カタ!b", ["a", "123", "4", "カタ", "!b"]),
        ("deepseek-coder", "ab 12,\n", ["ab", " ", "1", "2", ",", "\n"]),
        ("deepseek-llm", "ab 12,\n", ["ab", " ", "12", ",", "\n"]),
        ("falcon", "x 1234,,`", ["x", " ", "123", "4", ",,`"]),
        ("bloom", "ab, cd", ["ab", ",", " cd"]),
        ("default", "a+12345", ["a", "+", "123", "45"]),
        ("youtu", "HelloWorld's12가나", ["Hello", "World's", "1", "2", "가나"]),
        ("afmoe", "a12345 カab!c", ["a", "12", "345", " ", "カ", "ab", "!c"]),
        ("spark2_5", "a1234!\n\nb", ["a", "1", "2", "3", "4", "!", "\n", "\n", "b"]),
        ("laguna", "a1\n\n b", ["a", "1", "\n\n", " b"]),
        ("minicpm5", "a1234'S", ["a", "123", "4", "'S"]),
        ("jais-2", "a       b", ["a", "    ", "  ", " b"]),
        ("ufakzeka", "ev'de 12", ["ev", "'de", " ", "1", "2"]),
        ("superbpe", "in all 12345 x", ["in all ", "12", "345", " x"]),
        ("chameleon", "xIMGIMGABZ!a  1", ["x", "IMGIMGABZ", "!", "a", "  ", "1"]),
        ("tiny_aya", "1234567 aB", ["1", "234", "567", " a", "B"]),
    ],
)
def test_words(names: str, text: str, words: list[str]) -> None:
    letter_bytes = {letter: byte for byte, letter in enumerate(make.byte_letters())}
    for name in names.split():
        cut = word_splitter(PRE_TOKENIZERS[name]).pre_tokenize_str(text)
        assert [bytes(letter_bytes[letter] for letter in word).decode() for word, _ in cut] == words, name


def test_all_pre_tokenizers_cut_without_loss() -> None:
    text = "Aa1 \n\t'll क्षि 你好カ가 ½\u3000!? "
    letters = make.byte_letters()
    for name, rules in PRE_TOKENIZERS.items():
        cut = word_splitter(rules).pre_tokenize_str(text)
        spelt = text if rules.raw else "".join(letters[byte] for byte in text.encode())
        assert "".join(word for word, _ in cut) == spelt, name


def test_unknown_pre_tokenizer(tmp_path: Path) -> None:
    path = make.written(tmp_path / "vocab.gguf", make.byte_level(pre="newest\nthing"))
    with pytest.raises(ModelError, match=r"'newest\\nthing', a pre-tokenizer.*smollm") as error:
        Tokenizer.from_gguf(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    forced = Tokenizer.from_gguf(path, force=True)
    assert forced.encode("a1") == plain("a1")
    assert forced.forced is not None and "default rules" in forced.forced


def test_known_pre_tokenizer_is_not_forced(smollm: Tokenizer) -> None:
    assert smollm.forced is None


@pytest.mark.parametrize(
    "text",
    [
        " " * 5000 + "x" + "\t" * 300,
        "a\r\nb\r\n\r\n",
        "สวัสดีชาวโลก مرحبا بالعالم",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd",
        "e\u0301 \u00e9 \ufb01 \u212b \u1e9b\u0323",
        "\ufeff\u200b\u00a0\u3000\0x",
    ],
)
def test_round_trip_of_odd_texts(smollm: Tokenizer, tokenizer_of: TokenizerMaker, text: str) -> None:
    assert smollm.decode(smollm.encode(text, special=False)) == text
    spm = tokenizer_of(make.sentencepiece(PIECES))
    assert spm.decode(spm.encode(text, special=False, bos=False)) == text


def test_longest_of_overlapping_tokens_is_taken_first(tokenizer_of: TokenizerMaker) -> None:
    extra = ["ab", "abc", "bcd", "<s>", "<s>x"]
    tokenizer = tokenizer_of(make.byte_level(extra, [USER_DEFINED] * 3 + [CONTROL] * 2))
    assert tokenizer.encode("abcd ab bcd") == [257, 100, 32, 256, 32, 258]
    assert tokenizer.encode("<s>x<s>") == [260, 259]


def test_unused_and_byte_tokens_are_not_found_in_text(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.byte_level(["<unused7>", "<0x41>"], [UNUSED, make.BYTE]))
    assert tokenizer.encode("<unused7><0x41>") == plain("<unused7><0x41>")
    assert tokenizer.is_control(256) and tokenizer.token_bytes(257) == b"A"


@pytest.mark.parametrize("ids", [[0xFF], [0xC3], [0xE2, 0x82], [0xF0, 0x9F, 0x98]])
def test_decode_of_half_characters(tokenizer_of: TokenizerMaker, ids: list[int]) -> None:
    text = tokenizer_of(make.byte_level()).decode([97, *ids, 98])
    assert text[0] + text[-1] == "ab" and set(text[1:-1]) == {"\ufffd"}


def test_add_eos_token_is_for_training(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.byte_level(["</s>"], [CONTROL], eos_token_id=256, add_eos_token=True))
    assert tokenizer.encode("a") == [97]


def test_vocabulary_sha256_is_of_the_tokens(tokenizer_of: TokenizerMaker) -> None:
    first = tokenizer_of(make.byte_level(["ab", "c"], [NORMAL, NORMAL])).vocabulary_sha256()
    assert tokenizer_of(make.byte_level(["ab", "c"], [CONTROL, NORMAL])).vocabulary_sha256() == first
    assert tokenizer_of(make.byte_level(["a", "bc"], [NORMAL, NORMAL])).vocabulary_sha256() != first


def test_missing_pre_tokenizer_is_default(tokenizer_of: TokenizerMaker) -> None:
    tokens = [*make.byte_letters(), "12", "34", "1234"]
    data = make.vocabulary(tokens, merges=["1 2", "3 4", "12 34"], model="gpt2")
    assert tokenizer_of(data).encode("1234") == [256, 51, 52]


# Malformed files


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make.vocabulary([], model="gpt2"), "no tokens"),
        (make.vocabulary(["a"], pre="gpt-2"), "tokenizer.ggml.model"),
        (make.vocabulary(["a"], model="bert"), "'bert', not supported, expected gpt2 or gemma4 or llama"),
        (make.vocabulary(["a"], model="gpt2", pre="gpt-2"), "tokenizer.ggml.merges"),
        (make.vocabulary(["a"], [1, 1], ["a a"], model="gpt2"), "2 types, expected one for each of 1"),
        (make.vocabulary(["a"], merges=["aa"], model="gpt2"), r"merges\[0\]: found 'aa'"),
        (make.vocabulary(["a"], merges=["a a", "a a a"], model="gpt2"), r"merges\[1\]: found 'a a a'"),
        (make.vocabulary(["a"], model="llama", bos_token_id=1), "bos_token_id': found 1"),
        (make.vocabulary(["a", "b", "c"], model="llama"), "tokenizer.ggml.scores"),
        (
            make.vocabulary(["a", "b", "c"], scores=[0.0], model="llama"),
            "1 scores, expected one for each of 3",
        ),
        (make.byte_level(eos_token_id=256), "eos_token_id': found 256, expected a token id below 256"),
        (make.byte_level(eot_token_id=999), "eot_token_id': found 999"),
        (make.byte_level(bos_token_id="x"), "bos_token_id': found str"),
        (make.byte_level(add_bos_token=True), "true without a bos_token_id"),
    ],
)
def test_from_gguf_raises(tokenizer_of: TokenizerMaker, data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        tokenizer_of(data)
    assert "vocab.gguf" in str(error.value)
    assert "\n" not in str(error.value)


def test_from_gguf_takes_an_open_file(smollm: Tokenizer) -> None:
    tokenizer = Tokenizer.from_gguf(open_gguf(DATA / "smollm2-vocab.gguf"))
    assert tokenizer.encode("Hello") == smollm.encode("Hello")


# Sentencepiece

PIECES = {
    SPACE: -1.0,
    "a": -2.0,
    "b": -3.0,
    "ab": -4.0,
    f"{SPACE}a": -5.0,
    "aa": -6.0,
    "aaa": -7.0,
    "é": -8.0,
}
FIRST = 259
ID = {piece: FIRST + i for i, piece in enumerate(PIECES)}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("a", [f"{SPACE}a"]),
        ("ab", [SPACE, "ab"]),  # "ab" scores higher than "▁a"
        ("b", [SPACE, "b"]),
        (" b", [SPACE, SPACE, "b"]),
        ("baa", [SPACE, "b", "aa"]),
        ("baaa", [SPACE, "b", "aaa"]),  # (aa)a, the leftmost of two equal pairs first
        ("é", [SPACE, "é"]),
    ],
)
def test_sentencepiece_merges_by_score(tokenizer_of: TokenizerMaker, text: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(make.sentencepiece(PIECES))
    ids = [ID[piece] for piece in pieces]
    assert tokenizer.encode(text, bos=False) == ids
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == text


def test_sentencepiece_falls_back_to_bytes(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.sentencepiece(PIECES))
    ids = tokenizer.encode("ü\n", bos=False)
    assert ids == [ID[SPACE], 3 + 0xC3, 3 + 0xBC, 3 + 0x0A]
    assert tokenizer.decode(ids) == "ü\n"


def test_sentencepiece_without_bytes_takes_unknown(tokenizer_of: TokenizerMaker) -> None:
    tokens = ["<unk>", "<s>", "</s>", SPACE, "a"]
    data = make.vocabulary(tokens, [2, 3, 3, 1, 1], scores=[0.0] * 5, model="llama")
    assert tokenizer_of(data).encode("aü", bos=False) == [3, 4, 0, 0]


def test_sentencepiece_prefix_after_special(tokenizer_of: TokenizerMaker) -> None:
    data = {"pieces": PIECES, "extra": {"<x>": CONTROL}}
    x = FIRST + len(PIECES)
    tokenizer = tokenizer_of(make.sentencepiece(**data))
    assert tokenizer.encode("b<x>b", bos=False) == [ID[SPACE], ID["b"], x, ID[SPACE], ID["b"]]
    bare = tokenizer_of(make.sentencepiece(**data, add_space_prefix=False))
    assert bare.encode("b<x> b", bos=False) == [ID["b"], x, ID[SPACE], ID["b"]]
    assert bare.decode([ID[SPACE], ID["b"]]) == " b"


def test_sentencepiece_decode_takes_one_space_of_the_text(tokenizer_of: TokenizerMaker) -> None:
    tokenizer = tokenizer_of(make.sentencepiece(PIECES))
    assert tokenizer.decode(tokenizer.encode("  b")) == "<s>  b"
    assert tokenizer.decode(tokenizer.encode("  b"), skip_special=True) == "  b"


def test_sentencepiece_special_of_phi3_takes_spaces(tokenizer_of: TokenizerMaker) -> None:
    data = {"pieces": PIECES, "extra": {"<|user|>": CONTROL}}
    ids = [FIRST + len(PIECES), ID[SPACE], ID["b"]]
    for name in ("Phi3", "Phi 3 Mini 4k Instruct", "Phi-3.5-mini"):
        tokenizer = tokenizer_of(make.sentencepiece(**data, name=name))
        assert tokenizer.encode("<|user|> \nb", bos=False) == ids
    assert tokenizer_of(make.sentencepiece(**data)).encode("<|user|> b", bos=False) != ids


def naive_sentencepiece(text: str, ids: dict[str, int], scores: dict[str, float]) -> list[str]:
    """Merge the best pair, one at a time, until there is none."""
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@given(
    st.lists(st.text("ab▁", min_size=2, max_size=4), max_size=12, unique=True),
    st.randoms(use_true_random=False),
    st.text("ab ", max_size=30),
)
def test_sentencepiece_matches_naive(
    tmp_path_factory: pytest.TempPathFactory, longer: list[str], random: Any, text: str
) -> None:
    pieces = {piece: -float(random.randint(0, 6)) for piece in ["a", "b", SPACE, *longer]}
    path = make.written(tmp_path_factory.mktemp("spm") / "vocab.gguf", make.sentencepiece(pieces))
    ids = {piece: FIRST + i for i, piece in enumerate(pieces)}
    expected = naive_sentencepiece(SPACE + text.replace(" ", SPACE) if text else "", ids, pieces)
    assert Tokenizer.from_gguf(path).encode(text, bos=False) == [ids[symbol] for symbol in expected]
