"""What a GGUF file says of its vocabulary: tokens, their types, the ids with a meaning of their own.

Owns the keys `tokenizer.ggml.*`, their checks, and which tokens end a generation; knows no way of cutting
text into tokens. Key names: ggml's docs/gguf.md; token types and the list of end names: llama.cpp's
llama-vocab.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_jit.errors import ModelError, quoted
from strata_jit.gguf.metadata import StringArray
from strata_jit.gguf.reader import GGUFFile

PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Kind of a token, as stored in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_HIDDEN = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED)
_END_NAMES = (
    "<|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <|calls|> "
    "<|flush|> <end_of_turn> <end_of_utterance> <eos> </s> <EOT> _<EOT> [EOT] [EOS] [e~[ "
    "<｜end▁of▁sentence｜> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()
"""Tokens that end a generation wherever a vocabulary has them as control or user-defined tokens.

Besides ends of turns and texts these are the marks that code models write where one file ends and
another would begin.
"""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model.

    `tokens[id]` is a token's text as stored, `ids` the way back, `types` int32[n_vocab] holds `TokenType`
    values (with ends of generation made CONTROL). `model` is the kind of tokenizer ("gpt2", "llama"), `pre`
    the name of its pre-tokenizer, `name` that of the model. `add_bos` is None where the file does not say.
    `path` is for messages.
    """

    path: Path
    name: str
    model: str
    pre: str
    tokens: list[str]
    ids: dict[str, int]
    types: NDArray[np.int32]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool | None

    def of_type(self, *types: TokenType) -> dict[str, int]:
        """Text and id of all tokens of the given types."""
        found = np.flatnonzero(np.isin(self.types, types)).tolist()
        return {self.tokens[token_id]: token_id for token_id in found}

    def hidden_ids(self) -> frozenset[int]:
        """Tokens that are no part of a text: control, unknown and unused ones."""
        return frozenset(np.flatnonzero(np.isin(self.types, _HIDDEN)).tolist())


def read_vocabulary(gguf: GGUFFile) -> Vocabulary:
    """The vocabulary of a file; `ModelError` if it has none or an inconsistent one."""
    model = gguf.get(f"{PREFIX}model", str)
    tokens = gguf.get(f"{PREFIX}tokens", StringArray).tolist()
    if not tokens:
        raise ModelError.at(gguf.path, quoted(f"{PREFIX}tokens"), "no tokens", "a vocabulary")
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    types = _types(gguf, len(tokens))
    # a sentencepiece vocabulary that says nothing has its first three tokens in this order
    unknown, bos, eos = (0, 1, 2) if model == "llama" else (None, None, None)
    eos_id = _token_id(gguf, "eos", len(tokens), eos)
    return Vocabulary(
        path=gguf.path,
        name=gguf.get("general.name", str, ""),
        model=model,
        pre=gguf.get(f"{PREFIX}pre", str, "default"),
        tokens=tokens,
        ids=ids,
        types=types,
        bos_id=_token_id(gguf, "bos", len(tokens), bos),
        eos_id=eos_id,
        unknown_id=_token_id(gguf, "unknown", len(tokens), unknown),
        eog_ids=_end_ids(gguf, ids, types, eos_id),
        add_bos=gguf.get(f"{PREFIX}add_bos_token", bool, None),
    )


def read_merges(gguf: GGUFFile) -> list[tuple[str, str]]:
    """The pairs that byte pair encoding merges, first the one to merge first; `ModelError` if malformed."""
    key = f"{PREFIX}merges"
    merges = [tuple(merge.split(" ")) for merge in gguf.get(key, StringArray).tolist()]
    if not set(map(len, merges)) <= {2}:
        i = next(i for i, merge in enumerate(merges) if len(merge) != 2)
        raise ModelError.at(gguf.path, f"{key}[{i}]", quoted(" ".join(merges[i])), "two tokens and one space")
    return merges  # type: ignore[return-value]  # checked for all at once


def read_scores(gguf: GGUFFile, n_vocab: int) -> list[float]:
    """The scores of a sentencepiece vocabulary, one a token; `ModelError` if there are more or fewer."""
    key = f"{PREFIX}scores"
    scores = gguf.get(key, np.ndarray)
    if len(scores) != n_vocab:
        raise ModelError.at(gguf.path, quoted(key), f"{len(scores)} scores", f"one for each of {n_vocab}")
    return [float(score) for score in scores.tolist()]


def _types(gguf: GGUFFile, n_vocab: int) -> NDArray[np.int32]:
    key = f"{PREFIX}token_type"
    types = gguf.get(key, np.ndarray, None)
    if types is None:
        return np.full(n_vocab, TokenType.NORMAL, np.int32)
    if len(types) != n_vocab:
        raise ModelError.at(gguf.path, quoted(key), f"{len(types)} types", f"one for each of {n_vocab}")
    return types.astype(np.int32)


def _token_id(gguf: GGUFFile, name: str, n_vocab: int, default: int | None = None) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    token_id = gguf.get(key, int, None)
    if token_id is None:
        return default if default is None or default < n_vocab else None
    if not 0 <= token_id < n_vocab:
        raise ModelError.at(gguf.path, quoted(key), str(token_id), f"a token id below {n_vocab}")
    return token_id


def _end_ids(
    gguf: GGUFFile, ids: dict[str, int], types: NDArray[np.int32], eos_id: int | None
) -> frozenset[int]:
    """The ends of generation, which become control tokens in `types`."""
    special = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    named = {name for name in _END_NAMES if name in ids and types[ids[name]] in special}
    if {"<|return|>", "<|call|>"} <= named or {"<|flush|>", "<|calls|>"} <= named:
        named.discard("<|end|>")  # there it only ends one message of several
    ends = {ids[name] for name in named}
    types[list(ends)] = TokenType.CONTROL
    told = (eos_id, *(_token_id(gguf, name, len(types)) for name in ("eot", "eom")))
    return frozenset(ends | {token_id for token_id in told if token_id is not None})
