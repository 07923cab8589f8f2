"""gpt-oss: sinks, a sliding window on alternate layers, biases on every matrix, the experts' included."""

from __future__ import annotations

import numpy as np

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.registry import ROUTE_TOP_SOFTMAX
from strata_jit.models.attention import ROPE_NEOX, Attention
from strata_jit.models.ffn import FFN_FEATURES, RoutedFfn
from strata_jit.models.hparams import MAX_CONTEXT
from strata_jit.models.language_model import LanguageModel, StepLimits
from strata_jit.models.stack import stack
from strata_jit.models.transformer import Transformer

PATTERN = 2
"""Where the file has no pattern: of so many layers, the last one sees all positions."""


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a gpt-oss model."""
    t = Transformer(file, limits, features={"attention.sliding_window", *FFN_FEATURES})
    check_base(file, t.h.arch)
    windows = sliding_windows(file, t.h.arch, t.h.n_layer)
    attention = Attention(t, rope_mode=ROPE_NEOX, windows=windows, sinks=True)
    ffn = RoutedFfn(t, gating=ROUTE_TOP_SOFTMAX, norm_w=False, norm="post_attention_norm")
    return stack(t, attention, ffn)


def check_base(file: GGUFFile, arch: str) -> None:
    """ModelError where layers with a window rotate with a base of their own."""
    base = file.get(f"{arch}.rope.freq_base", float, 10000.0)
    windowed = file.get(f"{arch}.rope.freq_base_swa", float, base)
    if windowed != base:
        raise ModelError.at(file.path, f"{arch}.rope.freq_base_swa", str(windowed), f"{base}, as everywhere")


def sliding_windows(file: GGUFFile, arch: str, n_layer: int) -> dict[int, int]:
    """Layer -> window, of those layers that have one.

    The pattern is a number n, where of n layers all but the last have a window, or a flag for each layer.
    """
    key = f"{arch}.attention.sliding_window"
    window, pattern = file.get(key, int), file.metadata.get(f"{key}_pattern", PATTERN)
    if window < 0:
        raise ModelError.at(file.path, key, str(window), "0 for none, or a number of positions")
    window = min(window, MAX_CONTEXT)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != n_layer:
            found = f"{len(pattern)} entries"
            raise ModelError.at(file.path, f"{key}_pattern", found, f"{n_layer}, one for each layer")
        return {layer: window for layer in np.flatnonzero(pattern).tolist() if window}
    n = file.get(f"{key}_pattern", int, PATTERN)
    if n < 0:
        raise ModelError.at(file.path, f"{key}_pattern", str(n), "0 or more")
    return {layer: window for layer in range(n_layer) if window and (n == 0 or layer % n < n - 1)}
