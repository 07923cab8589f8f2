"""Rows of the token embedding, read from the file on demand.

The table is the largest tensor that a step needs only single rows of, so it stays in the file: a row is read
with pread and dequantised. Knows no program.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata_jit.errors import ModelError, UsageError
from strata_jit.gguf.quants import dequantize
from strata_jit.gguf.reader import GGUFFile, TensorInfo

CACHED_ROWS = 1024


class EmbeddingRows:
    """float32 rows of `token_embd.weight` (uint8 blocks in the file), the latest ones cached."""

    def __init__(self, file: GGUFFile, info: TensorInfo, scale: float = 1.0) -> None:
        """`scale`: factor of every row."""
        self._path = file.parts[info.part]
        self._info = info
        self._scale = np.float32(scale)
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._row = lru_cache(CACHED_ROWS)(self._read)

    def fill(self, tokens: Sequence[int], out: Iterable[NDArray[np.float32]]) -> None:
        """Write rows of `tokens` to out, float32[n_embd] each. UsageError for an id not in the vocabulary."""
        if len(tokens) > 1:
            self._ask_for(tokens)
        for token, target in zip(tokens, out, strict=True):
            target[:] = self._row(token)

    def _ask_for(self, tokens: Sequence[int]) -> None:
        """Let the drive begin with all rows, side by side, before the first is waited for."""
        info = self._info
        for token in set(tokens):
            if 0 <= token < info.n_rows:
                start = info.offset + token * info.row_bytes
                os.posix_fadvise(self._fd, start, info.row_bytes, os.POSIX_FADV_WILLNEED)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def close(self) -> None:
        """Close the file, and let go of the pages that reading rows has left in the page cache."""
        if self._fd >= 0:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._fd)
            self._fd = -1

    def _read(self, token: int) -> NDArray[np.float32]:
        info = self._info
        if not 0 <= token < info.n_rows:
            raise UsageError(f"token id {token}: expected 0 to {info.n_rows - 1}, the model's vocabulary")
        data = os.pread(self._fd, info.row_bytes, info.offset + token * info.row_bytes)
        if len(data) != info.row_bytes:
            raise ModelError(f"{self._path}: the file has become shorter while it was in use")
        return dequantize(info.type, np.frombuffer(data, np.uint8), info.n_cols) * self._scale
