"""Files that hold a base model's distributions over a text, for another to be compared with.

Owns the format; computes nothing but what is kept of a distribution. Little-endian, without padding:

    bytes[8]  b"STRATKL1"
    u32[3]    n_vocab, n_ctx, n_windows
    bytes[32] SHA-256 of the vocabulary, `Tokenizer.vocabulary_sha256`
    i32[n_windows * n_ctx]  the text's tokens, before a begin-of-text token took the place of the first
    then for each scored position, window by window, n_ctx - 1 - n_ctx // 2 in each:
        u32     n, how many tokens are kept
        f32     natural logarithm of the probability of all other tokens together; -inf if there is none
        f32     natural logarithm of the probability of the token that the text has next
        u32[n]  token ids, the likeliest first
        f32[n]  natural logarithms of their probabilities

Tokens are kept until all others together have at most the probability `REST`, 2**-8. The others count as one,
so a divergence from such a record is never more than the true one, by the log-sum inequality. It falls short
of it by about that share: 0.5 % was measured.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from strata_jit.errors import UsageError

MAGIC = b"STRATKL1"
REST = 2.0**-8
_HEADER = struct.Struct("<8s3I32s")
_RECORD = struct.Struct("<Iff")
_FIRST_KEPT = 64


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one position's distribution; `log_p` are natural logarithms."""

    ids: NDArray[np.uint32]
    log_p: NDArray[np.float32]
    log_rest: float
    log_next: float


def keep(log_p: NDArray[np.float64], following: int) -> Kept:
    """The likeliest tokens of a distribution, float64[n_vocab]; `following` is the text's next token."""
    n = _FIRST_KEPT
    while True:
        ids = _likeliest(log_p, min(n, len(log_p)))
        mass = np.cumsum(np.exp(log_p[ids]))
        if len(ids) == len(log_p) or mass[-1] >= 1 - REST:
            break
        n *= 8
    ids = ids[: int(np.searchsorted(mass, 1 - REST)) + 1]
    others = np.ones(len(log_p), bool)
    others[ids] = False
    rest = float(np.exp(log_p[others]).sum())
    log_rest = float(np.log(rest)) if rest > 0 else -np.inf
    return Kept(ids.astype(np.uint32), log_p[ids].astype(np.float32), log_rest, float(log_p[following]))


def _likeliest(log_p: NDArray[np.float64], n: int) -> NDArray[np.intp]:
    """Ids of the `n` likeliest tokens, the likeliest first, of equal ones the lower id."""
    found = np.sort(np.argpartition(-log_p, n - 1)[:n])
    order: NDArray[np.intp] = found[np.argsort(-log_p[found], kind="stable")]
    return order


@dataclass(frozen=True, slots=True)
class BaseHeader:
    """What a file of distributions is about."""

    n_vocab: int
    vocabulary_sha256: str
    tokens: NDArray[np.int32]
    """int32[n_windows, n_ctx]."""

    @property
    def n_ctx(self) -> int:
        return int(self.tokens.shape[1])

    def check(self, other: BaseHeader, path: Path) -> None:
        """UsageError unless `other`, what is compared with this file's base, is about the same tokens."""
        if (self.n_vocab, self.vocabulary_sha256) != (other.n_vocab, other.vocabulary_sha256):
            sizes = f"its {self.n_vocab} tokens are not this model's {other.n_vocab}"
            raise UsageError(f"{path}: the base has another vocabulary ({sizes}): they cannot be compared")
        if self.n_ctx != other.n_ctx:
            raise UsageError(f"{path}: the base has windows of {self.n_ctx} tokens: give --ctx {self.n_ctx}")
        if self.tokens.shape != other.tokens.shape or (self.tokens != other.tokens).any():
            raise UsageError(f"{path}: the base was written for another text: give the same one")


def base_target(path: str | os.PathLike[str]) -> Path:
    """Where a base will be written, links followed. UsageError for a place that cannot take a file."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        found = "found something that is not a regular file, expected a file to write"
        raise UsageError(f"cannot write the base: {os.fspath(path)}: {found}")
    if not target.parent.is_dir():
        raise UsageError(f"cannot write the base: {target}: {target.parent} is not a directory")
    return target


class BaseWriter:
    """Writes such a file; it is there under its name only when all of it was written.

    OSError, with the path, for whatever the system refuses later, such as for a full disk.
    """

    def __init__(self, path: str | os.PathLike[str], header: BaseHeader) -> None:
        self._path = base_target(path)
        self._part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            self._file = open(self._part, "wb")  # noqa: SIM115  # closed by __exit__
        except OSError as error:
            raise UsageError(f"cannot write the base: {self._path}: {error.strerror}") from None
        self._header = header

    def write(self, kept: Kept) -> None:
        """The next position."""
        self._put(_RECORD.pack(len(kept.ids), kept.log_rest, kept.log_next))
        self._put(kept.ids.astype("<u4").tobytes() + kept.log_p.astype("<f4").tobytes())

    def __enter__(self) -> BaseWriter:
        header = self._header
        n_windows, n_ctx = header.tokens.shape
        sha256 = bytes.fromhex(header.vocabulary_sha256)
        try:
            self._put(_HEADER.pack(MAGIC, header.n_vocab, n_ctx, n_windows, sha256))
            self._put(header.tokens.astype("<i4").tobytes())
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._file.close()
            os.replace(self._part, self._path)
        except OSError as refused:
            self._discard()
            raise self._named(refused) from refused

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._named(error) from error

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # what is still to be written finds no room either
            self._file.close()
        with contextlib.suppress(OSError):
            self._part.unlink()

    def _named(self, error: OSError) -> OSError:
        """The error, about the file that was asked for."""
        return OSError(error.errno, error.strerror, os.fspath(self._path))


class BaseReader:
    """Reads such a file, position by position. UsageError for a file that is none, or not whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115  # closed by __exit__
        except OSError as error:
            raise UsageError(f"cannot read the base: {self.path}: {error.strerror}") from None
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def read(self) -> Kept:
        """The next position."""
        n, log_rest, log_next = _RECORD.unpack(self._take(_RECORD.size))
        if not 0 < n <= self.header.n_vocab:
            raise self._fault(f"a position with {n} tokens")
        ids = np.frombuffer(self._take(4 * n), "<u4")
        log_p = np.frombuffer(self._take(4 * n), "<f4")
        is_log = (log_p <= 0) & np.isfinite(log_p)
        if ids.max() >= self.header.n_vocab or not is_log.all() or not (log_rest <= 0 and log_next <= 0):
            raise self._fault("a position that is no distribution")
        return Kept(ids, log_p, log_rest, log_next)

    def _read_header(self) -> BaseHeader:
        raw = self._file.read(_HEADER.size)
        if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
            raise self._fault("no file of distributions")
        _, n_vocab, n_ctx, n_windows, sha256 = _HEADER.unpack(raw)
        n_bytes = 4 * n_ctx * n_windows
        if not 0 < n_bytes <= os.fstat(self._file.fileno()).st_size:
            raise self._fault("a file that is cut short")
        tokens = np.frombuffer(self._take(n_bytes), "<i4").reshape(n_windows, n_ctx)
        return BaseHeader(n_vocab, sha256.hex(), tokens)

    def _take(self, n_bytes: int) -> bytes:
        raw = self._file.read(n_bytes)
        if len(raw) < n_bytes:
            raise self._fault("a file that is cut short")
        return raw

    def _fault(self, found: str) -> UsageError:
        return UsageError(f"{self.path}: found {found}, expected one that --kl-base wrote: write it again")

    def __enter__(self) -> BaseReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
