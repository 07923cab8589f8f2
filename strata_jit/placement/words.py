"""Words that several messages share."""

from __future__ import annotations


def counted(n: int, noun: str) -> str:
    """The number with its noun: "1 node", "2 nodes"."""
    return f"{n} {noun}{'s' * (n != 1)}"
