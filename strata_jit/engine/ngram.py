"""Which rows of the n-gram table a token gets, and reading them.

Owns the hash: with t[j] the j-th token before (t[0] the token itself), the n-gram of n tokens has the number
t[0] * m[0] xor .. xor t[n-1] * m[n-1] in 64 unsigned bits, wrapping; head h of it takes row number mod
head_vocab_sizes[h] + head_offsets[h]. A predecessor that is missing, or an end of turn, stands for an end of
turn there and in all places before it; the token itself is always taken as it is. The numbers must be exact:
never by way of a float.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_jit.engine.embedding import EmbeddingRows
from strata_jit.gguf.reader import GGUFFile
from strata_jit.models.language_model import NgramTable


def row_ids(table: NgramTable, before: Sequence[int], tokens: Sequence[int]) -> NDArray[np.uint64]:
    """uint64[len(tokens), n_head]: rows of the table for each token.

    before  tokens of the sequence before `tokens`, the last ngram_size - 1 or more, as far as there are any
    """
    n_before = table.ngram_size - 1
    known = list(before)[len(before) - min(len(before), n_before) :]
    row = [table.eos] * (n_before - len(known)) + known + list(tokens)
    line, n = np.array(row, np.uint64), len(tokens)
    number = line[n_before:] * np.uint64(table.multipliers[0])
    cut, ids = np.zeros(n, bool), []
    per_ngram = len(table.head_offsets) // n_before
    for back in range(1, table.ngram_size):
        token = line[n_before - back :][:n]
        cut = cut | (token == table.eos)
        number = number ^ np.where(cut, np.uint64(table.eos), token) * np.uint64(table.multipliers[back])
        for head in range((back - 1) * per_ngram, back * per_ngram):
            size, offset = table.head_vocab_sizes[head], table.head_offsets[head]
            ids.append(number % np.uint64(size) + np.uint64(offset))
    return np.stack(ids, axis=1)


class NgramRows:
    """Rows of the table, read from the file."""

    def __init__(self, file: GGUFFile, table: NgramTable) -> None:
        self.table = table
        self._rows = EmbeddingRows(file, table.rows)

    def fill(self, before: Sequence[int], tokens: Sequence[int], out: NDArray[np.float32]) -> None:
        """Write each token's rows side by side to out, float32[n, n_head * n_cols or more]; see `row_ids`."""
        ids, n_cols = row_ids(self.table, before, tokens), self.table.rows.n_cols
        places = [row[i : i + n_cols] for row in out for i in range(0, ids.shape[1] * n_cols, n_cols)]
        self._rows.fill(ids.ravel().tolist(), places)

    def close(self) -> None:
        """Close the file, and let go of its pages."""
        self._rows.close()
