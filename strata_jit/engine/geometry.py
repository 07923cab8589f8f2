"""A model's sizes as its file states them, for any architecture, whether it can be run or not.

Owns which metadata keys they stand under; checks nothing, so that a file that is refused can still be shown.
Key names: ggml's docs/gguf.md and llama.cpp's llama-arch.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from strata_jit.engine.roles import role_of
from strata_jit.gguf.reader import GGUFFile
from strata_jit.gguf.vocabulary import PREFIX

_MAX_LISTED = 1024
_KEYS = {
    "n_layer": "block_count",
    "n_layer_nextn": "nextn_predict_layers",
    "n_layer_dense": "leading_dense_block_count",
    "n_embd": "embedding_length",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "head_dim_k": "attention.key_length",
    "head_dim_v": "attention.value_length",
    "sliding_window": "attention.sliding_window",
    "n_ff": "feed_forward_length",
    "n_ff_exp": "expert_feed_forward_length",
    "n_ff_shexp": "expert_shared_feed_forward_length",
    "n_expert": "expert_count",
    "n_expert_used": "expert_used_count",
    "n_expert_shared": "expert_shared_count",
    "n_vocab": "vocab_size",
    "n_ctx_train": "context_length",
    "n_rot": "rope.dimension_count",
    "rope_base": "rope.freq_base",
    "rope_scaling": "rope.scaling.type",
    "rope_factor": "rope.scaling.factor",
}


def hyperparameters(file: GGUFFile) -> dict[str, Any]:
    """All keys below the architecture's name, as JSON has them; a long array as its length in words."""
    prefix = f"{architecture(file)}."
    found = [key for key in file.metadata if key.startswith(prefix)]
    return {key.removeprefix(prefix): _plain(file.metadata[key]) for key in found}


def architecture(file: GGUFFile) -> str | None:
    """`general.architecture`; None where the file has none."""
    return file.get("general.architecture", str, None)


def geometry(file: GGUFFile) -> dict[str, Any]:
    """Sizes by the field's names; None where the file does not tell, a list where layers differ."""
    given = hyperparameters(file)
    sizes: dict[str, Any] = {name: given.get(key) for name, key in _KEYS.items()}
    n_embd, n_head = sizes["n_embd"], sizes["n_head"]
    if sizes["n_head_kv"] is None:
        sizes["n_head_kv"] = n_head
    if sizes["head_dim_k"] is None and isinstance(n_embd, int) and isinstance(n_head, int) and n_head > 0:
        sizes["head_dim_k"] = n_embd // n_head
    if sizes["head_dim_v"] is None:
        sizes["head_dim_v"] = sizes["head_dim_k"]
    if sizes["n_ff_exp"] is None:
        sizes["n_ff_exp"] = _expert_width(file)
    if "token_embd.weight" in file.tensors:
        sizes["n_vocab"] = file.tensors["token_embd.weight"].n_rows
    elif sizes["n_vocab"] is None and f"{PREFIX}tokens" in file.metadata:
        tokens = file.metadata[f"{PREFIX}tokens"]
        sizes["n_vocab"] = len(tokens) if hasattr(tokens, "__len__") else None
    return sizes


def _expert_width(file: GGUFFile) -> int | None:
    widths = {"up experts": 1, "gate experts": 1, "gate/up experts": 2}
    for info in file.tensors.values():
        role = role_of(info.name)
        if role in widths and len(info.shape) == 3:
            return info.n_rows // widths[role]
    return None


def _plain(value: Any) -> Any:
    """A metadata value as JSON has it: an array whose items are all equal is that item."""
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, np.ndarray) and 0 < len(value) <= _MAX_LISTED:
        items = [_plain(item) for item in value.tolist()]
        return items[0] if len(set(items)) == 1 else items
    return f"array of {len(value)}"
