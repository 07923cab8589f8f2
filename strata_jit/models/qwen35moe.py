"""Qwen3.5 MoE and later: qwen3next with v heads in tiled order.

Its rotary embedding has sections for time, height and width. Text has one position for all, so that it is
the rotation of halves of qwen3next.
"""

from __future__ import annotations

from strata_jit.gguf.reader import GGUFFile
from strata_jit.models import qwen3next
from strata_jit.models.language_model import LanguageModel, StepLimits


def build(file: GGUFFile, limits: StepLimits) -> LanguageModel:
    """The step program of a qwen35moe model."""
    return qwen3next.build(file, limits, tiled=True)
