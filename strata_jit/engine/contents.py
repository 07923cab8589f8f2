"""What is in a model file, what of it cannot be run, and whether it would fit on this machine.

Owns the survey of a file by its header alone: builds no tokenizer, reads no weight and starts no process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata_jit.engine.geometry import architecture, geometry, hyperparameters
from strata_jit.engine.prompt import TEMPLATE_KEY
from strata_jit.engine.roles import EXPERT_ROLES, RoleUse, layer_of, role_of, roles_of
from strata_jit.engine.sizes import PlannedModel, plan_model
from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile, StringArray, open_gguf
from strata_jit.gguf.tokenizer import check_kind
from strata_jit.gguf.vocabulary import PREFIX
from strata_jit.kernels.layout import FILE_TYPES
from strata_jit.models import ARCHITECTURES
from strata_jit.placement import MatrixSize, ModelSizes, Plan, PlanOptions, plan
from strata_jit.topology.machine import read_machine

_VECTOR_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something in the file that is not supported."""

    kind: str
    """"architecture", "tensors", "type", "feature" or "tokenizer"."""
    found: str
    reason: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the file says of its tokenizer; None for what it does not say."""

    model: str | None
    pre: str | None
    n_tokens: int
    n_merges: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool | None
    supported: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """A model file, surveyed."""

    path: str
    parts: tuple[str, ...]
    version: int
    file_bytes: int
    """Of all parts."""
    name: str | None
    arch: str | None
    geometry: dict[str, Any]
    """Sizes by name, see `geometry.geometry`."""
    hyperparameters: dict[str, Any]
    roles: tuple[RoleUse, ...]
    n_tensors: int
    tensor_bytes: int
    expert_bytes: int
    """Of the routed experts' tensors."""
    vocabulary: Vocabulary | None
    templates: dict[str, int]
    """Chat templates: name ("default" for the one without) -> characters."""
    faults: tuple[Fault, ...]
    plan: Plan | None
    """On this machine; None for a file without tensors."""
    n_ctx: int | None
    """Context that memory was planned for; None where `estimated`."""
    token_bytes: int | None
    """Bytes of weights that one decoded token reads; None for a file without tensors."""
    estimated: bool
    """Whether `plan` and `token_bytes` are of the tensors as the file has them, as there is no program."""
    notes: tuple[str, ...]

    @property
    def other_bytes(self) -> int:
        return self.tensor_bytes - self.expert_bytes


def survey(path: str | os.PathLike[str], options: PlanOptions, ctx: int | None = None) -> Contents:
    """Look through a GGUF file, of a split model any part.

    options  of the plan that tells whether the model fits
    ctx      positions of KV memory; None: 4096, at most the model's own context
    ModelError for a malformed file, UsageError for options that make no sense; a file that is sound, but
    cannot be run, is surveyed, and `faults` says why.
    """
    file = open_gguf(path)
    faults = [*_unsupported(file)]
    planned: PlannedModel | None = None
    machine = read_machine()
    if not any(fault.kind in ("architecture", "tensors") for fault in faults):
        try:
            planned = plan_model(file, machine, options, ctx=ctx)
        except ModelError as error:
            faults += _feature(file, str(error), faults)
    roles = roles_of(file.tensors.values())
    planned_as = planned.plan if planned is not None else None
    if planned_as is None and file.tensors:
        planned_as = plan(machine, _sizes(file), options)
    return Contents(
        path=str(file.path),
        parts=tuple(str(part) for part in file.parts),
        version=file.version,
        file_bytes=sum(part.stat().st_size for part in file.parts),
        name=file.get("general.name", str, None),
        arch=architecture(file),
        geometry=geometry(file),
        hyperparameters=hyperparameters(file),
        roles=roles,
        n_tensors=len(file.tensors),
        tensor_bytes=sum(role.bytes for role in roles),
        expert_bytes=sum(role.bytes for role in roles if role.role in EXPERT_ROLES),
        vocabulary=_vocabulary(file, faults),
        templates=_templates(file),
        faults=tuple(sorted(faults, key=lambda fault: fault.kind != "architecture")),
        plan=planned_as,
        n_ctx=planned.limits.n_ctx if planned is not None else None,
        token_bytes=sum(planned.token_bytes) if planned is not None else _token_bytes(file),
        estimated=planned is None,
        notes=() if planned is None else planned.model.notes,
    )


