"""Byte pair encoding by ranked merges, the "gpt2" and "gemma4" kinds, through the `tokenizers` library.

Owns GPT-2's byte letters and the building of the library's model; knows no special tokens. The 256 byte
letters: `bytes_to_unicode` in GPT-2's encoder.py.
"""

from __future__ import annotations

from itertools import chain

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE

from strata_jit.gguf.pretokenizers import PreTokenizer, word_splitter
from strata_jit.gguf.spm import SPACE


def _letter_bytes() -> dict[str, int]:
    """Letter -> byte: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_LETTER_BYTES = _letter_bytes()


def spelt_bytes(text: str) -> bytes:
    """The bytes that a token spelt in byte letters stands for; any other character stands for its UTF-8."""
    try:
        return bytes([_LETTER_BYTES[letter] for letter in text])
    except KeyError:
        return b"".join(
            bytes([_LETTER_BYTES[char]]) if char in _LETTER_BYTES else char.encode() for char in text
        )


def _all_tokens(ids: dict[str, int], merges: list[tuple[str, str]]) -> bool:
    """Whether all parts and results of merges are tokens; there are 300,000 of them, so no loop in Python."""
    parts = all(map(ids.__contains__, chain.from_iterable(merges)))
    return parts and all(map(ids.__contains__, map("".join, merges)))


class RankedBPE:
    """Text without special tokens -> ids. Bytes that the vocabulary has no token for are dropped."""

    __slots__ = ("_raw", "_tokenizer")

    def __init__(self, ids: dict[str, int], merges: list[tuple[str, str]], rules: PreTokenizer) -> None:
        """`ids`: text -> id of all tokens; `merges` in order of rank.

        Merges of or into something that is no token are left out: they could not end in an id.
        """
        if not _all_tokens(ids, merges):
            merges = [(a, b) for a, b in merges if a in ids and b in ids and a + b in ids]
        model = BPE(vocab=ids, merges=merges, ignore_merges=rules.whole_words, byte_fallback=rules.raw)
        self._raw = rules.raw
        self._tokenizer = HFTokenizer(model)
        self._tokenizer.pre_tokenizer = word_splitter(rules)

    def encode(self, text: str, after_special: bool = True) -> list[int]:
        """The ids of a piece of text; what stands before it makes no difference here."""
        text = text.replace(" ", SPACE) if self._raw else text
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
