"""Activation rows in tests of the ops that write them: offsets, expected bytes, which bytes count."""

import numpy as np

from strata_jit.kernels.layout import act_planes
from strata_jit.kernels.ref.activations import quantize_activation

KINDS = ("F32", "Q256", "Q32")
BLOCK_COLS = {"F32": 4, "Q256": 256, "Q32": 32}


class Planes:
    """A row of n columns with the planes of the wanted kinds, one kind after the other."""

    def __init__(self, n, kinds):
        self.n, self.kinds = n, kinds
        self.offsets, self.stride = dict.fromkeys(KINDS, -1), 0
        for kind in kinds:
            self.offsets[kind] = self.stride
            self.stride += act_planes(kind, n).nbytes
        self.used = np.zeros(self.stride, bool)
        for kind in kinds:
            self._mark(kind)

    def _mark(self, kind):
        """Padding between planes is nobody's: an op need not write it."""
        planes, used = act_planes(kind, self.n), self.used[self.offsets[kind] :]
        used[: 4 * self.n] = True
        if kind != "F32":
            used[planes.d : planes.d + 4 * (self.n // BLOCK_COLS[kind])] = True
            used[planes.sums : planes.sums + self.n // 8] = True

    def fields(self, scratch, shared):
        """The ACT arguments of an op."""
        return {
            "act_scratch": scratch,
            "act_shared": shared,
            "act_stride": self.stride,
            **{f"off_{kind.lower()}": offset for kind, offset in self.offsets.items()},
        }

    def expected(self, rows):
        """uint8[n_rows, n used bytes] of float32[n_rows, n]."""
        whole = [np.concatenate([quantize_activation(k, row).row() for k in self.kinds]) for row in rows]
        return np.stack(whole)[:, self.used]
