"""What `strata-jit inspect` shows of a model file: to people, and as a JSON document.

Owns the words and the keys; looks at no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from strata_jit.engine.contents import Contents, Vocabulary
from strata_jit.errors import one_line
from strata_jit.report.tables import lines, plain_table, rendered, size
from strata_jit.report.topology_view import node_processes
from strata_jit.units import format_bytes

JSON_KEYS = (
    "path parts version file_bytes name arch geometry hyperparameters roles tensors bytes tokenizer "
    "chat_templates unsupported supported weight_bytes_per_token fit notes"
).split()
_UNKNOWN = "not told"


def contents_json(found: Contents) -> str:
    """One line with the keys `JSON_KEYS`, always all of them; null for what the file does not tell."""
    values = {
        "path": found.path,
        "parts": list(found.parts),
        "version": found.version,
        "file_bytes": found.file_bytes,
        "name": found.name,
        "arch": found.arch,
        "geometry": found.geometry,
        "hyperparameters": found.hyperparameters,
        "roles": {
            role.role: {name: asdict(use) for name, use in role.types.items()} for role in found.roles
        },
        "tensors": found.n_tensors,
        "bytes": {"total": found.tensor_bytes, "experts": found.expert_bytes, "other": found.other_bytes},
        "tokenizer": None if found.vocabulary is None else asdict(found.vocabulary),
        "chat_templates": found.templates,
        "unsupported": [asdict(fault) for fault in found.faults],
        "supported": not found.faults,
        "weight_bytes_per_token": found.token_bytes,
        "fit": _fit_values(found),
        "notes": list(found.notes),
    }
    return json.dumps({key: values[key] for key in JSON_KEYS}, allow_nan=False) + "\n"


def _fit_values(found: Contents) -> dict[str, Any] | None:
    if found.plan is None:
        return None
    plain = found.plan.to_json()
    kept = ("fits", "split", "threads", "nodes", "warnings")
    return {"ctx": found.n_ctx, "estimated": found.estimated} | {key: plain[key] for key in kept}


def contents_view(found: Contents, width: int | None) -> str:
    """The view as text. `width`: columns of a terminal, which gets colours; None for a file."""
    return rendered(_sections(found), width)


def _sections(found: Contents) -> Iterator[tuple[str, RenderableType]]:
    yield one_line(found.path), lines(_file_lines(found))
    yield "Geometry", _geometry(found.geometry)
    if found.roles:
        yield "Tensors", _roles(found)
    yield "Tokenizer", lines(_tokenizer_lines(found.vocabulary))
    yield "Chat template", lines(_template_lines(found.templates))
    if found.faults:
        faults = (f"{fault.kind} {fault.found}: {fault.reason}" for fault in found.faults)
        yield "Not supported", lines(faults, style="yellow")
    if found.plan is not None:
        yield "On this machine", lines(_fit_lines(found))
        yield "Node processes", node_processes(found.plan, sized=True)
        if found.plan.warnings:
            yield "Warnings", lines(found.plan.warnings, style="yellow")
    if found.notes:
        yield "Notes", lines(found.notes)


def _file_lines(found: Contents) -> Iterator[str]:
    if found.name:
        yield found.name
    runs = "cannot be run, for the reasons below" if found.faults else "can be run"
    yield f"architecture {found.arch or _UNKNOWN}; {runs}"
    parts = "" if len(found.parts) == 1 else f" in {len(found.parts)} parts"
    yield f"GGUF version {found.version}, {format_bytes(found.file_bytes)}{parts}, {found.n_tensors} tensors"
    if found.n_tensors:
        experts, other = format_bytes(found.expert_bytes), format_bytes(found.other_bytes)
        yield f"weights {format_bytes(found.tensor_bytes)}: experts {experts}, other {other}"


def _geometry(sizes: dict[str, Any]) -> Table:
    table = plain_table("what", "value")
    for name, value in sizes.items():
        if value is not None:
            table.add_row(name, one_line(_shown(value)))
    return table


def _shown(value: Any) -> str:
    """A size; of a list, how many layers have which: "8 x 12, 4 x 36"."""
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ", ".join(f"{item} x {value.count(item)}" for item in dict.fromkeys(value))


def _roles(found: Contents) -> Table:
    table = plain_table("role", "types", ">bytes")
    for role in found.roles:
        types = ", ".join(f"{name} x {use.tensors}" for name, use in role.types.items())
        table.add_row(role.role, types, size(role.bytes))
    return table


def _tokenizer_lines(vocabulary: Vocabulary | None) -> Iterator[str]:
    if vocabulary is None:
        yield "the file has none"
        return
    supported = "supported" if vocabulary.supported else "not supported"
    yield f"{vocabulary.model or _UNKNOWN}, pre-tokenizer {vocabulary.pre or _UNKNOWN}: {supported}"
    yield f"{vocabulary.n_tokens:,} tokens, {vocabulary.n_merges:,} merges"
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id}
    shown = ", ".join(f"{name} {_UNKNOWN if token is None else token}" for name, token in ids.items())
    added = {None: f"add_bos {_UNKNOWN}", True: "bos is added", False: "bos is not added"}
    yield f"{shown}, {added[vocabulary.add_bos]}"


def _template_lines(templates: dict[str, int]) -> Iterator[str]:
    if not templates:
        yield "the file has none: prompts need --raw"
    for name, length in templates.items():
        yield f"{name}: {length:,} characters"


def _fit_lines(found: Contents) -> Iterator[str]:
    assert found.plan is not None and found.token_bytes is not None
    fits = {True: "it fits", False: "it does not fit", None: "whether it fits is not known"}
    basis = "weights as the file has them, no context" if found.estimated else f"context {found.n_ctx}"
    yield f"{fits[found.plan.fits]} ({basis})"
    yield f"one token reads {'about ' if found.estimated else ''}{format_bytes(found.token_bytes)} of weights"
    yield f"split {'on' if found.plan.split.on else 'off'}: {found.plan.split.reason}"
