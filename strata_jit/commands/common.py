"""What several commands share: options of the pool, environment variables, texts of errors.

Owns the variables' names and values; options win over them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from strata_jit.errors import UsageError

EXIT_INTERRUPTED = 130
NUMA_POOL = "STRATA_NUMA_POOL"
SPIN_US = "STRATA_POOL_SPIN_US"
EXCHANGE_ROTATE = "STRATA_EXCHANGE_ROTATE"
DECODE_TIMING = "STRATA_DECODE_TIMING"
ROUTE_TAIL_SKIP = "STRATA_ROUTE_TAIL_SKIP"
_MAX_SPIN_US = 10**9
_MAX_RANK = 10**6
_SWITCH = ("0", "1")

Command = TypeVar("Command", bound=Callable[..., Any])


def combined(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, listed in the order of the help text."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)

plan_options = combined(
    click.option("--pool-workers", type=AT_LEAST_0, metavar="N", help="Threads beside the host core's own."),
    click.option(
        "--pool-affinity",
        type=click.Choice(["all", "auto", "p-cores"]),
        help="Of hybrid chips: all cores alike, E cores last (auto, the default), or no E core.",
    ),
    click.option("--test-slices", type=AT_LEAST_1, metavar="N", help=f"{NUMA_POOL}=test, with N slices."),
)


@dataclass(frozen=True, slots=True)
class Environment:
    """The variables; None where unset or empty."""

    numa_pool: str | None = None
    spin_us: int | None = None
    exchange_rotate: bool = False
    decode_timing: bool = False
    route_tail_skip: int = 0

    def mode(self, test_slices: int | None) -> str | None:
        """How to use nodes; slices that were asked for are test mode."""
        return self.numa_pool if test_slices is None else "test"


def read_environment(environ: Mapping[str, str]) -> Environment:
    """UsageError, by name, for a value that is unknown."""
    return Environment(
        _choice(environ, NUMA_POOL, ("0", "1", "test")),
        _number(environ, SPIN_US, _MAX_SPIN_US, "microseconds"),
        _choice(environ, EXCHANGE_ROTATE, _SWITCH) == "1",
        _choice(environ, DECODE_TIMING, _SWITCH) == "1",
        _number(environ, ROUTE_TAIL_SKIP, _MAX_RANK, "ranks") or 0,
    )


def _choice(environ: Mapping[str, str], name: str, values: tuple[str, ...]) -> str | None:
    found = environ.get(name) or None
    if found is not None and found not in values:
        expected = f"{', '.join(values[:-1])} or {values[-1]}"
        raise UsageError(f"{name}={found!r}: expected {expected}, or unset it")
    return found


def _number(environ: Mapping[str, str], name: str, largest: int, unit: str) -> int | None:
    found = environ.get(name) or None
    if found is None:
        return None
    if not (found.isascii() and found.isdecimal() and len(found) <= 10 and int(found) <= largest):
        expected = f"a whole number of {unit} from 0 to {largest}"
        raise UsageError(f"{name}={found!r}: expected {expected}, or unset it")
    return int(found)


def os_error_text(error: OSError) -> str:
    """What the system said, after the file's name where there is one."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{os.fspath(error.filename)}: {reason}"
