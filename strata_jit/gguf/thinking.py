"""Whether a model thinks before it answers: the variables by which its chat template asks that.

Owns the names that templates use and what they take; which of them a template reads is seen from its source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import meta, nodes

from strata_jit.gguf.chat import template_environment

_EFFORTS_OFF = ("none", "minimal", "low")
"""Efforts of reasoning, least first: where a template has no "none", the least it names."""


def thinking_variables(template: str, think: bool) -> dict[str, Any]:
    """Variables for `render_chat` that make the model think, or not; empty if the template reads none.

    `enable_thinking`, `thinking`, `reasoning` and the like are true or false. `thinking_budget` is 0, or -1
    for no bound. `reasoning_effort` is "high", or the least that the template names.
    """
    try:
        source = template_environment().parse(template)
        read = meta.find_undeclared_variables(source)
    except jinja2.TemplateError:  # rendering it says what is wrong
        return {}
    except RecursionError:
        return {}
    texts = {const.value for const in source.find_all(nodes.Const) if isinstance(const.value, str)}
    return {name: value(think, texts) for name, value in _VARIABLES.items() if name in read}


def _switch(think: bool, _: set[str]) -> bool:
    return think


def _budget(think: bool, _: set[str]) -> int:
    return -1 if think else 0


def _effort(think: bool, texts: set[str]) -> str:
    return "high" if think else next((effort for effort in _EFFORTS_OFF if effort in texts), "low")


_VARIABLES: dict[str, Callable[[bool, set[str]], Any]] = {
    "enable_thinking": _switch,
    "thinking": _switch,
    "enable_reasoning": _switch,
    "reasoning": _switch,
    "thinking_budget": _budget,
    "reasoning_effort": _effort,
}
