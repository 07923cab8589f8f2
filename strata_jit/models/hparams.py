"""Hyperparameters that every transformer family reads the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile

MAX_CONTEXT = 1 << 24
"""Positions; angles of rotary embeddings lose their digits far beyond what any model is made for."""
MAX_HEAD = 1 << 14
"""Elements of a head's key or value; frequencies are computed one by one, before any tensor is looked at."""
FEATURES: dict[str, tuple[object, ...]] = {
    "expert_gating_func": (0, 1),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "leading_dense_block_count": (0,),
    "embedding_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "logit_scale": (1.0, 0.0),
    "attention.sliding_window": (0,),
}
"""Keys that ask for more than the common transformer has, with the values that ask for nothing.

A family names those that its pieces read; others are refused. Gating 1 is softmax (llama-hparams.h); a
scale of 0 is none.
"""


@dataclass(frozen=True, slots=True)
class Hparams:
    """Geometry of a mixture-of-experts transformer; names as llama.cpp's llama-hparams.h."""

    arch: str
    n_layer: int
    """Layers that the logits depend on: nextn (multi-token prediction) layers are not counted."""
    n_nextn: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    """Length of a head's query and key."""
    value_dim: int
    n_rot: int
    n_expert: int
    n_expert_used: int
    n_ctx_train: int
    eps: float
    n_layer_dense_lead: int
    """Layers at the beginning whose feed-forward is dense."""
    expert_gating_func: int
    """0 where the file does not say; else 1 softmax, 2 sigmoid, 3 softmax of the chosen."""
    expert_weights_norm: bool
    expert_weights_scale: float
    n_expert_groups: int
    n_group_used: int
    embedding_scale: float
    residual_scale: float
    """Factor of what attention and feed-forward add to the residual stream."""
    logit_scale: float
    """Logits are divided by it."""
    attention_scale: float
    """Factor of the scores: 1 / sqrt(head_dim) unless the file says otherwise."""


