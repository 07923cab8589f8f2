"""The "llama" kind of tokenizer: sentencepiece BPE, merging by score, with bytes as a fallback.

Owns the merging; knows no special tokens. Of all neighbouring symbols that together are a token, the pair
whose token has the highest score is merged first, of equal ones the leftmost (as in llama.cpp's
llama-vocab.cpp), until none is left. A single character that is no token becomes its UTF-8 bytes' tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

SPACE = "▁"
_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_SPACE_INSIDE = re.compile(f"[^{SPACE}]{SPACE}")
_MAX_CACHED_WORDS = 1 << 16


class SentencePieceBPE:
    """Text without special tokens -> ids."""

    __slots__ = ("_byte_ids", "_cache", "_ids", "_prefix", "_scores", "_word_by_word")

    def __init__(
        self, ids: Mapping[str, int], scores: list[float], unknown_id: int | None, space_prefix: bool
    ) -> None:
        """`ids`: text -> id of all tokens, `scores[id]`; `unknown_id` stands for bytes without a token.

        With `space_prefix`, a space is put before a text that follows a special token or nothing.
        """
        self._ids = ids
        self._scores = scores
        self._prefix = SPACE if space_prefix else ""
        self._byte_ids = [_byte_id(ids, byte, unknown_id) for byte in range(256)]
        self._cache: dict[str, list[int]] = {}
        # Where no token has a space behind something else, merges cannot cross from word to word.
        self._word_by_word = not any(_SPACE_INSIDE.search(text) for text in ids)

    def encode(self, text: str, after_special: bool = True) -> list[int]:
        """The ids of a piece of text; `after_special`: it follows a special token or nothing."""
        escaped = text.replace(" ", SPACE)
        if after_special:
            escaped = self._prefix + escaped
        words = _WORDS.findall(escaped) if self._word_by_word else [escaped]
        return [token_id for word in words for token_id in self._word(word)]

    def _word(self, word: str) -> list[int]:
        ids = self._cache.get(word)
        if ids is None:
            ids = self._merge(word)
            if len(self._cache) >= _MAX_CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _merge(self, word: str) -> list[int]:
        """Merge a word's characters. Symbol i is known by its first character's place, "" once merged."""
        symbols = list(word)
        left = list(range(-1, len(symbols) - 1))
        right = [*range(1, len(symbols)), -1]
        queue = [pair for i in range(len(symbols) - 1) if (pair := self._pair(symbols, i, i + 1))]
        heapify(queue)
        while queue:
            _, i, j, text = heappop(queue)
            if not symbols[i] or not symbols[j] or symbols[i] + symbols[j] != text or right[i] != j:
                continue  # one of the two was merged with another since
            symbols[i], symbols[j] = text, ""
            right[i] = right[j]
            if right[j] >= 0:
                left[right[j]] = i
            for first, second in ((left[i], i), (i, right[i])):
                if first >= 0 and second >= 0 and (pair := self._pair(symbols, first, second)):
                    heappush(queue, pair)
        return [token_id for symbol in symbols if symbol for token_id in self._symbol_ids(symbol)]

    def _pair(self, symbols: list[str], i: int, j: int) -> tuple[float, int, int, str] | None:
        """An entry of the queue: minus the score first, then the place."""
        text = symbols[i] + symbols[j]
        token_id = self._ids.get(text)
        return None if token_id is None else (-self._scores[token_id], i, j, text)

    def _symbol_ids(self, symbol: str) -> list[int]:
        token_id = self._ids.get(symbol)
        if token_id is not None:
            return [token_id]
        ids = (self._byte_ids[byte] for byte in symbol.encode())
        return [byte_id for byte_id in ids if byte_id is not None]


def _byte_id(ids: Mapping[str, int], byte: int, unknown_id: int | None) -> int | None:
    token_id = ids.get(f"<0x{byte:02X}>")
    return unknown_id if token_id is None else token_id
