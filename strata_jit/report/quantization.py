"""What `strata-jit quantize` says: a table by role of tensor, or a JSON document with every tensor.

Owns both forms.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from strata_jit.engine.quantize import QuantizedTensor, QuantizeResult
from strata_jit.units import format_bytes, format_seconds

_WIDTH = 120
_COLUMNS = ("role", "tensors", "from", "to", "before", "after", "bits/weight", "relative RMSE, at most")


def quantize_json(result: QuantizeResult) -> str:
    """One line: path, type, bytes, bits per weight, seconds, threads, roles and all tensors."""
    roles = [
        {
            "role": own[0].role,
            "source_type": own[0].source_type,
            "type": own[0].type,
            "tensors": len(own),
            "source_bytes": sum(tensor.source_bytes for tensor in own),
            "bytes": sum(tensor.bytes for tensor in own),
        }
        for own in _by_role(result.tensors)
    ]
    document = {
        "path": result.path,
        "type": result.type,
        "source_bytes": sum(tensor.source_bytes for tensor in result.tensors),
        "bytes": sum(tensor.bytes for tensor in result.tensors),
        "bits_per_weight": _bits_per_weight(result.tensors),
        "seconds": result.seconds,
        "threads": result.threads,
        "roles": roles,
        "tensors": [
            asdict(tensor) | {"bits_per_weight": _bits_per_weight([tensor])} for tensor in result.tensors
        ],
    }
    return json.dumps(document, allow_nan=False) + "\n"


def quantize_table(result: QuantizeResult) -> str:
    """A line for every role and type, then the sums."""
    table = Table(*_COLUMNS)
    for own in _by_role(result.tensors):
        errors = [tensor.relative_rmse for tensor in own if tensor.relative_rmse is not None]
        error = f"{max(errors):.3g}" if errors else "copied"
        table.add_row(own[0].role, str(len(own)), own[0].source_type, own[0].type, *_sizes(own), error)
    table.add_section()
    table.add_row("all", str(len(result.tensors)), "", "", *_sizes(result.tensors), "")
    text = io.StringIO()
    Console(file=text, width=_WIDTH, highlight=False).print(table)
    threads = f"{result.threads} thread{'' if result.threads == 1 else 's'}"
    return f"{text.getvalue()}{format_seconds(result.seconds)} on {threads}\n"


def _by_role(tensors: Sequence[QuantizedTensor]) -> list[list[QuantizedTensor]]:
    """Tensors of one role that went from one type to another, in order of first appearance."""
    groups: dict[tuple[str, str, str], list[QuantizedTensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.role, tensor.source_type, tensor.type), []).append(tensor)
    return list(groups.values())


def _sizes(tensors: Sequence[QuantizedTensor]) -> tuple[str, str, str]:
    before, after = sum(t.source_bytes for t in tensors), sum(t.bytes for t in tensors)
    bits = _bits_per_weight(tensors)
    return format_bytes(before), format_bytes(after), "-" if bits is None else f"{bits:.2f}"


def _bits_per_weight(tensors: Sequence[QuantizedTensor]) -> float | None:
    n_elements = sum(tensor.n_elements for tensor in tensors)
    return 8 * sum(tensor.bytes for tensor in tensors) / n_elements if n_elements else None
