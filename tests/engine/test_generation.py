"""The decode loop on scripted logits: why it stops, what it prints, what it reports."""

import numpy as np
import pytest

from strata_jit.engine.generation import Generation
from strata_jit.engine.sample import Sampling

EOS = 0
PROMPT = [5, 6, 7]
VOCABULARY = {1: b"a", 2: b"b", 3: "é".encode()[:1], 4: "é".encode()[1:], EOS: b"<end>"}


class FakeTokenizer:
    """What a generation asks of a tokenizer."""

    eog_ids = frozenset({EOS})

    def token_bytes(self, token):
        return VOCABULARY[token]

    def is_control(self, token):
        return token == EOS


class FakeStepper:
    """Logits whose best tokens follow a script; raises what stands in it as an exception."""

    def __init__(self, script):
        self.script = iter(script)
        self.steps = []

    def begin(self, user):
        self.user = user

    def check(self, user):
        assert user is self.user

    def prompt(self, tokens):
        return self._logits()

    def step(self, tokens, position, want):
        self.steps.append((list(tokens), position))
        return self._logits()[None]

    def _logits(self):
        token = next(self.script)
        if isinstance(token, type):
            raise token
        return np.eye(8, dtype=np.float32)[token]


def generate(script, max_tokens=10, n_ctx=100):
    stepper = FakeStepper(script)
    return stepper, Generation(
        stepper, FakeTokenizer(), PROMPT, max_tokens, n_ctx, Sampling(), wait_ns=lambda: 0.0
    )


def test_end_token_stops_and_is_not_printed():
    stepper, generation = generate([1, 2, EOS])
    assert "".join(generation) == "ab"
    result = generation.result
    assert (result.text, result.token_ids, result.stop_reason) == ("ab", (1, 2), "eos")
    assert stepper.steps == [([1], 3), ([2], 4)]


def test_end_token_at_once():
    _, generation = generate([EOS])
    assert "".join(generation) == ""
    assert generation.result.generated_tokens == 0
    assert generation.result.stop_reason == "eos"
    assert generation.result.ttft_s is None


def test_max_tokens():
    stepper, generation = generate([1] * 5, max_tokens=3)
    assert "".join(generation) == "aaa"
    assert generation.result.stop_reason == "length"
    assert len(stepper.steps) == 2, "the last token needs no step"


def test_no_tokens_asked_for():
    _, generation = generate([], max_tokens=0)
    assert list(generation) == []
    assert generation.result.stop_reason == "length"


def test_full_context():
    _, generation = generate([1] * 10, n_ctx=5)
    assert "".join(generation) == "aaa"
    assert generation.result.stop_reason == "context"


def test_pieces_are_whole_characters():
    _, generation = generate([1, 3, 4, EOS])
    assert list(generation) == ["a", "é"]


def test_cut_character_at_the_end_is_not_printed():
    _, generation = generate([1, 3], max_tokens=2)
    assert "".join(generation) == "a"
    assert generation.result.token_ids == (1, 3)


def test_interrupt_keeps_the_text():
    _, generation = generate([1, 2, KeyboardInterrupt])
    pieces = []
    with pytest.raises(KeyboardInterrupt):
        for piece in generation:
            pieces.append(piece)
    assert pieces == ["a", "b"]
    assert generation.result.text == "ab"
    assert generation.result.stop_reason == "interrupted"


def test_close_early():
    _, generation = generate([1, 2, 1, 2])
    assert next(generation) == "a"
    generation.close()
    assert generation.result.stop_reason == "interrupted"
    assert generation.result.text == "a"
    assert list(generation) == []


def test_result_is_none_while_running():
    _, generation = generate([1, 2, EOS])
    next(generation)
    assert generation.result is None
