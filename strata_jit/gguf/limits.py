"""What a template from a stranger may use: time, steps, length of texts and lists.

Owns the bounds, the counting, and how long the results of Python's growing operations would be; knows nothing
of Jinja.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

MAX_SOURCE_LENGTH = 1 << 17
"""Characters; real templates have some 20,000, and Jinja's compiler knows no deadline."""
_MAX_WIDTH = 1_000
_MAX_INT_BITS = 100_000
# "%(name)d"; "%*d", "%100000d"; "{:{width}}", "{:100000}"
_PERCENT_KEY = re.compile(r"%\([^()]*\)")
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{4,})")
_WIDE_BRACES = re.compile(r":[^{}]*\d{4,}|\{[^{}]*\{")
_CODECS = ("utf-8", "utf8", "ascii", "latin-1")  # others may take time that grows with the square
_FROM_THE_END = ("rfind", "rindex", "rpartition", "rsplit")
_MAX_COMPARED = 1 << 30  # characters of a text times those that are looked for from its end
_SEQUENCES = (str, bytes, list, tuple)
_CONTAINERS = (list, tuple, dict)
_ITEM_WEIGHT = 16  # characters that an item of a list counts for
_SMALL = 64  # weights below are computed anew, as remembering them would cost more


class LimitError(Exception):
    """A template exceeded its bounds."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one rendering may use.

    `seconds` of wall time; `steps`: loop iterations, calls and operations; `length`: characters of the output
    and of every value on the way, where an item of a list counts for 16; `total_length`: of all together.
    """

    seconds: float = 10.0
    steps: int = 2_000_000
    length: int = 1 << 24
    total_length: int = 1 << 28


class Budget:
    """What is left of the bounds during one rendering."""

    __slots__ = ("_bounds", "_deadline", "_steps", "_total", "_weights")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.refill()

    def refill(self) -> None:
        """Begin anew."""
        self._deadline = time.monotonic() + self._bounds.seconds
        self._steps = self._bounds.steps
        self._total = self._bounds.total_length
        # id -> weight, and the value itself, so that no other gets its id
        self._weights: dict[int, tuple[int, object]] = {}

    def step(self) -> None:
        """One more step is taken."""
        self._steps -= 1
        if self._steps < 0:
            raise LimitError(f"it took more than {self._bounds.steps} steps")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it ran for more than {self._bounds.seconds:g} seconds")

    def length(self, length: int) -> None:
        """A value of this length is about to be made."""
        self._check_length(length)
        self._total -= length
        if self._total < 0:
            raise LimitError(f"it made texts and lists of more than {self._bounds.total_length} together")
        self.step()

    def parts(self, parts: Iterable[Any], separator_length: int = 0) -> Iterator[Any]:
        """The parts of a text to be joined, as long as they are not too long together."""
        length = 0
        for part in parts:
            length += separator_length + (len(part) if isinstance(part, (str, bytes)) else 0)
            if length > self._bounds.length:
                break
            yield part
        self.length(length)

    def weigh(self, value: Any) -> int:
        """Characters and items in a value, everything counted again wherever it is contained again.

        A list of two references to a list of two references, and so on, is small in memory, but takes forever
        to print, compare or hash; weighing each container when it is made stops that early.
        """
        if isinstance(value, (str, bytes)):
            return _ITEM_WEIGHT + len(value)
        if not isinstance(value, _CONTAINERS):
            if isinstance(value, int):
                _check_bits(value.bit_length())
            return _ITEM_WEIGHT
        if id(value) in self._weights:
            return self._weights[id(value)][0]
        items = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        weight = _ITEM_WEIGHT + self.weigh_together(items)
        if weight >= _SMALL:
            self.length(_flat_weight(value))
            self._weights[id(value)] = (weight, value)
        return weight

    def weigh_together(self, values: Iterable[Any]) -> int:
        """Weight of values that are, or may become, the items of one container."""
        weight = sum(map(self.weigh, values))
        self._check_length(weight)
        return weight

    def operation(self, operator: str, left: Any, right: Any) -> None:
        """`left operator right` is about to be computed."""
        if operator == "+" and isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
            self.length(_flat_weight(left) + _flat_weight(right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(value, _SEQUENCES) and isinstance(times, int):
                self.length(_flat_weight(value) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            check_percent_format(left)

    def method(
        self, owner: str | bytes | int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """`owner.name(*args, **kwargs)` is about to be called; returns `args`, iterators as lists."""
        if isinstance(owner, int):
            check_widths((*args, *kwargs.values()))
        elif name in ("encode", "decode"):
            if kwargs or args[1:] or str(*args[:1] or ("utf8",)).lower() not in _CODECS:
                raise LimitError(f"it calls {name} for another encoding than {', '.join(_CODECS)}")
        elif name in ("strip", "lstrip", "rstrip"):
            check_characters(args)
        elif name in _FROM_THE_END:
            self._search(owner, next(iter((*args, *kwargs.values())), None))
        elif name == "join" and args:
            return (list(self.parts(args[0], len(owner))), *args[1:])
        elif name == "replace" and len(args) > 1 and all(isinstance(arg, type(owner)) for arg in args[:2]):
            self.replacement(owner, args[0], args[1])
        elif name in ("format", "format_map") and isinstance(owner, str):
            if _WIDE_BRACES.search(owner.replace("{{", "").replace("}}", "")):
                raise LimitError("it formats a text with a computed or large width")
        elif name == "translate":
            raise LimitError("it calls translate, whose result has no bound")
        elif name == "expandtabs":
            self.length(len(owner) * _MAX_WIDTH)
        elif name not in ("split", "rsplit", "find", "count", "index", "startswith", "endswith"):
            check_widths((*args, *kwargs.values()))
        return args

    def _search(self, text: str | bytes, wanted: Any) -> None:
        """Python compares at every place of a text, as far as it goes, when it looks from the end."""
        if isinstance(wanted, (str, bytes)) and len(text) * len(wanted) > _MAX_COMPARED:
            raise LimitError("it looks for a long text from the end of another")

    def _check_length(self, length: int) -> None:
        if length > self._bounds.length:
            raise LimitError(f"it would make a text or list longer than {self._bounds.length}")

    def replacement(self, text: Any, old: Any, new: Any) -> None:
        """Every `old` in `text` is about to become `new`."""
        self.length(len(text) + text.count(old) * len(new))


def check_percent_format(layout: str) -> None:
    """A text formatted by `%` may state no large width, nor take one from its arguments."""
    plain = _PERCENT_KEY.sub("%", layout)
    if "%(" in plain:
        raise LimitError("it formats a text by a name with brackets in it")
    if _WIDE_PERCENT.search(plain):
        raise LimitError("it formats a text with a computed or large width")


def check_widths(args: Iterable[Any]) -> None:
    """Numbers that are widths or counts of something to make."""
    if any(isinstance(arg, int) and abs(arg) > _MAX_WIDTH for arg in args):
        raise LimitError(f"it asks for a width or count above {_MAX_WIDTH}")


def check_characters(args: Iterable[Any]) -> None:
    """Characters to be stripped: each of a text's is compared with all of them."""
    if any(isinstance(arg, (str, bytes)) and len(arg) > _MAX_WIDTH for arg in args):
        raise LimitError(f"it strips more than {_MAX_WIDTH} characters")


def _flat_weight(value: Any) -> int:
    """Weight of a text, or at least that of a list."""
    return len(value) * (1 if isinstance(value, (str, bytes)) else _ITEM_WEIGHT)


def _check_bits(n_bits: int) -> None:
    if n_bits > _MAX_INT_BITS:
        raise LimitError("it computes with too large numbers")
