"""From prompts to ids: the template's place, one beginning token, the size of the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata_jit.engine.prompt import choose_context, encode_prompt, messages_of, prompt_text, render_messages
from strata_jit.errors import ModelError, UsageError
from strata_jit.gguf.reader import GGUFFile

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}>"
BOS = 1


class LetterTokenizer:
    """A token per character; adds the beginning token unless the text begins with it."""

    bos_id, eos_id = BOS, 2

    def encode(self, text: str) -> list[int]:
        return [BOS, *(ord(char) for char in text.removeprefix("<s>"))]

    def token_text(self, token_id: int) -> str:
        return ["<unk>", "<s>", "</s>"][token_id]


def gguf(**keys: Any) -> GGUFFile:
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 100,
    }
    metadata |= {name.replace("__", "."): value for name, value in keys.items()}
    path = Path("m.gguf")
    return GGUFFile(path=path, parts=(path,), version=3, alignment=32, metadata=metadata, tensors={})


def encode(file: GGUFFile, text: str, system: str | None = None, raw: bool = False) -> str:
    """The ids as text again, the beginning token as ^."""
    ids = encode_prompt(file, text, system, raw, LetterTokenizer())  # type: ignore[arg-type]
    return "".join("^" if id == BOS else chr(id) for id in ids)


def test_encode_prompt_renders_template() -> None:
    file = gguf(tokenizer__chat_template=TEMPLATE)
    assert encode(file, "hi") == "^[user:hi]>"
    assert encode(file, "hi", "be brief") == "^[system:be brief][user:hi]>"


def test_encode_prompt_adds_bos_that_template_lacks() -> None:
    assert encode(gguf(tokenizer__chat_template="{{ messages[0].content }}"), "hi") == "^hi"


def test_encode_prompt_raw_needs_no_template() -> None:
    assert encode(gguf(), "hi", raw=True) == "^hi"


def test_encode_prompt_without_template_names_raw() -> None:
    with pytest.raises(UsageError, match=r"m\.gguf: .*tokenizer\.chat_template.*--raw"):
        encode(gguf(), "hi")


def test_encode_prompt_refuses_system_with_raw() -> None:
    with pytest.raises(UsageError, match="--system or --raw"):
        encode(gguf(tokenizer__chat_template=TEMPLATE), "hi", "be brief", raw=True)


def test_encode_prompt_refuses_no_tokens() -> None:
    class Empty(LetterTokenizer):
        def encode(self, text: str) -> list[int]:
            return []

    with pytest.raises(UsageError, match="no tokens"):
        encode_prompt(gguf(), "", raw=True, tokenizer=Empty())  # type: ignore[arg-type]


def test_render_messages_gives_template_both_tokens() -> None:
    file = gguf(tokenizer__chat_template="{{ bos_token }}|{{ eos_token }}")
    assert render_messages(file, LetterTokenizer(), messages_of("hi")) == "<s>|</s>"  # type: ignore[arg-type]


@pytest.mark.parametrize(("think", "rendered"), [(None, "unset"), (True, "True"), (False, "False")])
def test_render_messages_sets_thinking(think: bool | None, rendered: str) -> None:
    file = gguf(tokenizer__chat_template="{{ enable_thinking | default('unset') }}")
    tokenizer: Any = LetterTokenizer()
    assert render_messages(file, tokenizer, messages_of("hi"), think) == rendered


def test_encode_prompt_refuses_thinking_with_raw() -> None:
    with pytest.raises(UsageError, match="--no-think, or --raw"):
        encode_prompt(gguf(), "hi", raw=True, tokenizer=LetterTokenizer(), think=False)  # type: ignore[arg-type]


def test_prompt_text_names_the_byte() -> None:
    assert prompt_text("é".encode(), "stdin") == "é"
    with pytest.raises(UsageError, match=r"^stdin: .*byte 0xe9 at offset 3"):
        prompt_text(b"caf\xe9", "stdin")


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "asked", "expected"),
    [(10, 20, None, 30), (10, 128, None, 100), (100, 1, None, 100), (10, 20, 15, 15), (10, 20, 100, 100)],
)
def test_choose_context(n_prompt: int, max_tokens: int, asked: int | None, expected: int) -> None:
    assert choose_context(gguf(), n_prompt, max_tokens, asked) == expected


@pytest.mark.parametrize(("n_prompt", "asked"), [(101, None), (10, 101), (10, 9)])
def test_choose_context_refuses(n_prompt: int, asked: int | None) -> None:
    with pytest.raises(UsageError):
        choose_context(gguf(), n_prompt, 5, asked)


def test_choose_context_names_missing_key() -> None:
    with pytest.raises(ModelError, match=r"other\.context_length"):
        choose_context(gguf(general__architecture="other"), 10, 5)
