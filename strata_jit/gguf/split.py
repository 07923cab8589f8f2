"""Models split over several files, `NAME-00001-of-00003.gguf` and so on: names of the parts and their checks.

Owns the naming rule and the `split.*` keys; reads no file. Source: llama.cpp `llama_split_path` and
llama-model-loader.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_jit.errors import ModelError
from strata_jit.gguf.metadata import typed_value

MAX_PARTS = 65535
"""`split.count` is written as 16 bits."""


@dataclass(frozen=True, slots=True)
class SplitKeys:
    """What a file says of its place in a split model: part `no` (from 0) of `count`."""

    no: int
    count: int
    n_tensors: int | None

    @property
    def is_split(self) -> bool:
        return self.count > 1


def read_split_keys(path: Path, metadata: Mapping[str, Any]) -> SplitKeys:
    """The `split.*` keys of one file, checked within themselves; a file without them is part 0 of 1."""
    count = typed_value(path, metadata, "split.count", int) or 0
    if count <= 1:
        return SplitKeys(0, 1, None)
    if not 0 < count <= MAX_PARTS:
        raise ModelError.at(path, "'split.count'", str(count), f"at most {MAX_PARTS}")
    no = typed_value(path, metadata, "split.no", int)
    if no is None or not 0 <= no < count:
        found = "nothing" if no is None else str(no)
        raise ModelError.at(path, "'split.no'", found, f"0 to {count - 1}")
    return SplitKeys(no, count, typed_value(path, metadata, "split.tensors.count", int))


def part_paths(path: Path, keys: SplitKeys) -> tuple[Path, ...]:
    """Paths of all parts, given one of them; `ModelError` naming the first that is missing."""
    suffix = _suffix(keys.no, keys.count)
    if not path.name.endswith(suffix):
        found = f"part {keys.no + 1} of {keys.count} under another name"
        raise ModelError.at(path, "file name", found, f"a name that ends in {suffix}, as when it was split")
    prefix = path.name[: -len(suffix)]
    paths = []
    for no in range(keys.count):
        part = path.with_name(prefix + _suffix(no, keys.count))
        if not part.exists():
            found = f"no such file, which is part {no + 1} of {keys.count}"
            raise ModelError.at(part, "file", found, f"all {keys.count} parts in one directory")
        paths.append(part)
    return tuple(paths)


def check_part(path: Path, keys: SplitKeys, no: int, count: int) -> None:
    """Refuse a file that says it is another part, or a part of another model, than its name says."""
    if (keys.no, keys.count) != (no, count):
        found = f"part {keys.no + 1} of {keys.count}"
        raise ModelError.at(path, "'split.no' and 'split.count'", found, f"part {no + 1} of {count}")


def check_tensor_count(path: Path, keys: SplitKeys, n_tensors: int) -> None:
    """Refuse a split model whose parts hold more or fewer tensors together than the first says."""
    if keys.n_tensors != n_tensors:
        found = "nothing" if keys.n_tensors is None else str(keys.n_tensors)
        raise ModelError.at(path, "'split.tensors.count'", found, f"the {n_tensors} tensors of all parts")


def _suffix(no: int, count: int) -> str:
    return f"-{no + 1:05d}-of-{count:05d}.gguf"
