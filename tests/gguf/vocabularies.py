"""Small GGUF files that hold a vocabulary alone, for the tests of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.gguf import build

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"


def byte_letters() -> list[str]:
    """GPT-2's letters of the 256 bytes, in the order of the bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters, n_other = [], 0
    for byte in range(256):
        letters.append(chr(byte) if byte in plain else chr(256 + n_other))
        n_other += byte not in plain
    return letters


def vocabulary(
    tokens: Sequence[str],
    types: Sequence[int] | None = None,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    **keys: object,
) -> bytes:
    """A file with these tokens; `keys` are further ones below "tokenizer.ggml.", `name` the model's name."""
    arrays = {
        "tokens": (build.STRING, tokens),
        "token_type": (build.I32, types),
        "merges": (build.STRING, merges),
        "scores": (build.F32, scores),
    }
    pairs = [build.pair("general.name", build.STRING, build.string(str(keys.pop("name", "test"))))]
    for key, (item_type, items) in arrays.items():
        if items is not None:
            pairs.append(build.pair(f"tokenizer.ggml.{key}", build.ARRAY, build.array(item_type, items)))
    for key, value in keys.items():
        kind = {str: build.STRING, bool: build.BOOL, int: build.U32}[type(value)]
        pairs.append(build.pair(f"tokenizer.ggml.{key}", kind, build.scalar(kind, value)))
    return build.gguf(pairs)


def byte_level(
    extra: Sequence[str] = (), types: Sequence[int] = (), merges: Sequence[str] = (), **keys: object
) -> bytes:
    """A gpt2 vocabulary: 256 byte letters (token id = byte), what `merges` make, then `extra` of `types`."""
    made = [merge.replace(" ", "") for merge in merges]
    tokens = [*byte_letters(), *made, *extra]
    all_types = [NORMAL] * (256 + len(made)) + list(types)
    return vocabulary(tokens, all_types, merges, **{"model": "gpt2", "pre": "gpt-2", **keys})


def sentencepiece(pieces: dict[str, float], extra: dict[str, int] | None = None, **keys: object) -> bytes:
    """A llama vocabulary: <unk>, <s>, </s>, 256 byte tokens (id = 3 + byte), pieces with scores, `extra`."""
    special = extra or {}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *special]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), *special.values()]
    scores = [0.0] * 259 + list(pieces.values()) + [0.0] * len(special)
    return vocabulary(tokens, types, scores=scores, **{"model": "llama", **keys})


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
