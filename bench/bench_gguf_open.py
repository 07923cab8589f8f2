"""Seconds to read the header of a model with a large vocabulary, best and median of five.

    python bench/bench_gguf_open.py [n_tokens] [n_merges]

Writes a file with that many tokens, scores, types and merges (250,000 of each by default) and reads it;
`list` is the time to decode all strings after that. The last line is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

from strata_jit.gguf.reader import open_gguf

N_REPEATS = 5
STRING, ARRAY, F32, I32 = 8, 9, 6, 5


def key(name: str, item_type: int, n_items: int) -> bytes:
    raw = name.encode()
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<IIQ", ARRAY, item_type, n_items)


def strings(words: list[str]) -> bytes:
    return b"".join(struct.pack("<Q", len(raw)) + raw for raw in (word.encode() for word in words))


def vocabulary(n_tokens: int, n_merges: int) -> bytes:
    tokens = [f"\u0120token{i:x}" for i in range(n_tokens)]
    merges = [f"\u0120to {i:x}" for i in range(n_merges)]
    return b"".join(
        [
            struct.pack("<4sIQQ", b"GGUF", 3, 0, 4),
            key("tokenizer.ggml.tokens", STRING, n_tokens) + strings(tokens),
            key("tokenizer.ggml.scores", F32, n_tokens) + bytes(4 * n_tokens),
            key("tokenizer.ggml.token_type", I32, n_tokens) + bytes(4 * n_tokens),
            key("tokenizer.ggml.merges", STRING, n_merges) + strings(merges),
        ]
    )


def main() -> None:
    n_tokens, n_merges = [int(arg) for arg in sys.argv[1:3]] or [250_000, 250_000]
    open_s, list_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        path.write_bytes(vocabulary(n_tokens, n_merges))
        for _ in range(N_REPEATS):
            start = time.perf_counter()
            model = open_gguf(path)
            opened = time.perf_counter()
            for name in ("tokens", "merges"):
                model.metadata[f"tokenizer.ggml.{name}"].tolist()
            open_s.append(opened - start)
            list_s.append(time.perf_counter() - opened)
    for name, samples in (("open", open_s), ("list", list_s)):
        print(f"{name}: best {min(samples):.3f} s, median {statistics.median(samples):.3f} s")
    print(json.dumps({"n_tokens": n_tokens, "n_merges": n_merges, "open_s": open_s, "list_s": list_s}))


if __name__ == "__main__":
    main()
