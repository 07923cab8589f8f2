"""Twin of the dot kernels: the float order that defines each type, and the float64 truth to measure it by."""

from __future__ import annotations

import numpy as np

from strata_jit.kernels.ref.activations import Activation
from strata_jit.kernels.ref.blocks import BLOCK_COLS, FLOAT_BYTES, Array, dequantize, read_blocks, read_floats
from strata_jit.kernels.ref.fma import fma32


def dot(type_name: str, rows: Array, n_cols: int, act: Activation) -> Array:
    """float32[n_rows]: each row (uint8[n_rows, row bytes], as in the file) times one activation row.

    Within a block the sum is an exact integer; blocks are added in ascending order into one accumulator by
    fma(float32(sum), d * da, acc), the mins of Q4_K and Q5_K right after. Float types: four accumulators by
    column mod 4, fma in ascending order, (a0 + a1) + (a2 + a3).
    """
    if type_name in FLOAT_BYTES:
        return _dot_floats(read_floats(type_name, rows, n_cols), act.x)
    blocks = read_blocks(type_name, rows, n_cols)
    n_rows, n_blocks = blocks.d.shape
    products = blocks.weights * act.a.astype(np.int64)
    if blocks.scales is not None:
        products *= np.repeat(blocks.scales, n_cols // blocks.scales.shape[1], axis=1)
    sums = products.reshape(n_rows, n_blocks, BLOCK_COLS[type_name]).sum(axis=2).astype(np.float32)
    scale = blocks.d.astype(np.float32) * act.d
    if blocks.dmin is not None and blocks.mins is not None:
        per_min = (blocks.mins * act.sums.astype(np.int64)).reshape(n_rows, n_blocks, -1)
        min_sums = per_min.sum(axis=2).astype(np.float32)
        min_scale = blocks.dmin.astype(np.float32) * act.d
    acc = np.zeros(n_rows, np.float32)
    for b in range(n_blocks):
        acc = fma32(sums[:, b], scale[:, b], acc)
        if blocks.dmin is not None:
            acc = fma32(-min_sums[:, b], min_scale[:, b], acc)
    return acc


def _dot_floats(weights: Array, x: Array) -> Array:
    acc = np.zeros((len(weights), 4), np.float32)
    for k in range(0, weights.shape[1], 4):
        acc = fma32(weights[:, k : k + 4], x[k : k + 4], acc)
    return np.asarray((acc[:, 0] + acc[:, 1]) + (acc[:, 2] + acc[:, 3]))


def dot_float(type_name: str, rows: Array, n_cols: int, x: Array) -> Array:
    """float64[n_rows]: dequantised weights times the float activations `x`, in float64."""
    return np.asarray(dequantize(type_name, rows, n_cols) @ np.asarray(x, np.float64))
