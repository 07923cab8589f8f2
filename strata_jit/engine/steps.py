"""Runs a language model's step program on a pool: rows in, logits out.

Owns the step's inputs (embeddings, rows, KV table) and where its logits lie; knows no text and no sampling.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from strata_jit.engine.embedding import EmbeddingRows
from strata_jit.engine.ngram import NgramRows
from strata_jit.errors import PoolError, UsageError
from strata_jit.kernels import abi
from strata_jit.models.language_model import LanguageModel
from strata_jit.pool.host import Pool

SEQUENCE = 0
"""The one sequence that a `Stepper` decodes."""


class Stepper:
    """One sequence of tokens on a pool."""

    def __init__(
        self,
        pool: Pool,
        model: LanguageModel,
        embedding: EmbeddingRows,
        chunk: int,
        n_nodes: int,
        ngrams: NgramRows | None = None,
    ) -> None:
        self._pool, self._model, self._embedding, self._ngrams = pool, model, embedding, ngrams
        self.chunk = chunk
        self._x = pool.buffer(model.x, np.dtype(np.float32)).reshape(-1, model.x_stride // 4)
        logits: NDArray[np.float32] = pool.buffer(model.logits, np.dtype(np.float32))
        self._logits = logits.reshape(-1, model.logits_stride // 4)
        self._n_ops = len(model.program.ops)
        self._user: object | None = None
        self._recurrent = model.program.state_bytes > 0
        self._next: int | None = 0
        """Position at which the state of recurrent layers stands; None while a step runs."""
        self._before: list[int] = []
        """Last tokens before `_next`, as many as n-grams need."""
        self._lock = threading.Lock()
        # block b of a sequence lives on node b mod n_nodes, in the next free slot there
        pool.kv_table[SEQUENCE] = np.arange(model.kv_blocks) // n_nodes
        for constant in model.constants:
            values = pool.buffer(constant.buffer, constant.values.dtype)
            values[: constant.values.size] = constant.values

    def begin(self, user: object) -> None:
        """Give the sequence to `user`; whoever had it before is refused from now on."""
        self._user = user

    def step(
        self, user: object, tokens: Sequence[int], position: int, want: Sequence[int]
    ) -> NDArray[np.float32]:
        """Run tokens at `position`, `position` + 1, ...; logits of the rows `want` (ascending).

        Returns float32[len(want), n_vocab], a view that the next step overwrites. UsageError unless the
        sequence is still `user`'s: its keys and values are another's by now. PoolError for a position that
        does not go on from the last step's, in a model with recurrent layers.
        """
        with self._lock:
            if self._user is not user:
                raise UsageError(
                    "another generation or logits() has begun on this model, which holds one sequence: "
                    "finish one before the next, or load the model twice"
                )
            return self._run(tokens, position, want)

    def _run(self, tokens: Sequence[int], position: int, want: Sequence[int]) -> NDArray[np.float32]:
        n, model, pool = len(tokens), self._model, self._pool
        self._check_continues(position)
        pool.drain()  # an interrupted generation may have left its last step running
        self._embedding.fill(tokens, self._x[:n, : model.n_embd])
        if self._ngrams is not None:
            self._fill_ngrams(self._ngrams, tokens, position)
        rows = pool.rows[:n]
        rows[:, abi.ROW_TOKEN] = tokens
        rows[:, abi.ROW_POSITION] = np.arange(position, position + n)
        rows[:, abi.ROW_SEQUENCE] = SEQUENCE
        rows[:, abi.ROW_WANT_LOGITS] = 0
        rows[want, abi.ROW_WANT_LOGITS] = 1
        pool.out_rows[: len(want)] = want
        self._next = None
        pool.run(0, self._n_ops, n, len(want))
        self._next = position + n
        view: NDArray[np.float32] = self._logits[: len(want), : model.n_vocab]
        return view

    def _fill_ngrams(self, ngrams: NgramRows, tokens: Sequence[int], position: int) -> None:
        """Rows of the n-gram table for a step; remembers the step's last tokens for the next one."""
        table, before = ngrams.table, self._before if position else []
        out: NDArray[np.float32] = self._pool.buffer(table.buffer, np.dtype(np.float32))
        ngrams.fill(before, tokens, out.reshape(-1, table.stride // 4)[: len(tokens)])
        self._before = [*before, *tokens][1 - table.ngram_size :]

    def _check_continues(self, position: int) -> None:
        """PoolError for a step that recurrent layers cannot take: they hold the state after one position.

        Position 0 begins the sequence anew, so that nobody has to clear the state.
        """
        if self._recurrent and position not in (0, self._next):
            expected = "0" if self._next is None else f"0 or {self._next}"
            raise PoolError(f"step at position {position}: the model's recurrent layers expect {expected}")

    def prompt(self, user: object, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run a prompt from position 0, chunk by chunk; logits float32[n_vocab] after its last token."""
        logits = self._logits[:0]
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            last = start + len(part) == len(tokens)
            logits = self.step(user, part, start, [len(part) - 1] if last else [])
        last_row: NDArray[np.float32] = logits[0]
        return last_row

    def all_logits(
        self, user: object, tokens: Sequence[int], first: int = 0
    ) -> Iterator[NDArray[np.float32]]:
        """Logits after every token from `tokens[first]` on, float32[m, n_vocab] for each chunk.

        A view that the next chunk overwrites.
        """
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start : start + self.chunk]
            logits = self.step(user, part, start, range(max(0, first - start), len(part)))
            if len(logits):
                yield logits
