"""What a compiled language model is: its step program and where the host writes and reads.

Data only; the builders fill it, the engine runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_jit.gguf.reader import TensorInfo
from strata_jit.pool.program import Program


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step, and the KV memory, must be able to hold."""

    max_rows: int
    """Rows (tokens) of a step: the prompt chunk."""
    n_ctx: int
    """Positions of a sequence."""
    n_seq: int = 1
    n_nodes: int = 1
    """Node processes, among which KV blocks are dealt in turn."""
    reference: bool = False
    """Store every matrix as float32: the slow, exact path."""
    route_tail_skip: int = 0
    """Lossy: leave out experts that all rows of a step have at this rank (from 0) or later; 0: none."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A shared buffer's content, written once by the host before the first step."""

    buffer: int
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NgramTable:
    """A table of which a token gets several rows, by the last tokens up to it; see `engine/ngram.py`."""

    rows: TensorInfo
    """The table, in the file."""
    buffer: int
    """Buffer id of float32[max_rows][stride / 4]: a token's rows side by side, in the order of the heads."""
    stride: int
    multipliers: tuple[int, ...]
    """Of the token itself, the one before ...; 64 bits."""
    head_offsets: tuple[int, ...]
    """First the heads of pairs of tokens, then of three ..., as many of each."""
    head_vocab_sizes: tuple[int, ...]
    eos: int

    @property
    def ngram_size(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A step program with the places that the host must know."""

    arch: str
    program: Program
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    kv_blocks: int
    """Blocks of KV_BLOCK positions per sequence."""
    x: int
    """Buffer id of float32[max_rows][x_stride / 4]: token embeddings in, residual stream."""
    x_stride: int
    """Bytes from row to row."""
    logits: int
    """Buffer id of float32[max_rows][logits_stride / 4], one row per wanted row."""
    logits_stride: int
    token_embd: TensorInfo
    embedding_scale: float
    """Factor of a token's embedding."""
    constants: tuple[Constant, ...]
    n_expert_used: int
    skipped: int | None
    """Buffer id of int64, choices of experts that were left out so far; None where none is."""
    ngram: NgramTable | None
    notes: tuple[str, ...]
    """What the reader of a file should know, such as layers that are skipped."""
