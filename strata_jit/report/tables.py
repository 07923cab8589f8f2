"""Titled sections of lines and tables without borders, as the views of a machine and of a file show them.

Owns their form only.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from strata_jit.errors import one_line
from strata_jit.units import format_bytes

_ENDLESS = 100_000


def rendered(sections: Iterable[tuple[str, RenderableType]], width: int | None) -> str:
    """Sections of a title and a body as text. `width`: columns of a terminal, which gets colours; or None."""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=width or _ENDLESS,
        force_terminal=width is not None,
        color_system="auto" if width is not None else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for title, body in sections:
        console.print(Text(title, style="bold"))
        if isinstance(body, Text):
            # never wrapped by us, so that a command can be copied whole
            console.print(
                Text("\n").join(Text("  ").append_text(line) for line in body.split()), soft_wrap=True
            )
            console.print()
        else:
            console.print(Padding(body, (0, 0, 1, 2)))
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    return "\n".join(lines).rstrip("\n") + "\n"


def lines(texts: Iterable[str], style: str = "") -> Text:
    """A line for each text, its control characters escaped."""
    return Text("\n".join(one_line(text) for text in texts), style=style)


def plain_table(*columns: str) -> Table:
    """Without borders; a column that begins with ">" is set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="fold",
        )
    return table


def size(n_bytes: int | None) -> str:
    """A size, or that it is unknown."""
    return "unknown" if n_bytes is None else format_bytes(n_bytes)


def counted(n: int, noun: str) -> str:
    """Such as "1 node", "2 nodes"."""
    return f"{n} {noun}{'s' * (n != 1)}"
