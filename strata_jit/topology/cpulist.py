"""Sets of CPUs or nodes as the kernel writes them: lists such as "0-3,8" and hexadecimal masks.

Owns the two grammars, both ways; reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from strata_jit.errors import TopologyError, quoted

MAX_NUMBER = 2**20 - 1
"""Far above any CPU number, so that a damaged file cannot ask for a set that fills the memory."""
_ITEM = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9})(?:/([0-9]{1,9}))?)?)?")
_MASK = re.compile(r"(?:0x)?[0-9a-fA-F]{1,8}(?:,(?:0x)?[0-9a-fA-F]{1,8})*|(?:0x)?[0-9a-fA-F]+")


def parse_cpulist(text: str) -> frozenset[int]:
    """Numbers of a list such as "0-3,8,10-20:2/5"; TopologyError if it is not one.

    FIRST-LAST:USED/GROUP takes the first USED of every GROUP numbers; FIRST-LAST:STEP, as numactl's and
    taskset's tools write it, every STEP-th.
    """
    numbers: set[int] = set()
    for item in text.strip().split(","):
        if item.strip():
            numbers.update(_item_numbers(text, item.strip()))
    return frozenset(numbers)


def parse_cpumask(text: str) -> frozenset[int]:
    """Numbers of a mask in hexadecimal words of 32 bits, "00000001,80000000"; TopologyError if it is not one.

    A mask without commas may have any length.
    """
    if _MASK.fullmatch(text.strip()) is None:
        raise TopologyError(f"CPU mask {quoted(text.strip())}: expected hexadecimal words of 32 bits")
    words = [word.removeprefix("0x") for word in text.strip().split(",")]
    bits = int("".join([words[0], *(word.zfill(8) for word in words[1:])]), 16)
    if bits.bit_length() > MAX_NUMBER + 1:
        raise TopologyError(f"CPU mask of {bits.bit_length()} bits: expected at most {MAX_NUMBER + 1}")
    digits = f"{bits:b}"[::-1]
    return frozenset(number for number, digit in enumerate(digits) if digit == "1")


def format_cpulist(numbers: Iterable[int]) -> str:
    """The shortest list of ranges, as the kernel writes it: "0-3,8"; "" for no number."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _item_numbers(text: str, item: str) -> Iterable[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _fault(text, item, "N, N-M or N-M:STEP")
    first, last = int(match[1]), int(match[2] or match[1])
    if last > MAX_NUMBER:
        raise _fault(text, item, f"numbers up to {MAX_NUMBER}")
    if last < first:
        raise _fault(text, item, "a range that ascends")
    if match[4] is None:
        return range(first, last + 1, int(match[3] or 1) or 1)
    used, group = int(match[3]), int(match[4])
    if not 0 < used <= group:
        raise _fault(text, item, "a group at least as large as its used part")
    return (number for number in range(first, last + 1) if (number - first) % group < used)


def _fault(text: str, item: str, expected: str) -> TopologyError:
    return TopologyError(f"CPU list {quoted(text.strip())}: found {quoted(item)}, expected {expected}")
