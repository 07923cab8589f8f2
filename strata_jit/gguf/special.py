"""Finding special tokens in a text.

Owns the search for literal token texts; knows no vocabulary format. Of several tokens that begin at one
place the longest is taken, as the `tokenizers` library does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_WHITESPACE = " \t\n\v\f\r"


class SpecialTokens:
    """A set of token texts that stand for their ids wherever they occur."""

    __slots__ = ("_first", "_ids", "_lengths", "_swallowing")

    def __init__(self, ids: Mapping[str, int], swallowing: frozenset[int] = frozenset()) -> None:
        """`ids`: text -> id. The tokens in `swallowing` take the white space behind them with them."""
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        self._swallowing = swallowing
        self._lengths: dict[str, list[int]] = {}
        for text in self._ids:
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        for lengths in self._lengths.values():
            lengths.sort(reverse=True)
        letters = "".join(re.escape(letter) for letter in self._lengths)
        self._first = re.compile(f"[{letters}]") if letters else re.compile("(?!)")

    def split(self, text: str) -> Iterator[int | str]:
        """The ids of special tokens and the non-empty texts between them, in order."""
        start = pos = 0
        while candidate := self._first.search(text, pos):
            pos = candidate.start()
            length = self._match(text, pos)
            if not length:
                pos += 1
                continue
            if start < pos:
                yield text[start:pos]
            token_id = self._ids[text[pos : pos + length]]
            yield token_id
            pos += length
            if token_id in self._swallowing:
                while pos < len(text) and text[pos] in _WHITESPACE:
                    pos += 1
            start = pos
        if start < len(text):
            yield text[start:]

    def _match(self, text: str, pos: int) -> int:
        """Length of the longest token text at `pos`, 0 if there is none."""
        for length in self._lengths[text[pos]]:
            if text[pos : pos + length] in self._ids:
                return length
        return 0
