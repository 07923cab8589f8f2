"""Chat templates: a list of messages to the prompt that a model was trained on.

Owns what templates may call and see, as Hugging Face transformers has it; knows no file and no tokens. The
sandbox is in `sandbox`, its bounds in `limits`. Reference: `chat_template_utils.py` of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from strata_jit.errors import ModelError, one_line
from strata_jit.gguf.limits import Bounds, LimitError
from strata_jit.gguf.sandbox import BoundedEnvironment

_MAX_QUOTED_ERROR = 200


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    *,
    bounds: Bounds | None = None,
    **kwargs: Any,
) -> str:
    """The prompt that a Jinja template makes of a conversation.

    `messages`: {"role": ..., "content": ...} and whatever else the template knows; `tools`: JSON schemas of
    functions. With `add_generation_prompt` the prompt ends where the model's answer begins. `kwargs` are seen
    by the template as variables (for example `enable_thinking`), over all others. `bounds` limits time and
    size. Raises `ModelError` if the template refuses the conversation, fails, or exceeds the bounds.
    """
    variables = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        **kwargs,
    }
    environment = template_environment(bounds)
    try:
        return environment.render_bounded(template, variables)
    except _Refusal as error:
        raise _failure("refuses this conversation", error) from error
    except LimitError as error:
        raise _failure("was stopped", error) from error
    except jinja2.TemplateSyntaxError as error:
        raise _failure(f"has a syntax error in line {error.lineno}", error) from error
    except RecursionError as error:
        raise _failure("failed", "it calls itself without end") from error
    except Exception as error:  # a template is a program: it may fail in any way Python can
        raise _failure("failed", f"{type(error).__name__}: {error}") from error


class _Refusal(jinja2.TemplateError):
    """Raised by a template through `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its body is rendered as it is.

    The body keeps its own scope, as in transformers: what it sets is not seen behind it.
    """

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def template_environment(bounds: Bounds | None = None) -> BoundedEnvironment:
    """The sandbox with what chat templates may use beyond Jinja's own."""
    environment = BoundedEnvironment(
        bounds or Bounds(),
        {"tojson": _to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _failure(what: str, error: object) -> ModelError:
    detail = one_line(str(error))
    if len(detail) > _MAX_QUOTED_ERROR:
        detail = f"{detail[:_MAX_QUOTED_ERROR]}..."
    return ModelError(f"the chat template {what}: {detail}; --raw gives the model the prompt as it is")
