"""The exceptions that the package raises on purpose, each with the exit code that the command line gives it.

Owns the tree and the form of messages about model files; knows no other module.

    StrataError                 1   anything below; catch this to catch all of them
    |-- UsageError              2   a bad option, environment variable or argument
    |   `-- ModelError          2   a model file that is malformed, incomplete or not supported
    |-- TopologyError           1   the machine cannot be read, or refuses a binding
    |-- PlacementError          3   the model does not fit where it was asked to go
    `-- PoolError               1   node processes or their shared memory failed
        `-- NodeDied            1   a node process ended before it was told to

Every message is one line that says what was found, what was expected and, where it helps, what to do.
"""

from __future__ import annotations

import os
import signal
from typing import ClassVar

_MAX_QUOTED = 80


class StrataError(Exception):
    """Base of all errors that the package raises on purpose; `exit_code` is the process exit code."""

    exit_code: ClassVar[int] = 1


class UsageError(StrataError):
    """Something that the user asked for, in an option, a variable or an argument, cannot be."""

    exit_code = 2


class ModelError(UsageError):
    """A model file cannot be used: malformed, incomplete, or of a kind that is not supported."""

    @classmethod
    def at(cls, path: str | os.PathLike[str], field: str, found: str, expected: str) -> ModelError:
        """The error of one field of a model file, as a single line `path: field: found ..., expected ...`."""
        return cls(one_line(f"{os.fspath(path)}: {field}: found {found}, expected {expected}"))


class TopologyError(StrataError):
    """The machine's CPUs, nodes or memory could not be read, or a binding was refused."""


class PlacementError(StrataError):
    """The model, or a share of it, does not fit in the memory it was placed in."""

    exit_code = 3


class PoolError(StrataError):
    """The node processes or the memory that they share failed."""


class NodeDied(PoolError):
    """A node process ended before it was told to.

    `node` is its index in the plan; `cause` says how it ended, for example "killed by SIGKILL" or
    "exit status 3". `status` is a signal's name, or a number as in `subprocess.Popen.returncode`:
    an exit status, or minus the number of the signal.
    """

    def __init__(self, node: int, status: int | str) -> None:
        self.node = node
        self.cause = _cause(status)
        super().__init__(f"node process {node} died: {self.cause}")


def quoted(text: str) -> str:
    """`text` in quotes, for a message: control characters escaped, and cut when it is very long."""
    if len(text) > _MAX_QUOTED:
        return f"{text[:_MAX_QUOTED]!r}... ({len(text)} characters)"
    return repr(text)


def one_line(text: str) -> str:
    """`text` with every character that is not printable, line ends included, as an escape."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _cause(status: int | str) -> str:
    if isinstance(status, str):
        return f"killed by {status}"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have numbers only
        return f"killed by signal {-status}"
