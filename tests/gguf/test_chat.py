"""Chat templates: as transformers renders them, refused in one line, bounded in time and size."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from strata_jit.errors import ModelError
from strata_jit.gguf.chat import render_chat
from strata_jit.gguf.limits import Bounds

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
HI = [{"role": "user", "content": "Hi"}]


def cases(directory: Path) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    for path in sorted(directory.glob("*.json")):
        recorded = json.loads(path.read_text())
        template = path.with_suffix(".jinja").read_text()
        for name, case in recorded["cases"].items():
            yield f"{path.stem}-{name}", template, recorded, case


def check_case(template: str, recorded: dict[str, Any], case: dict[str, Any]) -> None:
    def render() -> str:
        return render_chat(
            template,
            case["messages"],
            case["tools"],
            recorded["add_generation_prompt"],
            bos_token=recorded["bos_token"],
            eos_token=recorded["eos_token"],
            strftime_now=datetime.fromisoformat(recorded["date_of_rendering"]).strftime,
            **case["kwargs"],
        )

    if "error" in case:
        with pytest.raises(ModelError, match="--raw"):
            render()
    else:
        assert render() == case["rendered"]


@pytest.mark.parametrize(
    ("template", "recorded", "case"), [pytest.param(*rest, id=name) for name, *rest in cases(TEMPLATES)]
)
def test_renders_as_transformers(template: str, recorded: dict[str, Any], case: dict[str, Any]) -> None:
    check_case(template, recorded, case)


def test_all_templates_render_as_transformers(templates_dir: Path) -> None:
    n_cases = 0
    for _, template, recorded, case in cases(templates_dir):
        check_case(template, recorded, case)
        n_cases += 1
    assert n_cases > 0


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("a\n{% if true %}\nb\n{% endif %}\nc", "a\nb\nc"),  # trim_blocks
        ("a\n   {% if true %}b{% endif %}", "a\nb"),  # lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(4) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi"}'),
        ("{{ {'b': '<é>', 'a': none} | tojson }}", '{"b": "<é>", "a": null}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ '<b>' }}{{ '&' | string }}", "<b>&"),
        ("{% generation %}\nx{{ 1 }}\n{% endgeneration %}y", "x1\ny"),
        ("{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}", "21"),
        (
            "{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}",
            "4",
        ),
        ("{% for m in messages[::-1] %}{{ loop.length }}{{ loop.last }}{% endfor %}", "1True"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}", "a1"),
        ("{% macro f(x, y=[1]) %}{{ x }}{{ y }}{{ varargs }}{% endmacro %}{{ f('a', 2, 3) }}", "a2(3,)"),
        ("{{ tools is none }} {{ documents is none }} {{ nothing is defined }}", "True True False"),
        ("{% if add_generation_prompt %}{{ bos_token }}+{{ eos_token }}{% endif %}", "<s>+</s>"),
        ("{{ ['a', 'b'] | join(', ') }}{{ [{'k': 1}, {'k': 2}] | join('-', attribute='k') }}", "a, b1-2"),
        ("{{ [1, 2.5] | sum }}{{ [[1], [2]] | sum(start=[]) }}{{ [{'k': 4}] | sum('k') }}", "3.5[1, 2]4"),
        (
            "{{ 'a b'.replace(' ', '--') }}{{ 'a' | replace('a', 'c') }}{{ 'a,b'.split(',') }}",
            "a--bc['a', 'b']",
        ),
        ("{{ '%s-%5.2f' % ('a', 1) }}{{ '{:>3}'.format(7) }}{{ 'x' * 3 }}{{ 2 ** 8 }}", "a- 1.00  7xxx256"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ (1, 2) }}{{ [1] + [2] }}{{ 1 in [1] }}", "(1, 2)[1, 2]True"),
    ],
)
def test_render(template: str, rendered: str) -> None:
    assert render_chat(template, HI, bos_token="<s>", eos_token="</s>") == rendered


def test_render_without_generation_prompt() -> None:
    template = "{{ add_generation_prompt }}"
    assert render_chat(template, HI, add_generation_prompt=False) == "False"


def test_strftime_now() -> None:
    before = datetime.now()
    rendered = datetime.strptime(render_chat("{{ strftime_now('%Y-%m-%d %H:%M') }}", HI), "%Y-%m-%d %H:%M")
    assert abs((rendered - before).total_seconds()) <= 61


def test_kwargs_are_variables_over_all_others() -> None:
    rendered = render_chat(
        "{{ enable_thinking }} {{ strftime_now('x') }}", HI, enable_thinking=False, strftime_now=str.upper
    )
    assert rendered == "False X"


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "Hi", "calls": [1]}]
    with pytest.raises(ModelError, match="unsafe"):
        render_chat("{{ messages[0].calls.append(2) }}", messages)
    with pytest.raises(ModelError, match="unsafe"):
        render_chat("{{ messages[0].update(role='x') }}", messages)
    assert messages == [{"role": "user", "content": "Hi", "calls": [1]}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no\nsystem') }}", r"refuses this conversation: no\\nsystem; --raw"),
        ("{% if %}", "has a syntax error in line 1: "),
        ("\n\n{% for %}", "has a syntax error in line 3: "),
        ("{{ a.b.c }}", "failed: UndefinedError: 'a' is undefined; --raw"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ messages + 1 }}", "failed: TypeError"),
        ("{{ x | nofilter }}", "has a syntax error in line 1: No filter named 'nofilter'"),
        ("{{ ''.__class__.__mro__ }}", "failed: SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "failed: SecurityError"),
        ("{% include 'x' %}", "failed: TypeError"),
        ("{{ lipsum.__globals__ }}", "failed: UndefinedError: 'lipsum' is undefined"),
        ("{{ cycler(1).__init__.__globals__['os'] }}", "failed: SecurityError"),
        (
            "{% for x in [[1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
            "failed: it calls itself without end",
        ),
        ("{{ (messages | attr('__class__')).x }}", "failed: "),
        ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "failed: SecurityError"),
        ("{{ raise_exception.__globals__ }}{{ x.y }}", "failed: "),
        ("{% for i in range(10**9) %}{% endfor %}", "failed: OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failed: it calls itself without end"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "failed: it calls itself without end"),
        ("{{ raise_exception('x' * 5000) }}", r"x\.\.\.; --raw"),
    ],
)
def test_failure_is_one_line(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        render_chat(template, HI)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert str(error.value).endswith("--raw gives the model the prompt as it is")
    assert error.value.exit_code == 2


LOOP = "{% for a in range(99999) %}"
END = "{% endfor %}"
BIG = "{% set s = 'a' * 1000000 %}"
NEST = "{% set n.x = [n.x, n.x] %}" * 60
HOSTILE = {
    "loops": LOOP * 3 + END * 3,
    "loops that write": LOOP * 3 + "x" + END * 3,
    "loops in a macro": "{% macro m() %}" + LOOP * 3 + "x" + END * 3 + "{% endmacro %}{{ m() }}",
    "loops in a generation": "{% generation %}" + LOOP * 3 + "x" + END * 3 + "{% endgeneration %}",
    "calls": "{% macro m(i) %}{% if i %}{{ m(i-1) }}{{ m(i-1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "repeated text": "{{ 'a' * 10**10 }}",
    "repeated list": "{% set x = 2**40 * [0] %}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "squares": "{% set n = namespace(x=9) %}" + LOOP + "{% set n.x = n.x * n.x %}" + END,
    "doubled by ~": "{% set n = namespace(x='ab') %}" + LOOP + "{% set n.x = n.x ~ n.x %}" + END,
    "doubled by +": "{% set n = namespace(x='ab') %}" + LOOP + "{% set n.x = n.x + n.x %}" + END,
    "doubled list": "{% set n = namespace(x=[1]) %}" + LOOP + "{% set n.x = n.x + n.x %}" + END,
    "kept texts": BIG + "{% set n = namespace(x=[]) %}" + LOOP + "{% set n.x = n.x + [s ~ a] %}" + END,
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent width of a name": "{{ '%(a)10000000000s' % {'a': 1} }}",
    "percent width of an odd name": "{{ '%((a))10000000000s' % {'(a)': 1} }}",
    "format filter, of a name": "{{ '%(a)10000000000s' | format(a=1) }}",
    "slow codec": "{{ ('a' * 1000000 ~ '-' ~ 'z' * 1000000).encode().decode('punycode') }}",
    "long escapes": BIG + "{{ s.encode('ascii', 'namereplace') }}",
    "width by name": "{{ (1).to_bytes(length=10**10, byteorder='big') }}",
    "stripping": "{{ ('a' * 16000000).strip('b' * 8000000 ~ 'a') }}",
    "trim filter": "{{ ('a' * 16000000) | trim('b' * 8000000 ~ 'a') }}",
    "search from the end": "{{ ('a' * 16000000).rfind('a' * 4000000 ~ 'b' ~ 'a' * 4000000) }}",
    "split from the end": "{{ ('a' * 16000000).rsplit(sep='a' * 4000000 ~ 'b' ~ 'a' * 4000000) }}",
    "large int": "{{ ('v' * 16000000) | int(0, 32) // (('v' * 8000000) | int(0, 32)) }}",
    "test of a list": "{% set x = range(99999) | list %}{{ x | reject('in', x + [0]) | list }}",
    "colliding keys": "{{ range(0, (2**61 - 1) * 99999, 2**61 - 1) | unique | list }}",
    "colliding keys of a dict": "{{ dict(range(0, (2**61 - 1) * 99999, 2**61 - 1) | batch(2)) }}",
    "colliding keys of fromkeys": "{{ dict.fromkeys(range(0, (2**61 - 1) * 99999, 2**61 - 1)) }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "brace width": "{{ '{:>10000000000}'.format(1) }}",
    "brace computed width": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "format_map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "replace": BIG + "{{ s.replace('a', s) }}",
    "replace filter": BIG + "{{ s | replace('a', s) }}",
    "join": BIG + "{{ s.join(['a'] * 100000) }}",
    "join filter": BIG + "{{ ([s] * 10000) | join }}",
    "join attribute": BIG + "{{ ([{'k': s}] * 10000) | join(attribute='k') }}",
    "indent": "{{ ('a\n' * 1000000) | indent('a' * 900) }}",
    "wordwrap": "{{ ('a ' * 1000000) | wordwrap(1, wrapstring='b' * 900) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "slice": "{{ [1] | slice(10**10) | list }}",
    "round": "{{ 1 | round(10**10, 'ceil') }}",
    "sum": "{{ ([[1] * 1000] * 1000000) | sum(start=[]) | length }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "translate": BIG + "{{ s.translate({97: s}) }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "set block": BIG + "{% set b %}" + LOOP + "{{ s }}" + END + "{% endset %}",
    "json width": "{{ [[1]] | tojson(indent=10**10) }}",
    "nested, to json": "{% set n = namespace(x=['a']) %}" + NEST + "{{ n.x | tojson }}",
    "nested, printed": "{% set n = namespace(x=['a']) %}" + NEST + "{{ n.x }}",
    "nested, compared": "{% set n = namespace(x=['a']) %}" + NEST + "{{ n.x == n.x[0] }}",
    "nested, by default": "{% set n = namespace(x=['a']) %}"
    + "{% set n.x = range(2) | map(attribute='q', default=n.x) | list %}" * 60
    + "{{ n.x }}",
    "nested, by arguments": "{% set n = namespace(x=['a']) %}"
    + "{% macro m() %}{% set n.x = varargs %}{% endmacro %}"
    + "{{ m(n.x, n.x) }}" * 60
    + "{{ n.x }}",
    "nested, by dict": "{% set n = namespace(x=['a']) %}"
    + "{% set n.x = dict(a=n.x, b=n.x) %}" * 60
    + "{{ n.x }}",
    "all of a range": "{{ range(99999) | map('string') | map('center', 900) | list | length }}",
    "cycler": "{% set c = cycler('a', 'b') %}" + LOOP * 2 + "{{ c.next() }}" + END * 2,
    "joiner": "{% set j = joiner('a' * 1000) %}" + LOOP + "{{ j() }}" + END,
    "long template": "a" * (1 << 21),
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_hostile_template_is_stopped(template: str) -> None:
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"was stopped: it .*--raw"):
        render_chat(template, HI, bounds=Bounds(seconds=0.5))
    assert time.monotonic() - started < 10  # most take milliseconds; a machine may be busy


def test_namespace_that_holds_itself_prints() -> None:
    template = "{% set n = namespace() %}{% set n.a = n %}{% set n.b = n %}{{ n }}"
    assert render_chat(template, HI) == "<Namespace>"


def test_bounds_of_steps_and_length() -> None:
    template = "{% for i in range(20) %}ab{% endfor %}"
    assert render_chat(template, HI, bounds=Bounds(steps=50, length=400)) == "ab" * 20
    with pytest.raises(ModelError, match="more than 10 steps"):
        render_chat(template, HI, bounds=Bounds(steps=10))
    with pytest.raises(ModelError, match="longer than 39"):
        render_chat(template, HI, bounds=Bounds(length=39))


def test_large_conversation_is_within_bounds() -> None:
    template = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text()
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 500} for i in range(1001)]
    assert len(render_chat(template, messages)) > 2_500_000


def test_looking_at_all_messages_for_each_is_within_bounds() -> None:
    template = (
        "{% macro n_users(all) %}{{ all | selectattr('role', 'eq', 'user') | list | length }}{% endmacro %}"
        "{% for m in messages %}{{ n_users(messages[loop.index0:]) }}{{ n_users(messages) }} {% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 2000}] * 400
    assert render_chat(template, messages).startswith("400400 399400 ")


def test_sandbox_renders_as_jinja_alone() -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    template = (
        "{% set x = {'a': [1, (2, 3)], 'b': 'c' ~ 1 ~ none} %}{{ x }}{{ x | dictsort }}{{ undefined_name }}"
        "{% for a, b in [(1, 2), (3, 4)] if a > 1 recursive %}"
        "{{ loop.index }}{{ b }}{{ loop.previtem }}{% endfor %}"
        "{% for z in [] %}{% else %}none{% endfor %}{{ 'abc' | list | batch(2) | list }}{{ [3, 1] | sort }}"
        "{% call(y) f() %}{{ y }}{% endcall %}"
    )
    template = "{% macro f() %}{{ caller(5) }}{% endmacro %}" + template
    assert render_chat(template, HI) == plain.from_string(template).render(messages=HI)
