"""Reading small files of the kernel below a root, which may be a recorded tree.

Owns access to files: a file that is missing, forbidden or malformed gives None, never an exception. Knows no
file by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from strata_jit.errors import TopologyError
from strata_jit.topology.cpulist import parse_cpulist, parse_cpumask

CHUNK_BYTES = 2**16
"""Files below /proc/sys refuse reads of megabytes."""
MAX_CHUNKS = 256
"""A file that goes on is cut: none of the kernel's is longer."""
_ID = re.compile(r"[0-9]{1,9}")
_INT = re.compile(r"[+-]?[0-9]{1,30}")


@dataclass(frozen=True, slots=True)
class Tree:
    """A file system below `root`; paths have no leading slash."""

    root: Path

    @property
    def live(self) -> bool:
        """Whether it is that of the running system, so that the kernel can be asked as well."""
        return self.root == Path("/")

    def read(self, path: str) -> str | None:
        """Text of a file without white space around it; None if it cannot be read."""
        try:
            with open(self._at(path), "rb", buffering=0) as file:
                data = b"".join(islice(iter(partial(file.read, CHUNK_BYTES), b""), MAX_CHUNKS))
        except (OSError, ValueError):  # ValueError: a path with a null byte
            return None
        return data.decode("utf-8", "replace").strip(" \t\r\n\0")

    def read_int(self, path: str) -> int | None:
        """A decimal number; None if there is none."""
        text = self.read(path)
        return int(text) if text is not None and _INT.fullmatch(text) else None

    def read_list(self, path: str) -> frozenset[int] | None:
        """A list of numbers, which may be empty; None if there is none."""
        return self._parsed(path, mask=False)

    def read_mask(self, path: str) -> frozenset[int] | None:
        """A hexadecimal mask; None if there is none."""
        return self._parsed(path, mask=True)

    def read_set(self, *names: str) -> frozenset[int] | None:
        """The first file that can be read: a list if its name ends in "list", else a mask."""
        for name in names:
            found = self.read_list(name) if name.endswith("list") else self.read_mask(name)
            if found is not None:
                return found
        return None

    def read_choice(self, path: str) -> str | None:
        """The choice in brackets of "always [madvise] never"; a single word without brackets counts too."""
        text = self.read(path) or ""
        match = re.search(r"\[([^\[\]]+)\]", text) or re.fullmatch(r"(\S+)", text)
        return match[1] if match else None

    def read_table(self, path: str) -> dict[str, str]:
        """Lines "key: value" or "key value"; the first of each key."""
        table: dict[str, str] = {}
        for line in (self.read(path) or "").splitlines():
            key, _, value = line.partition(":") if ":" in line else line.partition(" ")
            table.setdefault(key.strip(), value.strip())
        return table

    def numbered(self, path: str, prefix: str) -> list[int]:
        """Numbers N of the entries `prefix`N of a directory, ascending."""
        names = self.names(path)
        found = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        return sorted(int(rest) for rest in found if _ID.fullmatch(rest) and str(int(rest)) == rest)

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted; none if it cannot be listed."""
        try:
            return sorted(entry.name for entry in self._at(path).iterdir())
        except (OSError, ValueError):
            return []

    def exists(self, path: str) -> bool:
        try:
            return self._at(path).exists()
        except (OSError, ValueError):
            return False

    def _at(self, path: str) -> Path:
        # A path that begins with a slash, as of a file system mounted at "/", would leave the root.
        return self.root / path.lstrip("/")

    def _parsed(self, path: str, mask: bool) -> frozenset[int] | None:
        text = self.read(path)
        if text is None:
            return None
        try:
            return parse_cpumask(text) if mask else parse_cpulist(text)
        except TopologyError:
            return None


def kib_of(table: dict[str, str], key: str) -> int | None:
    """Bytes of a field "123 kB"; None if it is missing or malformed."""
    match = re.fullmatch(r"([0-9]{1,18})(?:\s*[kK]B)?", table.get(key, ""))
    return int(match[1]) * 1024 if match else None
