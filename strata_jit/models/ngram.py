"""The n-gram embedding (PLE) as a piece: rows of a table that the host reads, onto the residual streams.

It stands before one layer's first mix. Owns the tensors ple_* and the keys ple.* of a file; which rows a
token gets is `engine/ngram.py`, the arithmetic on the streams `kernels/ngram.py`.
"""

from __future__ import annotations

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.registry import ngram_scratch_bytes
from strata_jit.models.builder import Act, padded
from strata_jit.models.hparams import positive_multiple, whole_numbers
from strata_jit.models.hyper import HyperTransformer
from strata_jit.models.language_model import NgramTable
from strata_jit.models.transformer import NONE

TABLE = "per_layer_token_embd.weight"


class NgramEmbedding:
    """The n-gram embedding of a model."""

    def __init__(self, t: HyperTransformer) -> None:
        self.t = t
        file, h, b, limits = t.file, t.h, t.b, t.limits
        self.layer = _layer(file, h.arch, h.n_layer)
        self.n_tap = positive_multiple(file, f"{h.arch}.ple.conv_kernel")
        self.table = read_table(t)
        self.n_cols = len(self.table.head_offsets) * self.table.rows.n_cols
        self.n_ring = (self.n_tap - 1) * self.table.ngram_size + limits.max_rows
        self.ring = b.buffer("ngram_ring", limits.n_seq * self.n_ring * 4 * t.n_all)
        self.value_off = padded(t.n_all)
        self.key_value_stride = self.value_off + padded(h.n_embd)
        self.key_value = b.buffer("ngram_key_value", limits.max_rows * self.key_value_stride)
        self.row_scratch = b.scratch(4 * self.n_cols)
        self.work = {"work_scratch": b.scratch(ngram_scratch_bytes(t.n_stream, h.n_embd))}

    def add(self, layer: int) -> None:
        """Append the embedding if this is its layer, before the layer's first mix."""
        if layer != self.layer:
            return
        t, blk = self.t, f"blk.{layer}."
        self._project(blk)
        t.combine(f"{blk}ple_combine")
        ring = {"ring": self.ring, "n_ring": self.n_ring}
        parts = ("key", "query", "conv")
        norms = {f"{part}_norm": t.b.vector(f"{blk}ple_norm_{part}.weight", t.n_all) for part in parts}
        source = {
            "key_value": self.key_value,
            "key_value_stride": self.key_value_stride,
            "key_off": 0,
            "value_off": self.value_off,
            "eps": t.h.eps,
        }
        t.b.op("ngram_gate", f"{blk}ple_gate", t.streams | source | norms | ring | self.work)
        conv = {
            "conv": t.b.vector(f"{blk}ple_conv1d.weight", self.n_tap, t.n_all),
            "n_tap": self.n_tap,
            "dilation": self.table.ngram_size,
        }
        t.b.op("ngram_conv", f"{blk}ple_conv", t.streams | conv | ring | self.work)

    def _project(self, blk: str) -> None:
        """Keys and values of the rows that the host has read."""
        t, b = self.t, self.t.b
        key = b.matrix(f"{blk}ple_key.weight", self.n_cols, t.n_all)
        value = b.matrix(f"{blk}ple_value.weight", self.n_cols, t.h.n_embd)
        act: Act = t.act("ngram_act", self.n_cols, [key, value])
        source = {
            "x": self.table.buffer,
            "x_stride": self.table.stride,
            "weight": NONE,
            "n": self.n_cols,
            "eps": 0.0,
            "gather": 0,
            "tmp_scratch": self.row_scratch,
        }
        b.op("norm_quant", f"{blk}ple_quantise", source | t.wanted(act, [key, value]))
        segments = [
            t.segment(key, act, self.key_value, self.key_value_stride),
            t.segment(value, act, self.key_value, self.key_value_stride, self.value_off),
        ]
        t.linear(f"{blk}ple_key_value", act, segments)


def read_table(t: HyperTransformer) -> NgramTable:
    """The table and how tokens index it; ModelError for numbers that do not fit together."""
    file, arch = t.file, t.h.arch
    rows = t.host_rows(TABLE, positive_multiple(file, f"{arch}.embedding_length_per_layer_input", 8))
    size = positive_multiple(file, f"{arch}.ple.ngram_size")
    per_ngram = positive_multiple(file, f"{arch}.ple.heads_per_ngram")
    n_head = (size - 1) * per_ngram
    offsets = _numbers(file, f"{arch}.ple.head_offsets", n_head)
    sizes = _numbers(file, f"{arch}.ple.head_vocab_sizes", n_head)
    for offset, n in zip(offsets, sizes, strict=True):
        if n == 0 or offset + n > rows.n_rows:
            expected = f"1 or more rows, within the {rows.n_rows} of {TABLE}"
            raise ModelError.at(file.path, f"{arch}.ple.head_vocab_sizes", f"{n} from {offset} on", expected)
    stride = padded(n_head * rows.n_cols)
    return NgramTable(
        rows=rows,
        buffer=t.b.buffer("ngram_rows", t.limits.max_rows * stride),
        stride=stride,
        multipliers=_numbers(file, f"{arch}.ple.layer_multipliers", size),
        head_offsets=offsets,
        head_vocab_sizes=sizes,
        eos=_token(file, f"{arch}.ple.eos_token_id"),
    )


def _layer(file: GGUFFile, arch: str, n_layer: int) -> int:
    key = f"{arch}.ple.layers"
    layers = whole_numbers(file, key)
    if len(layers) != 1 or not 0 <= int(layers[0]) < n_layer:
        found = ", ".join(map(str, layers[:8])) or "none"
        raise ModelError.at(file.path, key, found, f"one layer of {n_layer}")
    return int(layers[0])


def _token(file: GGUFFile, key: str) -> int:
    token = file.get(key, int)
    if not 0 <= token < 1 << 32:
        raise ModelError.at(file.path, key, str(token), "a token id, 0 or more")
    return token


def _numbers(file: GGUFFile, key: str, n: int) -> tuple[int, ...]:
    """n unsigned numbers, exact up to 64 bits."""
    values = whole_numbers(file, key)
    if len(values) != n or (values < 0).any():
        found = f"{len(values)} of {values.dtype}"
        raise ModelError.at(file.path, key, found, f"{n} whole numbers from 0 on")
    return tuple(int(value) for value in values)
