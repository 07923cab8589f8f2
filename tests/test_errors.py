from __future__ import annotations

import pytest

from strata_jit import errors
from strata_jit.errors import ModelError, NodeDied, StrataError, one_line, quoted

EXIT_CODES = {
    "StrataError": 1,
    "UsageError": 2,
    "ModelError": 2,
    "TopologyError": 1,
    "PlacementError": 3,
    "PoolError": 1,
    "NodeDied": 1,
}


def test_exit_codes() -> None:
    own = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and kind.__module__ == errors.__name__
    ]
    assert all(issubclass(kind, StrataError) for kind in own)
    assert {kind.__name__: kind.exit_code for kind in own if issubclass(kind, StrataError)} == EXIT_CODES


def test_model_error_at_is_one_line() -> None:
    error = ModelError.at("dir/m.gguf", "key\n", "a\tb", "c")
    assert str(error) == r"dir/m.gguf: key\n: found a\tb, expected c"


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (3, "exit status 3"),
        (0, "exit status 0"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (-40, "killed by signal 40"),
        ("SIGBUS", "killed by SIGBUS"),
    ],
)
def test_node_died_names_node_and_cause(status: int | str, cause: str) -> None:
    error = NodeDied(1, status)
    assert (error.node, error.cause, str(error)) == (1, cause, f"node process 1 died: {cause}")


def test_quoted_cuts_and_escapes() -> None:
    assert quoted("a\x1b[0m") == r"'a\x1b[0m'"
    assert quoted("x" * 81) == f"'{'x' * 80}'... (81 characters)"


def test_one_line_keeps_letters() -> None:
    assert one_line("\u00fcber\u2028\udcff\n") == "\u00fcber\\u2028\\udcff\\n"
