"""The model that the package carries, and what a model's file recommends about sampling.

Owns the built-in model's name and place; `docs/builtin-model.md` tells what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata_jit.engine.sample import Sampling
from strata_jit.errors import ModelError, UsageError
from strata_jit.gguf.reader import GGUFFile

BUILTIN_NAME = "strata-kjv-8m"
BUILTIN_START = "<|endoftext|>"
"""As a prompt of the built-in model: begin a text."""

_SAMPLING_KEYS: dict[str, tuple[str, type[Any]]] = {
    "temp": ("temp", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repeat_penalty": ("penalty_repeat", float),
    "repeat_last_n": ("penalty_last_n", int),
}
"""Field of `Sampling` -> the key after "general.sampling." (as in llama.cpp's llama-arch.cpp), its type."""


def builtin_model() -> Path:
    """Path of the built-in model: a small model that goes on with a text, and answers no questions.

    ModelError if the installation lacks it.
    """
    path = Path(__file__).parents[1] / "data" / f"{BUILTIN_NAME}.gguf"
    if not path.is_file():
        raise ModelError(f"{path}: the built-in model is missing: install the package again, or give a model")
    return path


def recommended_sampling(gguf: GGUFFile) -> dict[str, Any]:
    """Fields of `Sampling` that the file recommends by `general.sampling` keys; empty for most files.

    ModelError for a value of another type, or out of range.
    """
    found: dict[str, Any] = {}
    for field, (name, kind) in _SAMPLING_KEYS.items():
        value: Any = gguf.get(f"general.sampling.{name}", kind, default=None)
        if value is not None:
            found[field] = value
    try:
        Sampling(**found)
    except UsageError as fault:
        raise ModelError(f"{gguf.path}: general.sampling keys: {fault}") from None
    return found
