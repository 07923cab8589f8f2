"""Which variables a chat template asks for thinking by, seen from its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata_jit.gguf.chat import render_chat
from strata_jit.gguf.thinking import thinking_variables

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [
        ("{{ messages }}", {}, {}),
        ("{% if enable_thinking %}x{% endif %}", {"enable_thinking": True}, {"enable_thinking": False}),
        (
            "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{{ thinking }}",
            {"thinking": True},
            {"thinking": False},
        ),
        ("{{ message.thinking }}{% for thinking in messages %}{{ thinking }}{% endfor %}", {}, {}),
        ("{{ thinking_budget }}", {"thinking_budget": -1}, {"thinking_budget": 0}),
        ("{{ reasoning_effort }}", {"reasoning_effort": "high"}, {"reasoning_effort": "low"}),
        (
            "{% if reasoning_effort == 'none' %}{% endif %}",
            {"reasoning_effort": "high"},
            {"reasoning_effort": "none"},
        ),
        ("{% if enable_thinking", {}, {}),
        ("{{ enable_thinking | nofilter }}", {}, {}),
        ("{{ " + "(" * 5000 + "thinking" + ")" * 5000 + " }}", {}, {}),
    ],
)
def test_thinking_variables(template: str, on: dict[str, Any], off: dict[str, Any]) -> None:
    assert thinking_variables(template, True) == on
    assert thinking_variables(template, False) == off


NAMES = {
    "GLM-4.6": {"enable_thinking"},
    "HuggingFaceTB-SmolLM3-3B": {"enable_thinking"},
    "Qwen-Qwen3-0.6B": {"enable_thinking"},
    "deepseek-ai-DeepSeek-V3.1": {"enable_thinking", "thinking"},
    "openai-gpt-oss-120b": {"reasoning_effort"},
}


def check(directory: Path) -> int:
    """Number of templates; those that are named read what they are said to, the others nothing."""
    paths = sorted(directory.glob("*.jinja"))
    for path in paths:
        template = path.read_text("utf-8")
        variables = [thinking_variables(template, think) for think in (True, False)]
        assert set(variables[0]) == NAMES.get(path.stem, set()), path.stem
        on, off = (render_chat(template, HI, **given) for given in variables)
        assert (on != off) == (path.stem in NAMES), path.stem
    return len(paths)


def test_templates_of_real_models() -> None:
    assert check(TEMPLATES) > 0


def test_all_templates(templates_dir: Path) -> None:
    assert check(templates_dir) >= len(NAMES)
