"""From a prompt's text to token ids, and the context that a run needs.

Owns when the chat template is applied and when a beginning-of-sequence token is added; knows no program, pool
or sampling. Works on an opened model file, so that a caller can size the context before it loads the weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from strata_jit.errors import UsageError
from strata_jit.gguf.chat import render_chat
from strata_jit.gguf.reader import GGUFFile, open_gguf
from strata_jit.gguf.tokenizer import Tokenizer
from strata_jit.models.hparams import context_length

_TEMPLATE_KEY = "tokenizer.chat_template"
_TOKENS_KEY = "tokenizer.ggml.tokens"
_EOS_KEY = "tokenizer.ggml.eos_token_id"


def encode_prompt(
    source: str | os.PathLike[str] | GGUFFile,
    text: str,
    system: str | None = None,
    raw: bool = False,
    tokenizer: Tokenizer | None = None,
) -> list[int]:
    """Token ids of a prompt for the model file `source`.

    Unless `raw`, `text` is a user's message, after a system message if `system` is given, and the file's chat
    template is rendered around them. Special tokens written in the text are recognised either way.
    `tokenizer` spares building the file's own again. Raises UsageError if the file has no template and the
    prompt is not raw, or if the prompt has no tokens.
    """
    gguf = source if isinstance(source, GGUFFile) else open_gguf(source)
    if raw and system is not None:
        raise UsageError("a system message needs the chat template: leave out --system or --raw")
    tokenizer = tokenizer or Tokenizer.from_gguf(gguf)
    if raw:
        ids = tokenizer.encode(text)
    else:
        ids = encode_rendered(gguf, tokenizer, render_messages(gguf, tokenizer, messages_of(text, system)))
    if not ids:
        raise UsageError("the prompt has no tokens: give a text")
    return ids


def prompt_text(raw: bytes, name: str) -> str:
    """The text of a prompt in UTF-8. UsageError names `name`, the place and the byte where it is not."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        message = f"{name}: the prompt is not UTF-8: byte 0x{byte:02x} at offset {error.start}"
        raise UsageError(message) from None


def messages_of(text: str, system: str | None = None) -> list[dict[str, Any]]:
    """The messages of a chat that begins with `text` from the user."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def render_messages(gguf: GGUFFile, tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> str:
    """The chat as the model reads it, up to where its answer begins. UsageError without a template."""
    template = gguf.get(_TEMPLATE_KEY, str, default=None)
    if not template:
        raise UsageError(f"{gguf.path}: no {_TEMPLATE_KEY} in the file: give the whole prompt, with --raw")
    eos_id = gguf.get(_EOS_KEY, int, default=None)
    bos_token, eos_token = _token_text(gguf, tokenizer.bos_id), _token_text(gguf, eos_id)
    return render_chat(template, messages, bos_token=bos_token, eos_token=eos_token)


def encode_rendered(gguf: GGUFFile, tokenizer: Tokenizer, rendered: str) -> list[int]:
    """Ids of a rendered chat: a beginning token that the template wrote is not added a second time."""
    bos_token = _token_text(gguf, tokenizer.bos_id)
    has_bos = bool(bos_token) and rendered.startswith(bos_token)
    return tokenizer.encode(rendered, bos=False if has_bos else None)


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


def _token_text(gguf: GGUFFile, token_id: int | None) -> str:
    """The token as the vocabulary spells it; "" if there is none."""
    tokens = gguf.metadata.get(_TOKENS_KEY)
    if token_id is None or tokens is None or not 0 <= token_id < len(tokens):
        return ""
    return str(tokens[token_id])
