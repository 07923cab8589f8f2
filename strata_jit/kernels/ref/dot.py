"""Twin of the dot kernels: the float order that defines each type, and the float64 truth to measure it by."""

from __future__ import annotations

import numpy as np

from strata_jit.kernels.ref.activations import Activation
from strata_jit.kernels.ref.blocks import (
    BLOCK_COLS,
    FLOAT_BYTES,
    Array,
    Blocks,
    dequantize,
    read_blocks,
    read_floats,
)
from strata_jit.kernels.ref.fma import fma32


def dot(type_name: str, rows: Array, n_cols: int, act: Activation) -> Array:
    """float32[n_rows]: each row (uint8[n_rows, row bytes], as in the file) times one activation row.

    Within a block the sum is an exact integer; blocks are added in ascending order into one accumulator by
    fma(float32(sum), d * da, acc), the mins of Q2_K, Q4_K and Q5_K or the m of Q4_1 and Q5_1 right after.
    Float types: four accumulators by column mod 4, fma in ascending order, (a0 + a1) + (a2 + a3).
    """
    if type_name in FLOAT_BYTES:
        return _dot_floats(read_floats(type_name, rows, n_cols), act.x)
    blocks = read_blocks(type_name, rows, n_cols)
    n_rows, n_blocks = blocks.d.shape
    products = blocks.weights * act.a.astype(np.int64)
    if blocks.scales is not None:
        products *= np.repeat(blocks.scales, n_cols // blocks.scales.shape[1], axis=1)
    sums = products.reshape(n_rows, n_blocks, BLOCK_COLS[type_name]).sum(axis=2).astype(np.float32)
    scale = blocks.scale_d * act.d
    second = _second_terms(blocks, act)
    acc = np.zeros(n_rows, np.float32)
    for b in range(n_blocks):
        acc = fma32(sums[:, b], scale[:, b], acc)
        if second is not None:
            acc = fma32(second[0][:, b], second[1][:, b], acc)
    return acc


def _second_terms(blocks: Blocks, act: Activation) -> tuple[Array, Array] | None:
    """The factors of each block's term of mins (-sum of min * sum(a), dmin * da) or of m (sum(a), m * da)."""
    n_rows, n_blocks = blocks.d.shape
    if blocks.m is not None:
        sums = act.sums.reshape(1, n_blocks, -1).sum(axis=2, dtype=np.int64)
        return np.repeat(sums.astype(np.float32), n_rows, axis=0), blocks.m.astype(np.float32) * act.d
    if blocks.dmin is None or blocks.mins is None:
        return None
    per_min = blocks.mins * act.sums.reshape(blocks.mins.shape[1], -1).sum(axis=1, dtype=np.int64)
    sums = per_min.reshape(n_rows, n_blocks, -1).sum(axis=2)
    return -sums.astype(np.float32), blocks.dmin.astype(np.float32) * act.d


def _dot_floats(weights: Array, x: Array) -> Array:
    acc = np.zeros((len(weights), 4), np.float32)
    for k in range(0, weights.shape[1], 4):
        acc = fma32(weights[:, k : k + 4], x[k : k + 4], acc)
    return np.asarray((acc[:, 0] + acc[:, 1]) + (acc[:, 2] + acc[:, 3]))


def dot_float(type_name: str, rows: Array, n_cols: int, x: Array) -> Array:
    """float64[n_rows]: dequantised weights times the float activations `x`, in float64."""
    return np.asarray(dequantize(type_name, rows, n_cols) @ np.asarray(x, np.float64))
