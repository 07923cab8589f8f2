"""What several commands share: options of the pool, environment variables, texts of errors.

Owns the variables' names and values; options win over them.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

import strata_jit
from strata_jit.errors import UsageError

if TYPE_CHECKING:
    from strata_jit.engine.model import Model
    from strata_jit.gguf.reader import GGUFFile
    from strata_jit.gguf.tokenizer import Tokenizer
    from strata_jit.placement import PlanOptions
    from strata_jit.report import TextOutput

EXIT_INTERRUPTED = 130
NUMA_POOL = "STRATA_NUMA_POOL"
SPIN_US = "STRATA_POOL_SPIN_US"
EXCHANGE_ROTATE = "STRATA_EXCHANGE_ROTATE"
DECODE_TIMING = "STRATA_DECODE_TIMING"
ROUTE_TAIL_SKIP = "STRATA_ROUTE_TAIL_SKIP"
_MAX_SPIN_US = 10**9
_MAX_RANK = 10**6
_MAX_TEXT_BYTES = 64 << 20
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

pool_options = combined(
    click.option("--chunk", type=AT_LEAST_1, metavar="N", help="Prompt tokens computed at once; 512."),
    click.option(
        "--isa",
        type=click.Choice(["auto", "avx512vnni", "avxvnni", "avx2", "portable"]),
        default="auto",
        help="Instruction set of the kernels; auto is the best that the CPU has.",
    ),
    click.option("--reference", is_flag=True, help="Compute in float: slow, exact."),
    click.option(
        "--arena",
        type=click.Choice(["memfd", "anon"]),
        default="memfd",
        help="Memory of the weights: a memory file (the default) or private memory.",
    ),
    click.option(
        "--pool-tasks",
        type=click.IntRange(0, 4096),
        default=0,
        metavar="N",
        help="Pieces into which a node cuts an operation on one token, about; 0: automatic.",
    ),
    click.option(
        "--aux-cpus",
        default="off",
        metavar="LIST",
        help="CPUs of threads that compute nothing, such as 0-3; auto: those left free; off: any.",
    ),
)
force_option = click.option(
    "--force", is_flag=True, help="Cut words by the default rules where the file names unknown ones."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What loading a model for a command needs: `plan_options`, `pool_options`, `force_option`."""

    model: str
    force: bool
    pool_workers: int | None
    pool_affinity: str | None
    pool_tasks: int
    aux_cpus: str
    chunk: int | None
    isa: str
    reference: bool
    arena: Literal["memfd", "anon"]
    test_slices: int | None


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


def plan_choice(
    environment: Environment, pool_workers: int | None, pool_affinity: str | None, test_slices: int | None
) -> PlanOptions:
    """What `plan_options` and the variables ask of the plan."""
    from strata_jit.placement import PlanOptions

    return PlanOptions(
        workers=pool_workers,
        numa_pool=environment.mode(test_slices),
        test_slices=test_slices,
        pool_affinity=pool_affinity,
        exchange_rotate=environment.exchange_rotate,
    )


@contextlib.contextmanager
def model_errors() -> Iterator[None]:
    """Turns what the system says of a model file that cannot be read into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read the model: {os_error_text(error)}") from None


def with_output(write: Callable[[TextOutput], int]) -> int:
    """The exit code of `write`, which gets stdout; 0 where its reader has left early."""
    from strata_jit.report import OutputClosed, TextOutput

    try:
        return write(TextOutput(sys.stdout if sys.stdout is not None else io.StringIO()))
    except OutputClosed:
        return 0


def open_model(path: str) -> GGUFFile:
    """The header of a model that can be run; UsageError where it cannot be read, ModelError where not run."""
    from strata_jit.gguf.reader import open_gguf
    from strata_jit.models import check_architecture

    with model_errors():
        file = open_gguf(path)
    check_architecture(file)
    return file


def read_tokenizer(gguf: GGUFFile, force: bool) -> Tokenizer:
    """The file's tokenizer; a line on stderr where `force` stood in for its rules."""
    from strata_jit.gguf.tokenizer import Tokenizer
    from strata_jit.report import print_message

    tokenizer = Tokenizer.from_gguf(gguf, force=force)
    if tokenizer.forced is not None:
        print_message("warning", tokenizer.forced)
    return tokenizer


def load_model(
    options: LoadOptions, environment: Environment, n_ctx: int, tokenizer: Tokenizer | None = None
) -> Model:
    """Load the model as the options and variables say, with bars on a terminal."""
    from strata_jit.report import LoadProgress

    with LoadProgress() as progress:
        return strata_jit.load(
            options.model,
            workers=options.pool_workers,
            ctx=n_ctx,
            chunk=options.chunk,
            isa=None if options.isa == "auto" else options.isa,
            reference=options.reference,
            numa_pool=environment.mode(options.test_slices),
            test_slices=options.test_slices,
            spin_us=environment.spin_us,
            pool_affinity=options.pool_affinity,
            pool_tasks=options.pool_tasks,
            exchange_rotate=environment.exchange_rotate,
            route_tail_skip=environment.route_tail_skip,
            aux_cpus=options.aux_cpus,
            arena=options.arena,
            tokenizer=tokenizer,
            on_progress=progress,
        )


def read_text(path: str, what: str) -> str:
    """The text of a file, or of stdin for "-", in UTF-8; one newline at its end is left away.

    UsageError, saying that `what` could not be read, for one that is missing, too long or no UTF-8.
    """
    from strata_jit.engine.prompt import prompt_text

    from_stdin = path == "-"
    if from_stdin and sys.stdin is None:
        raise UsageError(f"cannot read the {what}: stdin is closed")
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if from_stdin else open(path, "rb") as file:
            raw = file.read(_MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the {what}: {os_error_text(error)}") from None
    if len(raw) > _MAX_TEXT_BYTES:
        raise UsageError(f"the {what} is longer than {_MAX_TEXT_BYTES} bytes: shorten it")
    return prompt_text(raw, "stdin" if from_stdin else path, what).removesuffix("\n").removesuffix("\r")


def os_error_text(error: OSError) -> str:
    """What the system said, after the file's name where there is one."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{os.fspath(error.filename)}: {reason}"
