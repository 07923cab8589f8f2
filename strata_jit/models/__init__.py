"""From a GGUF file to a step program: one short module per architecture family.

A family reads its hyperparameters and tensors from the file and strings ops together; what families share
stands in `transformer.py`. Knows no process, no memory address and no kernel, only their names.
"""

from __future__ import annotations

from collections.abc import Callable

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.models import (
    deepseek2,
    glm4moe,
    gpt_oss,
    granitemoe,
    llama,
    olmoe,
    qwen2moe,
    qwen3moe,
    qwen3next,
    qwen4exp,
    qwen35moe,
)
from strata_jit.models.language_model import LanguageModel, StepLimits

ARCHITECTURES: dict[str, Callable[[GGUFFile, StepLimits], LanguageModel]] = {
    "deepseek2": deepseek2.build,
    "glm4moe": glm4moe.build,
    "gpt-oss": gpt_oss.build,
    "granitemoe": granitemoe.build,
    "llama": llama.build,
    "olmoe": olmoe.build,
    "qwen2moe": qwen2moe.build,
    "qwen35moe": qwen35moe.build,
    "qwen3moe": qwen3moe.build,
    "qwen3next": qwen3next.build,
    "qwen4exp": qwen4exp.build,
}
"""`general.architecture` -> builder."""


def check_architecture(file: GGUFFile) -> str:
    """The architecture of `file`; ModelError if it is not supported, or if the file holds no weights."""
    if not file.tensors:
        raise ModelError(f"{file.path}: the file holds a vocabulary alone, no weights; it cannot be run")
    arch = file.get("general.architecture", str)
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{file.path}: architecture {arch!r} is not supported (supported: {known})")
    return arch


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of the model in `file`.

    ModelError for an architecture, a tensor type or a feature that is not supported, naming it.
    """
    return ARCHITECTURES[check_architecture(file)](file, limits)
