"""From a prompt's text to token ids, and the context that a run needs.

Owns when the chat template is applied, and with what; knows no program, pool or sampling. Works on an opened
model file, so that a caller can size the context before it loads the weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from strata_jit.errors import UsageError
from strata_jit.gguf.chat import render_chat
from strata_jit.gguf.reader import GGUFFile, open_gguf
from strata_jit.gguf.thinking import thinking_variables
from strata_jit.gguf.tokenizer import Tokenizer
from strata_jit.models.hparams import context_length

TEMPLATE_KEY = "tokenizer.chat_template"


def encode_prompt(
    source: str | os.PathLike[str] | GGUFFile,
    text: str,
    system: str | None = None,
    raw: bool = False,
    tokenizer: Tokenizer | None = None,
    think: bool | None = None,
) -> list[int]:
    """Token ids of a prompt for the model file `source`.

    Unless `raw`, `text` is a user's message, after a system message if `system` is given, and the file's chat
    template is rendered around them; `think` sets the variables by which it has the model think or not.
    Special tokens written in the text are recognised either way. `tokenizer` spares building the file's own
    again. Raises UsageError if the file has no template and the prompt is not raw, or if the prompt has no
    tokens.
    """
    gguf = source if isinstance(source, GGUFFile) else open_gguf(source)
    if raw and system is not None:
        raise UsageError("a system message needs the chat template: leave out --system or --raw")
    if raw and think is not None:
        raise UsageError("thinking is asked of the chat template: leave out --think and --no-think, or --raw")
    tokenizer = tokenizer or Tokenizer.from_gguf(gguf)
    rendered = text if raw else render_messages(gguf, tokenizer, messages_of(text, system), think)
    ids = tokenizer.encode(rendered)
    if not ids:
        raise UsageError("the prompt has no tokens: give a text")
    return ids


def prompt_text(raw: bytes, name: str, what: str = "prompt") -> str:
    """The text of a prompt in UTF-8. UsageError names `name`, the place and the byte where it is not."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        message = f"{name}: the {what} is not UTF-8: byte 0x{byte:02x} at offset {error.start}"
        raise UsageError(message) from None


def messages_of(text: str, system: str | None = None) -> list[dict[str, Any]]:
    """The messages of a chat that begins with `text` from the user."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def render_messages(
    gguf: GGUFFile, tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], think: bool | None = None
) -> str:
    """The chat as the model reads it, up to where its answer begins. UsageError without a template."""
    template = chat_template(gguf)
    variables = {} if think is None else thinking_variables(template, think)
    bos_token, eos_token = tokenizer.token_text(tokenizer.bos_id), tokenizer.token_text(tokenizer.eos_id)
    return render_chat(template, messages, bos_token=bos_token, eos_token=eos_token, **variables)


def chat_template(gguf: GGUFFile) -> str:
    """The file's chat template; UsageError if it has none."""
    template = gguf.get(TEMPLATE_KEY, str, default=None)
    if not template:
        raise UsageError(f"{gguf.path}: no {TEMPLATE_KEY} in the file: give the whole prompt, with --raw")
    return template


def choose_context(gguf: GGUFFile, n_prompt: int, max_tokens: int, n_ctx: int | None = None) -> int:
    """Positions to make room for: `n_ctx`, or by default the prompt and `max_tokens`, at most the model's.

    Raises UsageError if `n_ctx` is more than the model was made for, or the prompt does not fit.
    """
    n_ctx_train = context_length(gguf)
    if n_ctx is not None and n_ctx > n_ctx_train:
        raise UsageError(f"--ctx {n_ctx}: the model's context is {n_ctx_train} tokens, give no more")
    chosen = min(n_prompt + max_tokens, n_ctx_train) if n_ctx is None else n_ctx
    if n_prompt > chosen:
        whose = "the model's context" if chosen == n_ctx_train else "the context asked for"
        raise UsageError(f"the prompt has {n_prompt} tokens, {whose} only {chosen}: shorten the prompt")
    return chosen
