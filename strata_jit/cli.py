"""The `strata-jit` command: options and environment variables in, one library call, output through `report`.

Owns the group of commands and the exit codes; each command has a module of its own in `commands/`. Knows
nothing of how a model is computed. Heavy imports sit inside the commands, so that `--help` is immediate.

Exit codes: 0 done, 1 the run failed, 2 wrong options, environment or input, 3 the model does not fit where it
was asked to go, 130 interrupted. A reader of stdout that leaves early (`| head`) is no failure.
"""

from __future__ import annotations

from typing import Any

import click

import strata_jit
from strata_jit.commands.common import EXIT_INTERRUPTED, os_error_text
from strata_jit.commands.decode import decode
from strata_jit.commands.inspect import inspect_file
from strata_jit.commands.perplexity import perplexity
from strata_jit.commands.quantize import quantize
from strata_jit.commands.topology import topology
from strata_jit.errors import StrataError, one_line


class _Group(click.Group):
    """Turns every error that a user can cause into one line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StrataError as error:
            message, exit_code = str(error), error.exit_code
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:  # stderr has lost its reader: there is nobody to tell
            ctx.exit(1)
        except OSError as error:
            message, exit_code = os_error_text(error), 1
        click.echo(f"error: {one_line(message)}", err=True)
        ctx.exit(exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(strata_jit.__version__, prog_name="strata-jit")
def main() -> None:
    """Run mixture-of-experts GGUF models on the CPU, one pinned process per NUMA node."""


main.add_command(decode)
main.add_command(inspect_file)
main.add_command(perplexity)
main.add_command(quantize)
main.add_command(topology)