def read_hparams(file: GGUFFile, features: Collection[str] = ()) -> Hparams:
    """Read and check them; ModelError names the key and what is expected of it.

    `features`: keys of `FEATURES` that the caller reads itself.
    """
    arch = file.get("general.architecture", str)

    def key(name: str) -> str:
        return f"{arch}.{name}"

    def factor(name: str, default: float = 1.0) -> float:
        """A scale, the default where there is none; what is far from 1 either way has no float32 inverse."""
        return in_range(file, key(name), 0.0, 1e-6, 1e6, none=0.0) or default

    n_nextn = file.get(key("nextn_predict_layers"), int, 0)
    n_head = positive_multiple(file, key("attention.head_count"))
    n_embd = positive_multiple(file, key("embedding_length"))
    head_dim = file.get(key("attention.key_length"), int, n_embd // n_head)
    n_group = file.get(key("expert_group_count"), int, 0) or 1
    hparams = Hparams(
        arch=arch,
        n_layer=positive_multiple(file, key("block_count")) - n_nextn,
        n_nextn=n_nextn,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=_head_count_kv(file, key("attention.head_count_kv"), n_head),
        head_dim=head_dim,
        value_dim=file.get(key("attention.value_length"), int, n_embd // n_head),
        n_rot=file.get(key("rope.dimension_count"), int, head_dim),
        n_expert=file.get(key("expert_count"), int, 0),
        n_expert_used=file.get(key("expert_used_count"), int, 0),
        n_ctx_train=context_length(file),
        eps=in_range(file, key("attention.layer_norm_rms_epsilon"), None, 0.0, 1.0),
        n_layer_dense_lead=file.get(key("leading_dense_block_count"), int, 0),
        expert_gating_func=file.get(key("expert_gating_func"), int, 0),
        expert_weights_norm=file.get(key("expert_weights_norm"), bool, False),
        n_expert_groups=n_group,
        n_group_used=1 if n_group == 1 else file.get(key("expert_group_used_count"), int, 0) or 1,
        embedding_scale=factor("embedding_scale"),
        residual_scale=factor("residual_scale"),
        logit_scale=factor("logit_scale"),
        expert_weights_scale=factor("expert_weights_scale"),
        attention_scale=factor("attention.scale", max(head_dim, 1) ** -0.5),
    )
    _check(file, hparams)
    _refuse(file, arch, FEATURES.keys() - set(features))
    return hparams


def context_length(file: GGUFFile) -> int:
    """Positions that the model was made for, at most `MAX_CONTEXT`; ModelError unless it is positive."""
    key = f"{file.get('general.architecture', str)}.context_length"
    return min(positive_multiple(file, key), MAX_CONTEXT)


def _head_count_kv(file: GGUFFile, key: str, n_head: int) -> int:
    """One number, or one a layer: then 0 where a layer has no keys, and the same for all others."""
    if not isinstance(file.metadata.get(key), np.ndarray):
        return file.get(key, int, n_head)
    counts = np.unique(whole_numbers(file, key))
    counts = counts[counts != 0]
    if len(counts) != 1:
        found = f"{len(counts)} different numbers"
        raise ModelError.at(file.path, key, found, "the same number for every layer that has keys")
    return int(counts[0])


def positive_multiple(file: GGUFFile, key: str, factor: int = 1) -> int:
    """A key's number; ModelError unless it is a positive multiple of `factor`."""
    value = file.get(key, int)
    if value <= 0 or value % factor:
        expected = "a positive number" if factor == 1 else f"a positive multiple of {factor}"
        raise ModelError.at(file.path, key, str(value), expected)
    return value


def whole_numbers(file: GGUFFile, key: str) -> NDArray[Any]:
    """A key's array; ModelError unless it is of integers (or flags)."""
    values = file.get(key, np.ndarray)
    if values.dtype.kind not in "iub":
        raise ModelError.at(file.path, key, f"{len(values)} of {values.dtype}", "whole numbers")
    return values


def in_range(
    file: GGUFFile, key: str, default: float | None, low: float, high: float, none: float | None = None
) -> float:
    """A key's number, or the default, None for a key that must be there; ModelError unless it is in range.

    none  a number that is right although it is out of range
    """
    value = file.get(key, float) if default is None else file.get(key, float, default)
    if value != none and not low <= value <= high:  # a NaN is in no range
        raise ModelError.at(file.path, key, str(value), f"{low:g} to {high:g}")
    return value


def _check(file: GGUFFile, h: Hparams) -> None:
    def fault(name: str, found: object, expected: str) -> ModelError:
        return ModelError.at(file.path, f"{h.arch}.{name}", str(found), expected)

    if h.n_layer <= 0 or h.n_nextn < 0:
        raise fault("nextn_predict_layers", h.n_nextn, "0 or more, fewer than block_count")
    if h.n_layer > len(file.tensors):
        raise fault("block_count", h.n_layer + h.n_nextn, f"at most {len(file.tensors)}, a tensor a layer")
    if h.n_embd % 8:
        raise fault("embedding_length", h.n_embd, "a multiple of 8")
    if h.n_head_kv <= 0 or h.n_head % h.n_head_kv:
        raise fault("attention.head_count_kv", h.n_head_kv, f"a divisor of head_count {h.n_head}")
    for name, length in (("key_length", h.head_dim), ("value_length", h.value_dim)):
        if not 0 < length <= MAX_HEAD or length % 8:
            raise fault(f"attention.{name}", length, f"a multiple of 8 up to {MAX_HEAD}")
    if not 0 < h.n_rot <= h.head_dim or h.n_rot % 2:
        raise fault("rope.dimension_count", h.n_rot, f"an even number up to the head's {h.head_dim}")
    if h.n_expert <= 0:
        found = f"{file.path}: a dense {h.arch} model (expert_count {h.n_expert})"
        raise ModelError(f"{found}; strata-jit runs mixture-of-experts models")
    if not 0 < h.n_expert_used <= h.n_expert:
        raise fault("expert_used_count", h.n_expert_used, f"1 to expert_count {h.n_expert}")
    if not 0 <= h.n_layer_dense_lead < h.n_layer:
        raise fault("leading_dense_block_count", h.n_layer_dense_lead, f"0 to {h.n_layer - 1}")
    if h.expert_gating_func not in (0, 1, 2, 3):
        raise fault("expert_gating_func", h.expert_gating_func, "1, 2 or 3")
    if h.n_expert_groups != 1:
        _check_groups(h, fault)


def _check_groups(h: Hparams, fault: Callable[[str, object, str], ModelError]) -> None:
    size, rest = divmod(h.n_expert, max(h.n_expert_groups, 1))
    if h.n_expert_groups < 0 or rest or size < 2:
        expected = f"groups of 2 or more of the {h.n_expert} experts, all alike"
        raise fault("expert_group_count", h.n_expert_groups, expected)
    least = -(-h.n_expert_used // size)
    if not least <= h.n_group_used <= h.n_expert_groups:
        expected = f"{least} to {h.n_expert_groups}, enough for {h.n_expert_used} experts"
        raise fault("expert_group_used_count", h.n_group_used, expected)


def _refuse(file: GGUFFile, arch: str, keys: Collection[str]) -> None:
    for name in sorted(keys):
        plain = FEATURES[name]
        found = file.get(f"{arch}.{name}", type(plain[0]), plain[0])
        if found not in plain:
            expected = " or ".join(map(str, plain))
            raise ModelError.at(
                file.path, f"{arch}.{name}", str(found), f"{expected}, all that strata-jit runs for {arch}"
            )
