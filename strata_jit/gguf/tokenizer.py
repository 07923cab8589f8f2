"""Text to token ids and back, as a GGUF file's own vocabulary has it.

Owns `Tokenizer`: special tokens, the begin-of-text token, decoding. The ways of cutting plain text are in
`bpe` and `spm`; chat templates and streaming are elsewhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Protocol

from strata_jit.errors import ModelError, UsageError, quoted
from strata_jit.gguf.bpe import RankedBPE, spelt_bytes
from strata_jit.gguf.pretokenizers import PRE_TOKENIZERS
from strata_jit.gguf.reader import GGUFFile, open_gguf
from strata_jit.gguf.special import SpecialTokens
from strata_jit.gguf.spm import SPACE, SentencePieceBPE
from strata_jit.gguf.vocabulary import (
    PREFIX,
    TokenType,
    Vocabulary,
    read_merges,
    read_scores,
    read_vocabulary,
)

_KINDS = ("gpt2", "gemma4", "llama")


class _Encoder(Protocol):
    """A way of cutting text that holds no special tokens."""

    def encode(self, text: str, after_special: bool = True) -> list[int]: ...


class Tokenizer:
    """The tokenizer of a model.

    `n_vocab` is the number of tokens; `bos_id` and `eos_id` may be None; `eog_ids` are the tokens that end a
    generation; `add_bos` tells whether a prompt begins with `bos_id` by default. `forced` is a warning where
    words are cut by rules that the file did not ask for, else None. Safe to use from several threads.
    """

    forced: str | None = None

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: _Encoder,
        add_bos: bool,
        *,
        space_prefix: bool = False,
        letters: bool = False,
    ) -> None:
        """See `from_gguf`, which is the way to make one.

        `space_prefix`: encoding puts a space before a text; `letters`: tokens are spelt in byte letters.
        """
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        self.add_bos = add_bos
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._space_prefix = space_prefix
        self._letters = letters
        self._hidden = vocabulary.hidden_ids() | vocabulary.eog_ids
        self._bytes: dict[int, bytes] = {}
        user_defined = vocabulary.of_type(TokenType.USER_DEFINED)
        special = user_defined | vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        swallowing = _swallowing(vocabulary, special)
        self._special = SpecialTokens(special, swallowing)
        self._user_defined = SpecialTokens(user_defined, swallowing)

    @classmethod
    def from_gguf(cls, source: GGUFFile | str | os.PathLike[str], *, force: bool = False) -> Tokenizer:
        """The tokenizer of a GGUF file, which may hold a vocabulary alone.

        Raises `ModelError` for a malformed vocabulary, for a kind of tokenizer that is not supported, and for
        an unknown pre-tokenizer, unless `force` says to cut words by the "default" rules then.
        """
        gguf = source if isinstance(source, GGUFFile) else open_gguf(source)
        check_kind(gguf, force=force)
        vocabulary = read_vocabulary(gguf)
        if vocabulary.model == "llama":
            return cls._sentencepiece(gguf, vocabulary)
        return cls._ranked(gguf, vocabulary)

    @classmethod
    def _ranked(cls, gguf: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
        pre = "gemma4" if vocabulary.model == "gemma4" else vocabulary.pre
        rules = PRE_TOKENIZERS.get(pre, PRE_TOKENIZERS["default"])
        encoder = RankedBPE(vocabulary.ids, read_merges(gguf), rules)
        tokenizer = cls(vocabulary, encoder, _add_bos(vocabulary, rules.add_bos), letters=not rules.raw)
        if pre not in PRE_TOKENIZERS:
            name = quoted(pre)
            tokenizer.forced = f"words are cut by the default rules, not by those of the unknown {name}"
        return tokenizer

    @classmethod
    def _sentencepiece(cls, gguf: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
        prefix = gguf.get(f"{PREFIX}add_space_prefix", bool, True)
        scores = read_scores(gguf, len(vocabulary.tokens))
        encoder = SentencePieceBPE(vocabulary.ids, scores, vocabulary.unknown_id, prefix)
        return cls(vocabulary, encoder, _add_bos(vocabulary, True), space_prefix=prefix)

    def encode(self, text: str, special: bool = True, bos: bool | None = None) -> list[int]:
        """The ids of a text.

        `special`: whether the text of a control token, such as "<|im_end|>", stands for that token; with
        False it is text like any other (user-defined tokens are always recognised: they are part of the
        text's alphabet). `bos`: whether to begin with `bos_id`; None does what the file says, unless the text
        begins with that token already, as what chat templates make often does. No end token is ever added.
        Raises `UsageError` for a text that cannot be UTF-8, and where `bos` is asked of a model without one.
        """
        _check_text(text)
        ids: list[int] = []
        after_special = True
        for piece in (self._special if special else self._user_defined).split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encoder.encode(piece, after_special)
            after_special = isinstance(piece, int)
        return self._with_bos(ids, bos)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of ids, control tokens as their names or, with `skip_special`, left out.

        Bytes that are no UTF-8 become U+FFFD. Where encoding puts a space before a text (sentencepiece), one
        leading space is taken away again.
        """
        wanted = [token_id for token_id in ids if not (skip_special and self.is_control(token_id))]
        parts = [self.token_bytes(token_id) for token_id in wanted]
        if self._space_prefix:
            first = next((i for i, token_id in enumerate(wanted) if not self.is_control(token_id)), None)
            if first is not None:
                parts[first] = parts[first].removeprefix(b" ")
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's are its name. `UsageError` if out of range."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._token_bytes(token_id)
        return data

    def token_text(self, token_id: int | None) -> str:
        """A token's text as the file has it, such as "<s>", "" for None: what chat templates are given."""
        return "" if token_id is None else self._vocabulary.tokens[token_id]

    def vocabulary_sha256(self) -> str:
        """SHA-256, in hex, of all tokens in order: their lengths in bytes (little-endian u32) and texts."""
        digest = hashlib.sha256()
        for text in self._vocabulary.tokens:
            raw = text.encode()
            digest.update(len(raw).to_bytes(4, "little") + raw)
        return digest.hexdigest()

    def is_control(self, token_id: int) -> bool:
        """Whether a token is no part of a text: control, unknown, unused, or an end of generation."""
        return token_id in self._hidden

    def _with_bos(self, ids: list[int], bos: bool | None) -> list[int]:
        if bos is None:
            bos = self.add_bos and ids[:1] != [self.bos_id]
        if not bos:
            return ids
        if self.bos_id is None:
            raise UsageError(f"{self._vocabulary.path}: has no begin-of-text token to put before a prompt")
        return [self.bos_id, *ids]

    def _token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.n_vocab:
            raise UsageError(f"token id {token_id} is not in the vocabulary of {self.n_vocab} tokens")
        text = self._vocabulary.tokens[token_id]
        kind = self._vocabulary.types[token_id]
        if kind == TokenType.BYTE:
            return _stated_byte(text)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
            return text.encode()
        return spelt_bytes(text) if self._letters else text.replace(SPACE, " ").encode()


def check_kind(gguf: GGUFFile, *, force: bool = False) -> None:
    """`ModelError` for a kind of tokenizer, or a pre-tokenizer, that is not supported; builds nothing.

    Other rules than the model was trained with would give worse text without any other sign, so an unknown
    pre-tokenizer is refused unless `force`.
    """
    model, pre = gguf.get(f"{PREFIX}model", str), gguf.get(f"{PREFIX}pre", str, "default")
    if model not in _KINDS:
        field, expected = quoted(f"{PREFIX}model"), " or ".join(_KINDS)
        raise ModelError.at(gguf.path, field, f"{quoted(model)}, not supported", expected)
    if model == "gpt2" and pre not in PRE_TOKENIZERS and not force:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        found = f"{quoted(pre)}, a pre-tokenizer that is not supported"
        expected = f"one of {known}; --force cuts words by the default rules"
        raise ModelError.at(gguf.path, quoted(f"{PREFIX}pre"), found, expected)


def _add_bos(vocabulary: Vocabulary, default: bool) -> bool:
    add_bos = default if vocabulary.add_bos is None else vocabulary.add_bos
    if vocabulary.add_bos and vocabulary.bos_id is None:
        field = quoted(f"{PREFIX}add_bos_token")
        raise ModelError.at(vocabulary.path, field, "true without a bos_token_id", "both or neither")
    return add_bos and vocabulary.bos_id is not None


def _swallowing(vocabulary: Vocabulary, special: dict[str, int]) -> frozenset[int]:
    """Phi-3's special tokens take white space behind them; a file shows that only by the model's name."""
    if "phi3" not in vocabulary.name.lower().replace("-", "").replace(" ", ""):
        return frozenset()
    plain = ("<unk>", "<s>", "<|endoftext|>")
    return frozenset(token_id for text, token_id in special.items() if text not in plain)


def _stated_byte(text: str) -> bytes:
    """The byte of a token "<0xHH>"; its text's bytes where it is none."""
    try:
        return bytes([int(text[3:5], 16)]) if text.startswith("<0x") else text.encode()
    except ValueError:
        return text.encode()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid UTF-8 at character {error.start}") from None
