"""`strata-jit perplexity`: how well a model predicts a text, and how far it is from a base model.

Owns its options and the order of a run: text, model, windows, figures.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from strata_jit.commands.common import (
    AT_LEAST_1,
    LoadOptions,
    force_option,
    load_model,
    open_model,
    plan_options,
    pool_options,
    read_environment,
    read_text,
    read_tokenizer,
    with_output,
)

if TYPE_CHECKING:
    from strata_jit.gguf.reader import GGUFFile
    from strata_jit.gguf.tokenizer import Tokenizer
    from strata_jit.report import TextOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityOptions(LoadOptions):
    """What the user asked of `perplexity`; the fields are click's parameter names."""

    text: str
    ctx: int | None
    kl_base: str | None
    kl: str | None
    per_position: bool
    json: bool


@click.command(short_help="Measure how well a model predicts a text.")
@click.argument("model", metavar="FILE")
@click.option("--text", required=True, metavar="PATH", help="File that holds the text; - is stdin.")
@click.option(
    "--ctx", type=AT_LEAST_1, metavar="N", help="Tokens of a window; 512, or as in the base of --kl."
)
@click.option("--kl-base", metavar="PATH", help="Write the model's distributions to this file.")
@click.option("--kl", metavar="PATH", help="Compare with the distributions that --kl-base wrote there.")
@click.option("--per-position", is_flag=True, help="Print the figures of each scored token first.")
@plan_options
@pool_options
@force_option
@click.option("--json", is_flag=True, help="One JSON document on stdout instead of the figures.")
@click.pass_context
def perplexity(ctx: click.Context, /, **given: Any) -> None:
    """Measure how well a model predicts a text: perplexity, and mean negative log-likelihood in nats.

    The text is cut into windows, each read from an empty context, and the second half of each is scored, as
    llama.cpp's llama-perplexity does it. The value so far goes to stderr. To see what quantising a model
    costs, write a base with the original, then compare: the KL divergence between their distributions.

    \b
    Environment: the variables of decode but STRATA_DECODE_TIMING; options win.
    """
    options = PerplexityOptions(**given)
    ctx.exit(with_output(lambda out: _measure(options, out)))


def _measure(options: PerplexityOptions, out: TextOutput) -> int:
    from strata_jit.report import print_skipped, print_warnings
    from strata_jit.report.perplexity import RunningValue, perplexity_json, perplexity_text

    text = read_text(options.text, "text")
    gguf = open_model(options.model)
    tokenizer = read_tokenizer(gguf, options.force)
    ids, n_ctx = _prepared(options, gguf, tokenizer, text)
    environment = read_environment(os.environ)
    with load_model(options, environment, n_ctx, tokenizer) as model:
        print_warnings(model.info)
        begin = time.perf_counter()
        result = model.perplexity(
            ids, n_ctx=n_ctx, kl_base=options.kl_base, kl=options.kl, on_window=RunningValue()
        )
        eval_s = time.perf_counter() - begin
        info = model.info
        if environment.route_tail_skip:
            print_skipped(environment.route_tail_skip, model.experts_skipped())
    shown = perplexity_json(result, info, eval_s) if options.json else None
    out.write(shown or perplexity_text(result, options.per_position))
    return 0


def _prepared(
    options: PerplexityOptions, gguf: GGUFFile, tokenizer: Tokenizer, text: str
) -> tuple[list[int], int]:
    """The text's tokens and the window, with all refused that can be before the model is loaded."""
    from strata_jit.engine.kl_file import BaseReader, base_target
    from strata_jit.engine.perplexity import DEFAULT_WINDOW, base_header, text_ids, windows_of
    from strata_jit.models.hparams import context_length

    ids = text_ids(tokenizer, text)
    n_ctx = options.ctx or min(DEFAULT_WINDOW, context_length(gguf))
    if options.kl is not None:
        with BaseReader(options.kl) as base:
            n_ctx = options.ctx or base.header.n_ctx
            base.header.check(base_header(tokenizer, windows_of(ids, n_ctx)), base.path)
    windows_of(ids, n_ctx)
    if options.kl_base is not None:
        base_target(options.kl_base)
    return ids, n_ctx
