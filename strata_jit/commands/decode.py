"""`strata-jit decode`: a model's answer to a prompt.

Owns its options and the order of a run: text, model, answer, figures.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from strata_jit.commands.common import (
    AT_LEAST_1,
    EXIT_INTERRUPTED,
    LoadOptions,
    combined,
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
from strata_jit.commands.defaults import SAMPLING_OPTIONS, builtin_options, chosen_sampling
from strata_jit.errors import UsageError

if TYPE_CHECKING:
    from strata_jit.engine.model import Model
    from strata_jit.engine.results import GenerationResult
    from strata_jit.engine.sample import Sampling
    from strata_jit.gguf.reader import GGUFFile
    from strata_jit.gguf.tokenizer import Tokenizer
    from strata_jit.report import TextOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions(LoadOptions):
    """What the user asked of `decode`; the fields are click's parameter names."""

    prompt: str | None
    prompt_file: str | None
    system: str | None
    raw: bool
    think: bool | None
    max_tokens: int
    temp: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    seed: int | None
    ctx: int | None
    json: bool
    list_kernels: bool


_prompt_options = combined(
    click.option(
        "--model",
        metavar="PATH",
        help="GGUF file; of a split model, any part. By default the built-in model: it goes on with text.",
    ),
    click.option("-p", "--prompt", metavar="TEXT", help="The prompt; - reads it from stdin."),
    click.option("--prompt-file", metavar="PATH", help="File that holds the prompt; - is stdin."),
    click.option("--system", metavar="TEXT", help="System message before the prompt."),
    click.option("--raw", is_flag=True, help="Take the prompt as it is, without the model's chat template."),
    click.option(
        "--think/--no-think", default=None, help="Whether to think first, where the chat template asks that."
    ),
    click.option(
        "-n", "--max-tokens", type=AT_LEAST_1, default=128, metavar="N", help="Tokens to write, at most; 128."
    ),
)
_sampling_options = combined(
    click.option("--temp", type=float, help="Temperature; 0 is greedy. Default: what the file says, or 0."),
    click.option("--top-k", type=int, help="Keep the K likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens of this mass; 1 keeps all."),
    click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest; 0: none."),
    click.option("--repeat-penalty", type=float, help="Weakens recent tokens; 1 is off."),
    click.option("--seed", type=int, help="Makes sampling repeatable."),
)
_output_options = combined(
    click.option("--json", is_flag=True, help="One JSON document on stdout instead of the text."),
    click.option("--list-kernels", is_flag=True, help="Show the kernel of each of the model's operations."),
)


@click.command(short_help="Write a model's answer to a prompt.")
@_prompt_options
@_sampling_options
@click.option("--ctx", type=AT_LEAST_1, metavar="N", help="Context; by default prompt + max tokens.")
@plan_options
@pool_options
@force_option
@_output_options
@click.pass_context
def decode(ctx: click.Context, /, **given: Any) -> None:
    """Write a model's answer to a prompt on stdout, as it comes.

    Without --model, the built-in model goes on with the prompt as a text, or begins one without a prompt.
    Where the file recommends sampling (general.sampling keys), that is the default of the options for it.

    Progress, warnings and the closing figures go to stderr. On a terminal, control characters in the answer
    are shown as symbols; a file or a pipe gets the text unchanged. A newline ends it if it has none.

    \b
    Environment (options win):
      STRATA_NUMA_POOL        0, 1 or test; test cuts the model into slices on any machine
      STRATA_POOL_SPIN_US     microseconds that a waiting thread spins before it sleeps
      STRATA_EXCHANGE_ROTATE  0 or 1; 1 rules a split over nodes out
      STRATA_DECODE_TIMING    0 or 1; 1 prints a line of times by kind of operation
      STRATA_ROUTE_TAIL_SKIP  lossy: leave out experts from this rank on (from 0); 0 is off
    """
    if given["model"] is None:
        given |= builtin_options(given)
    ctx.exit(_decode(DecodeOptions(**given)))


def _decode(options: DecodeOptions) -> int:
    """Run the command; the exit code."""
    command = _list_kernels if options.list_kernels else _answer
    return with_output(lambda out: command(options, out))


def _answer(options: DecodeOptions, out: TextOutput) -> int:
    from strata_jit.report import (
        json_document,
        print_skipped,
        print_summary,
        print_timing,
        print_warnings,
    )

    info = result = None
    try:
        text, gguf = _read_prompt(options.prompt, options.prompt_file), open_model(options.model)
        ids, n_ctx, tokenizer = _encode(options, text, gguf)
        given = {name: getattr(options, name) for name in SAMPLING_OPTIONS}
        sampling = chosen_sampling(given, gguf)
        environment = read_environment(os.environ)
        with load_model(options, environment, n_ctx, tokenizer) as model:
            print_warnings(model.info)
            before = model.op_seconds() if environment.decode_timing else None
            result = _stream(model, ids, sampling, options, out)
            info = model.info
            if environment.route_tail_skip:
                print_skipped(environment.route_tail_skip, model.experts_skipped())
            if before is not None:
                print_timing(before, model.op_seconds(), result)
    except KeyboardInterrupt:
        pass  # what is known by now is still reported
    if options.json:
        out.write(json_document(options.model, info, result))
    elif info is not None and result is not None:
        print_summary(info, result)
    return EXIT_INTERRUPTED if result is None or result.stop_reason == "interrupted" else 0


def _stream(
    model: Model, ids: list[int], sampling: Sampling, options: DecodeOptions, out: TextOutput
) -> GenerationResult | None:
    generation = model.generate(ids, max_tokens=options.max_tokens, sampling=sampling)
    try:
        for piece in generation:
            if not options.json:
                out.write(piece)
    except KeyboardInterrupt:
        pass  # the result says so
    finally:
        generation.close()
        out.end_line()
    return generation.result


def _list_kernels(options: DecodeOptions, out: TextOutput) -> int:
    from strata_jit.report import kernel_listing, print_warnings

    tokenizer = read_tokenizer(open_model(options.model), options.force)
    with load_model(options, read_environment(os.environ), options.ctx or 1, tokenizer) as model:
        print_warnings(model.info)
        out.write(kernel_listing(model.info, options.json))
    return 0


def _encode(options: DecodeOptions, text: str, gguf: GGUFFile) -> tuple[list[int], int, Tokenizer]:
    """The prompt's token ids, the context to make room for, and the tokenizer."""
    from strata_jit.engine.prompt import chat_template, choose_context, encode_prompt
    from strata_jit.gguf.thinking import thinking_variables
    from strata_jit.report import print_message

    tokenizer = read_tokenizer(gguf, options.force)
    ids = encode_prompt(gguf, text, options.system, options.raw, tokenizer, options.think)
    if options.think is not None and not thinking_variables(chat_template(gguf), options.think):
        asked = "--think" if options.think else "--no-think"
        print_message("note", f"the chat template reads no variable for thinking: {asked} changes nothing")
    return ids, choose_context(gguf, len(ids), options.max_tokens, options.ctx), tokenizer


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt's text. Of a file or stdin, one newline at the end is not part of it."""
    from strata_jit.engine.prompt import prompt_text

    if (prompt is None) == (prompt_file is None):
        raise UsageError("give the prompt by one of -p TEXT, -p - (stdin) and --prompt-file PATH")
    if prompt is not None and prompt != "-":
        return prompt_text(os.fsencode(prompt), "--prompt")
    return read_text(prompt_file or "-", "prompt")
