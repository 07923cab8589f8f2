"""How well a model file knows the text that was held out, computed by strata-jit.

    python evaluate.py WORK MODEL.gguf

Prints the perplexity and which experts were chosen how often. WORK is the folder of the training run. Needs
nothing of PyTorch; `tests/test_builtin.py` uses the two functions too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import strata_jit

WINDOW = 1024


def surprise(model: strata_jit.Model, ids: list[int]) -> Iterator[np.ndarray]:
    """Nats of each id but the first, given those before it, window by window: float64[n - 1]."""
    for start in range(0, len(ids) - 1, WINDOW - 1):
        window = ids[start : start + WINDOW]
        logits = model.logits(window[:-1]).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(logits)), window[1:]]
        yield np.log(np.exp(logits).sum(axis=1)) - chosen


class ExpertCounts:
    """Counts the experts that the engine chooses: stops each step of a model after every routing to look."""

    def __init__(self, model: strata_jit.Model) -> None:
        self.pool = pool = model._pool
        program = pool.spec.program
        self.n_ops = len(program.ops)
        self.routes = [i for i, op in enumerate(program.ops) if op.name == "route"]
        (buffer,) = [buffer.id for buffer in program.buffers if buffer.name == "expert_ids"]
        self.ids = pool.buffer(buffer, np.dtype(np.int64))
        arch = model.info.arch
        self.n_expert = model._file.get(f"{arch}.expert_count", int)
        self.n_used = model._file.get(f"{arch}.expert_used_count", int)
        self.counts = np.zeros((len(self.routes), self.n_expert), np.int64)
        self._run, pool.run = pool.run, self.run

    def run(self, first_op: int, n_ops: int, n_rows: int, n_out: int) -> None:
        assert (first_op, n_ops) == (0, self.n_ops)
        begin = 0
        for layer, route in enumerate(self.routes):
            self._run(begin, route + 1 - begin, n_rows, n_out)
            if n_rows > 1:  # one row's choices stay with the threads
                self.counts[layer] += np.bincount(self.ids[: n_rows * self.n_used], minlength=self.n_expert)
            begin = route + 1
        self._run(begin, self.n_ops - begin, n_rows, n_out)


def main() -> None:
    from corpus import chapters, download, split

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of the training run")
    parser.add_argument("model", type=Path, help="GGUF file, float or quantised")
    parser.add_argument("--reference", action="store_true", help="float weights and activations")
    args = parser.parse_args()
    _, texts = split(chapters(download(args.work)))
    with strata_jit.load(args.model, ctx=WINDOW, reference=args.reference) as model:
        end = model.tokenizer.token_text(model.tokenizer.bos_id)
        ids = model.tokenizer.encode("".join(end + text for text in texts))
        counts = ExpertCounts(model)
        nats = np.concatenate(list(surprise(model, ids)))
    n_bytes = sum(len(text.encode()) for text in texts)
    print(f"{len(texts)} chapters, {n_bytes} bytes, {len(nats)} tokens")
    bits = nats.sum() / math.log(2)
    print(f"perplexity {math.exp(nats.mean()):.2f} a token, {bits / n_bytes:.3f} bits a byte")
    for layer, row in enumerate(counts.counts):
        print(f"layer {layer}: share of each expert in %:", *np.round(100 * row / row.sum(), 1))


if __name__ == "__main__":
    main()
