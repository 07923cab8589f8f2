"""`strata-jit inspect`: what is in a model file, what of it cannot be run, and whether it fits here.

Owns its options only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from strata_jit.commands.common import (
    AT_LEAST_1,
    model_errors,
    plan_choice,
    plan_options,
    read_environment,
    with_output,
)

if TYPE_CHECKING:
    from strata_jit.report import TextOutput


@click.command("inspect", short_help="Show what is in a model file.")
@click.argument("path", metavar="FILE")
@click.option("--ctx", type=AT_LEAST_1, metavar="N", help="Context that memory is counted for; 4096.")
@plan_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of the view.")
@click.pass_context
def inspect_file(ctx: click.Context, /, **given: Any) -> None:
    """Show a GGUF file's architecture, sizes, tensor types, tokenizer and chat templates, from its header.

    Says what of it is not supported, and whether it would fit on this machine. FILE may be any part of a
    split model, or hold a vocabulary alone. A sound file that cannot be run is no error.
    """
    n_ctx = given.pop("ctx")
    ctx.exit(_inspect(n_ctx, **given))


def _inspect(
    n_ctx: int | None,
    path: str,
    pool_workers: int | None,
    pool_affinity: str | None,
    test_slices: int | None,
    as_json: bool,
) -> int:
    from strata_jit.engine.contents import survey
    from strata_jit.report.contents import contents_json, contents_view

    options = plan_choice(read_environment(os.environ), pool_workers, pool_affinity, test_slices)
    with model_errors():
        found = survey(path, options, n_ctx)

    def write(out: TextOutput) -> int:
        if as_json:
            out.write(contents_json(found))
        else:
            out.write_own(contents_view(found, out.width))
        return 0

    return with_output(write)
