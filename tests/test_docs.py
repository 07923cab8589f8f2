"""The examples of docs/library.md and the README run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "docs" / "library.md"
MODEL = Path(__file__).parent / "data" / "golden" / "qwen3moe-nl" / "model.gguf"


def examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


EXAMPLES = examples(LIBRARY)


def test_there_are_examples():
    assert len(EXAMPLES) == 10


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number):
    names = {"MODEL": MODEL}
    exec("import strata_jit", names)
    exec(compile(EXAMPLES[number], f"{LIBRARY.name}, example {number + 1}", "exec"), names)


def test_readme_example_runs():
    (example,) = examples(ROOT / "README.md")
    assert '"model.gguf"' in example
    exec(compile(example.replace('"model.gguf"', repr(str(MODEL))), "README.md", "exec"), {})
