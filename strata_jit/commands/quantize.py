"""`strata-jit quantize`: a GGUF file with its weights in other types.

Owns its options only.
"""

from __future__ import annotations

import contextlib
import io
import sys

import click

from strata_jit.commands.common import os_error_text
from strata_jit.errors import UsageError


@click.command(short_help="Write a model with its weights in another type.")
@click.argument("source", metavar="IN.gguf")
@click.argument("target", metavar="OUT.gguf")
@click.argument("type_name", metavar="TYPE")
@click.option(
    "--tensor-type",
    "overrides",
    multiple=True,
    metavar="PATTERN=TYPE",
    help="Type of the matrices in whose names the regular expression is found; the last one wins.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the table.")
@click.pass_context
def quantize(
    ctx: click.Context,
    /,
    source: str,
    target: str,
    type_name: str,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write IN.gguf to OUT.gguf with its matrices in TYPE: IQ4_XS, IQ4_NL, Q6_K, Q8_0, BF16, F16 or F32.

    Norms, routers and other small tensors stay as they are; the output matrix, and some others where TYPE has
    four bits, get more. A row that the type's blocks do not divide gets a type with smaller ones. OUT.gguf
    appears, or is replaced, when it is complete. Of a split model, any part is IN.gguf.
    """
    ctx.exit(_quantize(source, target, type_name, overrides, as_json))


def _quantize(source: str, target: str, type_name: str, overrides: tuple[str, ...], as_json: bool) -> int:
    from strata_jit.engine import quantize as engine
    from strata_jit.report import LoadProgress, OutputClosed, TextOutput, print_messages
    from strata_jit.report.quantization import quantize_json, quantize_table

    try:
        plan = engine.plan_quantization(source, target, type_name, overrides)
    except OSError as error:
        raise UsageError(f"cannot read the model: {os_error_text(error)}") from None
    print_messages("warning", plan.warnings)
    with LoadProgress() as progress:
        result = engine.quantize(plan, progress)
    out = TextOutput(sys.stdout if sys.stdout is not None else io.StringIO())
    with contextlib.suppress(OutputClosed):
        out.write(quantize_json(result) if as_json else quantize_table(result))
    return 0
