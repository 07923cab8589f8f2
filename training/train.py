"""Trains the model, for as many minutes as it is given, and can be stopped and resumed.

    python train.py WORK --minutes 70

WORK holds the text's package, the vocabulary, the checkpoint and a log; what is there is gone on with. The
rate of learning rises, stays and falls to zero over the minutes given: the end is planned with the beginning.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import prepare
from moe import MoE, Shape
from muon import Muon

TOKENS_PER_STEP = 2048
# The length of sequences up to a share of the time: short ones are cheaper, the last make the context real.
LENGTHS = ((0.6, 256), (0.85, 512), (1.0, 1024))
WARM_UP, DECAY_FROM = 0.02, 0.4
BALANCE_WEIGHT = 0.03
SAVE_SECONDS = 300


def rate(progress: float) -> float:
    """The share of the learning rate at `progress` from 0 to 1."""
    return min(progress / WARM_UP + 0.01, 1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))


def batches(ids: np.ndarray, rng: np.random.Generator, n_rows: int, length: int) -> Iterator[torch.Tensor]:
    """Rows of length + 1 ids, all of the text once in an order of chance, again and again with other cuts."""
    while True:
        starts = np.arange(rng.integers(length), len(ids) - length, length)
        rng.shuffle(starts)
        for i in range(0, len(starts) - n_rows + 1, n_rows):
            rows = starts[i : i + n_rows, None] + np.arange(length + 1)
            yield torch.from_numpy(ids[rows])


def loss_of(model: MoE, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, balance, counts = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), balance, counts


@torch.no_grad()
def held_out_loss(model: MoE, ids: np.ndarray, length: int = 512) -> tuple[float, torch.Tensor]:
    """Nats per token, in windows of `length`, and tokens per expert [n_layer, n_expert]."""
    starts = np.arange(0, len(ids) - length, length)
    rows = torch.from_numpy(ids[starts[:, None] + np.arange(length + 1)])
    parts = [loss_of(model, part) for part in rows.split(8)]
    weights = [len(part) for part in rows.split(8)]
    mean = np.average([float(loss) for loss, _, _ in parts], weights=weights)
    return float(mean), sum(counts for _, _, counts in parts)


class Run:
    """A training run and all that a checkpoint holds."""

    def __init__(self, work: Path, threads: int) -> None:
        self.pool = ThreadPoolExecutor(threads)
        self.threads = threads
        self.path = work / "checkpoint.pt"
        self.tokenizer, self.train_ids, self.held_out_ids = prepare(work)
        torch.manual_seed(1)
        self.model = MoE(Shape(n_vocab=self.tokenizer.get_vocab_size()))
        hidden = [p for name, p in self.model.named_parameters() if p.ndim > 1 and is_hidden(name)]
        others = [p for name, p in self.model.named_parameters() if p.ndim < 2 or not is_hidden(name)]
        adam = torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimisers = [*(Muon(hidden[i::2]) for i in range(2)), adam]
        self.peaks = [optimiser.param_groups[0]["lr"] for optimiser in self.optimisers]
        self.seconds, self.step, self.tokens = 0.0, 0, 0
        if self.path.exists():
            self.load()

    def load(self) -> None:
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.seconds, self.step, self.tokens = state["seconds"], state["step"], state["tokens"]

    def save(self) -> None:
        state = {
            "shape": asdict(self.model.s),
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "seconds": self.seconds,
            "step": self.step,
            "tokens": self.tokens,
        }
        torch.save(state, self.path.with_suffix(".new"))
        os.replace(self.path.with_suffix(".new"), self.path)

    def update(self, rows: torch.Tensor, share: float) -> dict[str, float]:
        """One step on rows [n, length + 1]."""
        figures, gradients = zip(*self.pool.map(self.gradient, rows.chunk(self.threads)), strict=True)
        for p, *parts in zip(self.model.parameters(), *gradients, strict=True):
            p.grad = torch.stack(parts).mean(dim=0)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        for optimiser, peak in zip(self.optimisers, self.peaks, strict=True):
            optimiser.param_groups[0]["lr"] = peak * share
        list(self.pool.map(lambda optimiser: optimiser.step(), self.optimisers))
        loss, balance = np.mean(figures, axis=0).tolist()
        return {"loss": loss, "balance": balance, "norm": norm}

    def gradient(self, rows: torch.Tensor) -> tuple[tuple[float, float], tuple[torch.Tensor, ...]]:
        """(loss, balance) of a thread's share of the rows, and the gradient of every parameter."""
        torch.set_num_threads(1)
        loss, balance, _ = loss_of(self.model, rows)
        total = loss + BALANCE_WEIGHT * balance
        return (loss.item(), balance.item()), torch.autograd.grad(total, list(self.model.parameters()))


def is_hidden(name: str) -> bool:
    """Whether a matrix is one of those that Muon is for: neither the embedding nor a router."""
    return "embedding" not in name and "router" not in name


def train(run: Run, budget: float) -> None:
    """Go on until `budget` seconds of training are used, over all calls."""
    saved = last = time.monotonic()
    length, source = 0, iter(())
    while run.seconds < budget:
        progress = run.seconds / budget
        wanted = next(n for until, n in LENGTHS if progress < until)
        if wanted != length:
            length = wanted
            rng = np.random.default_rng([run.step, length])
            source = batches(run.train_ids, rng, TOKENS_PER_STEP // length, length)
        figures = run.update(next(source), rate(progress))
        now = time.monotonic()
        run.seconds += now - last
        run.step += 1
        run.tokens += TOKENS_PER_STEP
        last = now
        if run.step % 10 == 0:
            log(run, **figures, length=length)
        if now - saved > SAVE_SECONDS:
            run.save()
            loss, counts = held_out_loss(run.model, run.held_out_ids[:12288])
            log(run, held_out=loss, least_share=(counts.min() / counts.sum(dim=1)[0]).item())
            saved = last = time.monotonic()
    run.save()
    loss, counts = held_out_loss(run.model, run.held_out_ids)
    log(run, held_out=loss, perplexity=math.exp(loss), counts=counts.tolist())


def log(run: Run, **figures: object) -> None:
    line = json.dumps({"step": run.step, "seconds": round(run.seconds), "tokens": run.tokens, **figures})
    print(line, flush=True)
    with run.path.with_name("log.jsonl").open("a") as file:
        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of this run")
    parser.add_argument("--minutes", type=float, required=True, help="minutes of training, in all")
    parser.add_argument("--threads", type=int, default=2, help="threads that share a step's rows")
    args = parser.parse_args()
    torch.set_num_threads(1)  # whole shares of a step wait for each other less than single operations would
    train(Run(args.work, args.threads), 60 * args.minutes)


if __name__ == "__main__":
    main()
