"""Which type each tensor of a quantised file gets.

Owns the rules: those of llama.cpp's `llama-quant.cpp` for files without an importance matrix, with Q6_K where
it takes Q5_K. Reads no tensor's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata_jit.errors import UsageError, quoted
from strata_jit.gguf.reader import GGUFFile, TensorInfo
from strata_jit.gguf.types import GGMLType

TARGETS = ("IQ4_XS", "IQ4_NL", "Q6_K", "Q8_0", "BF16", "F16", "F32")
"""Types that a tensor can be turned into."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32}
"""Values of `general.file_type`; llama.h, `enum llama_ftype`."""
_FLOATS = ("BF16", "F16", "F32")
_FOUR_BITS = ("IQ4_XS", "IQ4_NL")
_SMALLER_BLOCKS = {"IQ4_XS": "IQ4_NL", "Q6_K": "Q8_0"}
"""For rows that are no multiple of 256."""
_KEPT = (
    "_norm.weight ffn_gate_inp.weight ffn_gate_tid2eid.weight altup laurel per_layer_model_proj ssm_conv1d "
    "shortconv.conv.weight indexer.k_proj.weight indexer.q_proj.weight attn_rel_b.weight .position_embd"
).split()
"""Matrices that are small, sensitive or no factor of a product, by parts of their names."""

Override = tuple[re.Pattern[str], str]


def target_type(text: str, option: str) -> str:
    """The name of a target type, however it is written; UsageError lists those that there are."""
    if text.upper() not in TARGETS:
        raise UsageError(f"{option}: found type {quoted(text)}, expected one of {', '.join(TARGETS)}")
    return text.upper()


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """PATTERN=TYPE of each `--tensor-type`; UsageError for what is none."""
    overrides = []
    for text in texts:
        option = f"--tensor-type {quoted(text)}"
        pattern, equals, name = text.rpartition("=")
        if not equals or not pattern:
            raise UsageError(f"{option}: expected PATTERN=TYPE, such as ffn_down=Q6_K")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{option}: no regular expression ({error})") from None
        overrides.append((compiled, target_type(name, option)))
    return overrides


def choose_types(file: GGUFFile, type_name: str, overrides: Sequence[Override] = ()) -> dict[str, GGMLType]:
    """Type of every tensor, in file order; those that are not quantised keep theirs.

    UsageError for a pattern that matches no tensor that could be quantised.
    """
    matrices = [info for info in file.tensors.values() if can_be_quantized(info)]
    for pattern, _ in overrides:
        if not any(pattern.search(info.name) for info in matrices):
            expected = f"part of the name of one of the {len(matrices)} matrices that are quantised"
            raise UsageError(f"--tensor-type: found pattern {quoted(pattern.pattern)}, expected {expected}")
    rules = _Rules(file, type_name)
    chosen = {info.name: info.type for info in file.tensors.values()}
    for info in matrices:
        own = [name for pattern, name in overrides if pattern.search(info.name)]
        chosen[info.name] = GGMLType[_fitting(own[-1] if own else rules.choose(info), info.n_cols)]
    return chosen


def can_be_quantized(info: TensorInfo) -> bool:
    """Whether a tensor is a matrix (or one for each expert) that may change its type."""
    if len(info.shape) < 2 or not info.name.endswith("weight"):
        return False
    return not any(part in info.name for part in _KEPT)


def role_of(name: str) -> str:
    """A tensor's name without its layer, such as `ffn_down_exps`."""
    return re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight")


def _fitting(name: str, n_cols: int) -> str:
    """The type itself, or the one that stands in for it where it does not divide the row."""
    if n_cols % GGMLType[name].block_size:
        name = _SMALLER_BLOCKS.get(name, name)
    return "F16" if n_cols % GGMLType[name].block_size else name


class _Rules:
    """What a file of one type gives to each matrix."""

    def __init__(self, file: GGUFFile, type_name: str) -> None:
        self._type = type_name
        self._four_bits = type_name in _FOUR_BITS
        arch = file.metadata.get("general.architecture")
        self._n_layer = _first_int(file.metadata.get(f"{arch}.block_count"))
        self._n_expert = _first_int(file.metadata.get(f"{arch}.expert_count"))
        n_head = _first_int(file.metadata.get(f"{arch}.attention.head_count"))
        n_head_kv = _first_int(file.metadata.get(f"{arch}.attention.head_count_kv")) or n_head
        self._n_gqa = n_head // n_head_kv if n_head_kv else 0
        self._head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"

    def choose(self, info: TensorInfo) -> str:
        """Type of a matrix, whatever the length of its row."""
        if self._type in _FLOATS:
            return self._type
        if info.name == self._head:
            fits = info.n_cols % GGMLType[self._type].block_size == 0
            return "Q6_K" if fits and self._type != "Q8_0" else "Q8_0"
        role = role_of(info.name)
        if role in ("attn_v", "attn_qkv", "attn_kv_b"):
            return self._of_values()
        if role == "attn_k" and self._n_expert == 8:
            return "Q8_0"
        if role == "attn_output" and self._n_expert == 8 and self._four_bits:
            return "Q6_K"
        if "ffn_down" in role and self._four_bits and _layer_of(info.name) < self._n_layer // 8:
            return "Q6_K"
        return self._type

    def _of_values(self) -> str:
        if self._n_expert == 8:
            return "Q8_0"
        return "Q6_K" if self._four_bits and self._n_gqa >= 4 else self._type


def _layer_of(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else 1 << 30


def _first_int(value: Any) -> int:
    """A number of the metadata, of an array its first; 0 where there is none."""
    if isinstance(value, np.ndarray) and value.size:
        value = value[0]
    return int(value) if isinstance(value, int | np.integer) else 0
