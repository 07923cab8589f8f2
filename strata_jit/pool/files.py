"""Model files as the pool reads them: opened once, their pages kept out of the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence

from strata_jit.errors import ModelError


def open_part(path: str) -> int:
    """Descriptor of a file part, for reading; `ModelError` if it cannot be opened."""
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as fault:
        raise ModelError(f"{path}: {fault.strerror}") from fault


def drop_pages(files: Sequence[str]) -> None:
    """Write back and drop the page cache of whole files, so that it leaves room for the arenas."""
    for path in files:
        fd = open_part(path)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
