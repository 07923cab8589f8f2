"""The examples of docs/library.md run as they stand."""

import re
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "docs" / "library.md"
MODEL = Path(__file__).parent / "data" / "golden" / "qwen3moe-nl" / "model.gguf"
EXAMPLES = re.findall(r"```python\n(.*?)```", LIBRARY.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) == 7


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number):
    names = {"MODEL": MODEL}
    exec("import strata_jit", names)
    exec(compile(EXAMPLES[number], f"{LIBRARY.name}, example {number + 1}", "exec"), names)
