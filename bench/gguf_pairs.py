"""GGUF metadata written by hand: typed key/value pairs, and the tokenizer's share of them.

Owns: the bytes of metadata (GGUF v3, see ggml/docs/gguf.md of llama.cpp) and where a vocabulary comes from,
another file or made-up words. Knows nothing about tensors. NumPy is not needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # GGUF value types
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return gguf_string(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def f32(key: str, value: float) -> bytes:
    return pair(key, F32, struct.pack("<f", value))


def string(key: str, value: str) -> bytes:
    return pair(key, STRING, gguf_string(value))


def array(key: str, kind: int, items: list[bytes]) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(items))


def byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def made_up_words(n_words: int) -> Iterator[tuple[str, str]]:
    """Merges (left, right) of a known token and one letter: aa, aaa, ..., then the same after a space."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in letters for b in letters]
    merges = pairs + [(a + b, c) for a, b in pairs for c in letters]
    merges += [("Ġ", a) for a in letters] + [("Ġ" + a, b) for a, b in pairs]
    merges += [("Ġ" + a + b, c) for a, b in pairs for c in letters]
    merges += [(a.upper(), b) for a, b in pairs] + [(a.upper() + b, c) for a, b in pairs for c in letters]
    if n_words > len(merges):
        raise SystemExit(f"error: at most {len(merges) + 259} tokens can be made up; take --vocab-from")
    yield from merges[:n_words]


def made_up_vocab(n_vocab: int) -> tuple[list[bytes], int]:
    """A byte-level vocabulary that needs no other file: 3 control tokens, 256 bytes, then made-up words."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = list(made_up_words(n_vocab - 256 - len(control)))
    tokens = [*control, *byte_letters(), *(left + right for left, right in merges)]
    kinds = [3] * len(control) + [1] * (len(tokens) - len(control))
    return [
        string("tokenizer.ggml.model", "gpt2"),
        string("tokenizer.ggml.pre", "smollm"),
        array("tokenizer.ggml.tokens", STRING, [gguf_string(t) for t in tokens]),
        array("tokenizer.ggml.token_type", I32, [struct.pack("<i", k) for k in kinds]),
        array("tokenizer.ggml.merges", STRING, [gguf_string(f"{a} {b}") for a, b in merges]),
        u32("tokenizer.ggml.bos_token_id", 1),
        u32("tokenizer.ggml.eos_token_id", 2),
        pair("tokenizer.ggml.add_bos_token", BOOL, b"\0"),
    ], len(tokens)


class PairReader:
    """Walks the metadata of a GGUF file (version 2 or 3) without decoding it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def take(self, n: int) -> bytes:
        data = self.file.read(n)
        if len(data) != n:
            raise SystemExit("error: --vocab-from: the file ends inside its metadata")
        return data

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> bytes:
        head = self.take(8)
        return head + self.take(struct.unpack("<Q", head)[0])

    def value(self, kind: int) -> bytes:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            head = self.take(12)
            inner, count = struct.unpack("<IQ", head)
            if inner in SCALAR_BYTES:
                return head + self.take(SCALAR_BYTES[inner] * count)
            return head + b"".join(self.value(inner) for _ in range(count))
        if kind not in SCALAR_BYTES:
            raise SystemExit(f"error: --vocab-from: unknown metadata type {kind}")
        return self.take(SCALAR_BYTES[kind])


def copied_vocab(path: Path) -> tuple[list[bytes], int]:
    """The `tokenizer.*` metadata of another GGUF, byte by byte, and its number of tokens."""
    pairs: list[bytes] = []
    n_vocab = 0
    with path.open("rb") as file:
        reader = PairReader(file)
        if reader.take(4) != b"GGUF" or reader.number("<I") not in (2, 3):
            raise SystemExit(f"error: --vocab-from: {path} is not a GGUF file of version 2 or 3")
        _, n_pairs = reader.number("<Q"), reader.number("<Q")
        for _ in range(n_pairs):
            key, kind = reader.text()[8:].decode(), reader.number("<I")
            value = reader.value(kind)
            if key.startswith("tokenizer."):
                pairs.append(pair(key, kind, value))
            if key == "tokenizer.ggml.tokens":
                n_vocab = struct.unpack_from("<Q", value, 4)[0]
    if not n_vocab:
        raise SystemExit(f"error: --vocab-from: {path} has no tokenizer.ggml.tokens")
    return pairs, n_vocab
