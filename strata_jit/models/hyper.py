"""Hyper-connections in place of the residual stream: what blocks read, and where their output goes.

A block's input is `mix`, its output goes to `residual`, from where the next mix takes it into the streams.
Arithmetic: `kernels/hyper.py`. Tensors, for each mix: NAME_norm, _down, _up and, unless it is the last,
_inject; at the end the mix output_hc_* stands in the place of the output norm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.abi import STEP_N_OUT, STEP_N_ROWS
from strata_jit.models.builder import Act, Count, Target, padded
from strata_jit.models.hparams import positive_multiple
from strata_jit.models.language_model import StepLimits
from strata_jit.models.transformer import Transformer


class HyperTransformer(Transformer):
    """A transformer of `hyper_connection.count` residual streams."""

    def __init__(self, file: GGUFFile, limits: StepLimits, features: Collection[str] = ()) -> None:
        super().__init__(file, limits, features)
        h, b, n_rows = self.h, self.b, limits.max_rows
        self.n_stream = positive_multiple(file, f"{h.arch}.hyper_connection.count")
        self.low_rank = positive_multiple(file, f"{h.arch}.hyper_connection.low_rank", 8)
        self.n_all = self.n_stream * h.n_embd
        self.all_stride = padded(self.n_all)
        self.streams = {
            "streams_scratch": b.scratch(self.all_stride),
            "streams": b.buffer("streams", n_rows * self.all_stride),
            "streams_stride": self.all_stride,
            "n_stream": self.n_stream,
            "n": h.n_embd,
        }
        self.inject_off = padded(self.low_rank)
        self.low_stride = self.inject_off + padded(self.n_stream)
        self._lows = [b.buffer(f"hc_low_{i}", n_rows * self.low_stride) for i in range(2)]
        """Rows of `down`'s output, `inject`'s behind it: of the current mix and of the last one.

        Two, since at one row there is no barrier between taking in the last block's output, which reads
        `inject`, and this mix's matrices.
        """
        self.low_scratch = b.scratch(4 * self.low_rank)
        self.gate = b.buffer("hc_gate", n_rows * self.all_stride)
        self.out_stride = padded(h.n_embd)
        self.out = b.buffer("block_out", n_rows * self.out_stride)
        self._pending: int | None = self.x
        """Buffer that the streams have not taken in yet: the embedding, a block's output."""

    @property
    def residual(self) -> Target:
        """Where a block's output goes: alone into its buffer."""
        return Target(self.out, self.out_stride, add=False, scale=self.h.residual_scale)

    def mix(self, name: str, tensors: Sequence[int]) -> Act:
        """Append the mix whose tensors begin with `name`; returns the row that `tensors`, a block's, read."""
        act = self.act("act", self.h.n_embd, tensors)
        self._mix(name, act, tensors, "rows")
        self._pending = self.out
        return act

    def norm(
        self, label: str, weight: str, act: Act, tensors: Sequence[int], *, gather: bool = False
    ) -> None:
        """The last mix, in the place of the only norm that such a model has: that before the head."""
        if not gather:
            raise ValueError(f"{label}: blocks of a model with hyper-connections read a mix")
        self._mix("output_hc", act, tensors, "out")

    def combine(self, label: str, count: Count = "rows") -> None:
        """Take the embedding or the last block's output into the streams, unless they have it."""
        if self._pending is None:
            return
        fields = {
            "block": self._pending,
            "block_stride": self.x_stride if self._pending == self.x else self.out_stride,
            "inject": self._lows[0],
            "inject_stride": self.low_stride,
            "inject_off": self.inject_off,
            "first": int(self._pending == self.x),
            "gather": int(count == "out"),
        }
        self.b.op("hc_combine", label, fields | self.streams, count=count)
        self._pending = None

    def _mix(self, name: str, act: Act, tensors: Sequence[int], count: Count) -> None:
        self.combine(f"{name}_combine", count)
        self._lows.reverse()
        xn = self._normed(name, count)
        self._gate(name, count)
        fields = {
            "xn_scratch": xn.scratch,
            "xn_shared": xn.shared,
            "xn_stride": xn.stride,
            "xn_off": xn.offsets["F32"],
            "gate": self.gate,
            "gate_stride": self.all_stride,
            "n_stream": self.n_stream,
            "n": self.h.n_embd,
            "count": _count_word(count),
            "tmp_scratch": self.row_scratch,
        }
        self.b.op("hc_mix", f"{name}_mix", fields | self.wanted(act, tensors), count=count)

    def _normed(self, name: str, count: Count) -> Act:
        """Norm of the streams, then `down` and `inject`; returns the normed streams."""
        b = self.b
        tensors = [b.matrix(f"{name}_down.weight", self.n_all, self.low_rank)]
        if count == "rows":
            tensors.append(b.matrix(f"{name}_inject.weight", self.n_all, self.n_stream))
        xn = self.act("hc_act", self.n_all, tensors)
        norm = {
            "weight": b.vector(f"{name}_norm.weight", self.n_all),
            "eps": self.h.eps,
            "gather": int(count == "out"),
        }
        written = self.wanted(xn, tensors) | {"off_f32": xn.offsets["F32"]}
        b.op("hc_norm", f"{name}_norm", self.streams | norm | written, count=count)
        segments = [
            self.segment(tensor, xn, self._lows[0], self.low_stride, offset, scale=1 / self.n_stream)
            for tensor, offset in zip(tensors, (0, self.inject_off), strict=False)
        ]
        self.linear(f"{name}_down", xn, segments, count)
        return xn

    def _gate(self, name: str, count: Count) -> None:
        """From `down`'s output to the gate of every element of the streams."""
        up = self.b.matrix(f"{name}_up.weight", self.low_rank, self.n_all)
        act = self.act("hc_low_act", self.low_rank, [up])
        low = {
            "low": self._lows[0],
            "low_stride": self.low_stride,
            "n": self.low_rank,
            "count": _count_word(count),
            "tmp_scratch": self.low_scratch,
        }
        self.b.op("hc_low", f"{name}_low", low | self.wanted(act, [up]), count=count)
        segment = self.segment(up, act, self.gate, self.all_stride, sigmoid=True)
        self.linear(f"{name}_up", act, [segment], count)


def _count_word(count: Count) -> int:
    return STEP_N_OUT if count == "out" else STEP_N_ROWS
