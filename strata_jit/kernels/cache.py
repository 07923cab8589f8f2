"""Where compiled kernels are kept, and who may compile.

Owns the cache directory (named by the hash of all kernel sources and of the compiler's versions, since Numba
does not notice an edit in a file that a cached kernel calls into) and the lock around compiling. Knows no
kernel and loads no Numba, so that the host process can name the directory before a node process starts.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class KernelCache:
    """A writable directory for compiled kernels."""

    path: Path
    temporary: bool
    """True where no lasting directory can be written: `close` removes it."""

    def close(self) -> None:
        """Remove the directory if it was only for this run."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def sources_hash() -> str:
    """Hash of all kernel sources and tables, of Python's and the compilers' versions: 16 hex digits."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for source in (*sorted(root.rglob("*.py")), root.parent / "gguf" / "grids.py"):
        digest.update(source.relative_to(root.parent).as_posix().encode() + b"\0" + source.read_bytes())
    digest.update(f"{sys.version} {version('numba')} {version('llvmlite')}".encode())
    return digest.hexdigest()[:16]


def open_cache() -> KernelCache:
    """The user's kernel cache, in $XDG_CACHE_HOME or ~/.cache; a temporary one if that cannot be written."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = base / "strata-jit" / f"kernels-{sources_hash()}"
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return KernelCache(path, temporary=False)
    except (OSError, RuntimeError):  # read-only or full file system; no home directory at all
        return KernelCache(Path(tempfile.mkdtemp(prefix="strata-jit-kernels-")), temporary=True)


@contextmanager
def lock(path: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the cache's lock: exclusive to compile, shared to load what is there."""
    with open(path / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def clear(path: Path) -> None:
    """Remove everything but the lock: what could not be read must be compiled anew."""
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()
