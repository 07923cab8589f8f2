"""Twin of the activation quantisation: float32 row -> int8 blocks, and the bytes that dot kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata_jit.kernels.ref.blocks import Array

BLOCK_COLS = {"Q256": 256, "Q32": 32}
KIND_OF_TYPE = {
    "IQ4_XS": "Q256",
    "IQ3_XXS": "Q256",
    "IQ3_S": "Q256",
    "Q2_K": "Q256",
    "Q3_K": "Q256",
    "Q4_K": "Q256",
    "Q5_K": "Q256",
    "Q6_K": "Q256",
    "IQ4_NL": "Q32",
    "MXFP4": "Q32",
    "Q4_0": "Q32",
    "Q4_1": "Q32",
    "Q5_0": "Q32",
    "Q5_1": "Q32",
    "Q8_0": "Q32",
    "BF16": "F32",
    "F32": "F32",
    "F16": "F32",
    "F32_BF16": "F32",
}
"""Matrix type -> kind of activation row that it is multiplied with."""


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation row; `a` and `d` are empty for kind "F32"."""

    kind: str
    x: Array
    """float32[n_cols]: the row itself."""
    a: Array
    """int8[n_cols]."""
    d: Array
    """float32[n_blocks]."""

    @property
    def sums(self) -> Array:
        """int16[n_cols / 16]: sum of `a` over each 16 columns."""
        return self.a.reshape(-1, 16).sum(axis=1, dtype=np.int16)

    @property
    def values(self) -> Array:
        """float64[n_cols]: what the quantised row stands for."""
        if self.kind == "F32":
            return self.x.astype(np.float64)
        return self.a * np.repeat(self.d.astype(np.float64), BLOCK_COLS[self.kind])

    def row(self) -> Array:
        """uint8[...]: the planes of the kind one after the other, each padded with zeros to 64 bytes."""
        if self.kind == "F32":
            return _planes(self.x)
        pairs = np.stack([self.a.reshape(-1, 32), np.abs(self.a).reshape(-1, 32)], axis=1)
        a16 = self.a.reshape(-1, 4)[:, [0, 2, 1, 3]].astype(np.int16)
        sums = self.sums if self.kind == "Q32" else self.sums.reshape(-1, 4)[:, [0, 2, 1, 3]]
        return _planes(pairs, a16, self.d, sums)


def quantize_activation(kind: str, x: Array) -> Activation:
    """Quantise `x` (float32[n_cols]) for `kind`: "Q256", "Q32", or "F32", which keeps it as it is.

    Per block: amax = max |x|, d = amax / 127, a = rint(x * (127 / amax)), all in float32, ties to even.
    A block whose 127 / amax is not finite (amax zero or below 4e-37) has a = 0.
    """
    x = np.asarray(x, np.float32)
    if kind == "F32":
        return Activation(kind, x, np.zeros(0, np.int8), np.zeros(0, np.float32))
    blocks = x.reshape(-1, BLOCK_COLS[kind])
    amax = np.abs(blocks).max(axis=1)
    with np.errstate(divide="ignore", over="ignore"):
        inv = np.float32(127) / amax
    inv = np.where(np.isfinite(inv), inv, np.float32(0))
    a = np.rint(blocks * inv[:, None]).astype(np.int8).reshape(-1)
    return Activation(kind, x, a, amax / np.float32(127))


def _planes(*planes: Array) -> Array:
    out = b""
    for plane in planes:
        data = np.ascontiguousarray(plane).tobytes()
        out += data + bytes(-len(data) % 64)
    return np.frombuffer(out, np.uint8)