def _unsupported(file: GGUFFile) -> Iterator[Fault]:
    """All that can be told without building the program."""
    arch = architecture(file)
    if arch not in ARCHITECTURES:
        known = f"supported: {', '.join(sorted(ARCHITECTURES))}"
        yield Fault("architecture", "none named" if arch is None else arch, known)
    if not file.tensors:
        yield Fault("tensors", "none", "the file holds no weights, only what is said about them")
    for name, tensors in _unknown_types(file).items():
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        reason = f"no kernel reads it; {tensors[0]}{more}; supported: {', '.join(sorted(FILE_TYPES))}"
        yield Fault("type", name, reason)
    try:
        check_kind(file)
    except ModelError as error:
        yield Fault("tokenizer", _kind(file), _without_path(file, str(error)))


def _unknown_types(file: GGUFFile) -> dict[str, list[str]]:
    unknown: dict[str, list[str]] = {}
    for info in file.tensors.values():
        known = info.type.name in (FILE_TYPES if len(info.shape) > 1 else _VECTOR_TYPES)
        if not known:
            unknown.setdefault(info.type.name, []).append(info.name)
    return unknown


def _feature(file: GGUFFile, message: str, faults: list[Fault]) -> list[Fault]:
    """The fault that building the program met, unless it is one of the types that are told already."""
    if any(fault.kind == "type" and fault.found in message for fault in faults):
        return []
    return [Fault("feature", str(architecture(file)), _without_path(file, message))]


def _without_path(file: GGUFFile, message: str) -> str:
    for path in (file.path, *file.parts):
        message = message.removeprefix(f"{path}: ")
    return message


def _kind(file: GGUFFile) -> str:
    said = (file.metadata.get(f"{PREFIX}{key}") for key in ("model", "pre"))
    return " ".join(word for word in said if isinstance(word, str)) or "none"


def _vocabulary(file: GGUFFile, faults: list[Fault]) -> Vocabulary | None:
    tokens = file.get(f"{PREFIX}tokens", StringArray, None)
    if tokens is None:
        return None
    merges = file.get(f"{PREFIX}merges", StringArray, None)
    return Vocabulary(
        model=file.get(f"{PREFIX}model", str, None),
        pre=file.get(f"{PREFIX}pre", str, None),
        n_tokens=len(tokens),
        n_merges=0 if merges is None else len(merges),
        bos_id=file.get(f"{PREFIX}bos_token_id", int, None),
        eos_id=file.get(f"{PREFIX}eos_token_id", int, None),
        add_bos=file.get(f"{PREFIX}add_bos_token", bool, None),
        supported=not any(fault.kind == "tokenizer" for fault in faults),
    )


def _templates(file: GGUFFile) -> dict[str, int]:
    """The default one first, then those under names of their own."""
    found = {}
    for key, value in file.metadata.items():
        if isinstance(value, str) and key == TEMPLATE_KEY:
            found["default"] = len(value)
        elif isinstance(value, str) and key.startswith(f"{TEMPLATE_KEY}."):
            found[key.removeprefix(f"{TEMPLATE_KEY}.")] = len(value)
    return dict(sorted(found.items(), key=lambda item: item[0] != "default"))


# --- estimates for files that have no program -------------------------------------------------------------


def _sizes(file: GGUFFile) -> ModelSizes:
    """Matrices cut by rows, vectors on every node, as the file has them; no KV memory."""
    matrices = [info for info in file.tensors.values() if len(info.shape) > 1]
    vectors = [info for info in file.tensors.values() if len(info.shape) <= 1]
    return ModelSizes(
        matrices=tuple(MatrixSize(info.n_rows, info.row_bytes, info.n_expert) for info in matrices),
        vector_bytes=sum(info.nbytes for info in vectors),
    )


def _token_bytes(file: GGUFFile) -> int | None:
    """Every tensor once, of the experts those that are used; an embedding only where it is the head too."""
    if not file.tensors:
        return None
    arch = architecture(file)
    used, n_expert, n_layer, n_nextn = (
        _positive(file, f"{arch}.{key}")
        for key in ("expert_used_count", "expert_count", "block_count", "nextn_predict_layers")
    )
    read = 0
    for info in file.tensors.values():
        layer, role = layer_of(info.name), role_of(info.name)
        if layer is not None and n_layer and layer >= n_layer - n_nextn:
            continue  # predicts further tokens, which decoding does not ask for
        if role == "embedding" and (info.name != "token_embd.weight" or "output.weight" in file.tensors):
            continue
        if role in EXPERT_ROLES and 0 < used <= n_expert:
            read += info.nbytes * used // n_expert
        else:
            read += info.nbytes
    return read


def _positive(file: GGUFFile, key: str) -> int:
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray) and value.size:
        value = int(value.max())
    return value if isinstance(value, int) and value > 0 else 0
