"""The rules by which logits match llama.cpp's; see the README of the golden data."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REFERENCE_KL = 2e-5
"""A float engine against llama.cpp's float logits, mean over positions of prompt 0."""


@dataclass(frozen=True)
class Golden:
    """One folder of golden data."""

    path: Path

    @property
    def model(self):
        return self.path / "model.gguf"

    @property
    def meta(self):
        return json.loads((self.path / "meta.json").read_text())

    @property
    def tokens(self):
        """int32[2, 48]."""
        return np.load(self.path / "tokens.npy")

    @property
    def logits(self):
        """float16[2, 48, n_vocab], after every token."""
        return np.load(self.path / "logits.npy")

    @property
    def logits_float(self):
        """float16[2, 12, n_vocab], the last 12 positions with float weights and activations."""
        return np.load(self.path / "logits_float.npy")

    @property
    def positions(self):
        """Positions whose logits are defined."""
        judged = self.meta["judge_positions"]
        return np.arange(self.tokens.shape[1]) if judged == "all" else np.asarray(judged)


def log_softmax(logits):
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def kl(reference, other):
    """KL(reference || other) in nats, per position."""
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def is_top(reference, tokens):
    """Whether each token has the highest logit; in float16, as references are kept, several may share it."""
    return np.take_along_axis(reference, tokens[:, None], axis=1)[:, 0] == reference.max(axis=1)


def judge(golden, prompt, logits):
    """List of what is wrong with the logits [48, n_vocab] of a prompt; empty for a match."""
    at, meta = golden.positions, golden.meta
    reference, found = golden.logits[prompt][at], logits[at]
    divergence = kl(reference, found)
    same = is_top(reference, found.argmax(axis=-1))
    float_noise, batch_noise = meta["float_vs_one"][prompt], meta["batch_vs_one"][prompt]
    if prompt == 0:
        limit = max(1e-3, 10 * batch_noise["mean_kl"], 3 * float_noise["mean_kl"])
        checks = {
            f"mean KL {divergence.mean():.2e} > {limit:.2e}": divergence.mean() > limit,
            f"{(~same).sum()} top tokens differ, 1 may": (~same).sum() > 1,
        }
    else:
        limit = max(1e-3, 3 * float_noise["median_kl"])
        agreement = float_noise["top1"] - 0.08
        checks = {
            f"median KL {np.median(divergence):.2e} > {limit:.2e}": np.median(divergence) > limit,
            f"top-1 agreement {same.mean():.3f} < {agreement:.3f}": same.mean() < agreement,
        }
    return [fault for fault, wrong in checks.items() if wrong]
