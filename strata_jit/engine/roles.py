"""What each tensor of a model file is for, by its GGUF name, whatever the architecture.

Owns the roles and the counts by role. Names: ggml-org/llama.cpp's llama-arch.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from strata_jit.gguf.reader import TensorInfo

_LAYER = re.compile(r"(?:blk|enc\.blk|dec\.blk)\.(\d+)\.")
_SUFFIX = re.compile(r"\.(?:weight|bias|scale|[a-z]+_scale)$")
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        ("embedding", r"(per_layer_)?token_embd$|token_types$|position_embd$"),
        ("head", r"output$"),
        ("multi-token prediction", r"nextn\."),
        ("norms", r".*norm"),
        ("shared experts", r".*_shexp$|.*_chexps$"),
        ("router", r"ffn_gate_inp|exp_probs_b|ffn_gate_tid2eid"),
        ("gate/up experts", r"ffn_gate_up_exps$"),
        ("gate experts", r"ffn_gate(_exps|\.\d+)$"),
        ("up experts", r"ffn_up(_exps|\.\d+)$"),
        ("down experts", r"ffn_down(_exps|\.\d+)$"),
        ("dense feed-forward", r"ffn_"),
        ("attention", r"attn_|indexer\.|rope_"),
        ("recurrent", r"ssm_|shortconv|time_mix|channel_mix"),
        ("other", r""),
    )
)
EXPERT_ROLES = ("gate/up experts", "gate experts", "up experts", "down experts")


@dataclass(slots=True)
class TypeUse:
    """Tensors of one type."""

    tensors: int = 0
    bytes: int = 0


@dataclass(slots=True)
class RoleUse:
    """The tensors of one role, by type."""

    role: str
    types: dict[str, TypeUse] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(use.bytes for use in self.types.values())


def role_of(name: str) -> str:
    """The role of a tensor, "other" for a name that is not known."""
    base = _SUFFIX.sub("", _LAYER.sub("", name, count=1))
    return next(role for role, pattern in _RULES if pattern.match(base))


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None for one of the whole model."""
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def roles_of(tensors: Iterable[TensorInfo]) -> tuple[RoleUse, ...]:
    """Counts and bytes by role and type; in the order of the rules, types by their bytes."""
    uses: dict[str, RoleUse] = {role: RoleUse(role) for role, _ in _RULES}
    for info in tensors:
        use = uses[role_of(info.name)].types.setdefault(info.type.name, TypeUse())
        use.tensors += 1
        use.bytes += info.nbytes
    for role in uses.values():
        role.types = dict(sorted(role.types.items(), key=lambda item: -item[1].bytes))
    return tuple(role for role in uses.values() if role.types)
