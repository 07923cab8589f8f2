"""Hyper-connections in place of the residual stream: what blocks read, and where their output goes.

For the pieces nothing changes: they call `norm` for their input and add their output to `x`. Here `norm`
first takes the last block's output out of `x` into the streams, then mixes the streams into the activation
row; `x` is 0 again when the next block adds to it. Arithmetic: `kernels/hyper.py`. Tensors, per block:
hc_attn_* and hc_ffn_*, at the end output_hc_*.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.abi import STEP_N_OUT, STEP_N_ROWS
from strata_jit.models.builder import Act, Count, padded
from strata_jit.models.language_model import StepLimits
from strata_jit.models.transformer import Transformer

PREFIXES = {"attn_norm": "hc_attn", "ffn_norm": "hc_ffn", "output_norm": "output_hc"}
"""Norm that a piece asks for -> tensors of the mix that stands in its place."""


class HyperTransformer(Transformer):
    """A transformer of `hyper_connection.count` residual streams."""

    def __init__(self, file: GGUFFile, limits: StepLimits, features: Collection[str] = ()) -> None:
        super().__init__(file, limits, features)
        h, b, n_rows = self.h, self.b, limits.max_rows
        self.n_stream = _multiple(file, f"{h.arch}.hyper_connection.count", 1)
        self.low_rank = _multiple(file, f"{h.arch}.hyper_connection.low_rank", 8)
        self.n_streams = self.n_stream * h.n_embd
        stride = self.gate_stride = padded(self.n_streams)
        self.streams = {
            "streams_scratch": b.scratch(stride),
            "streams": b.buffer("streams", n_rows * stride),
            "streams_stride": stride,
            "n_stream": self.n_stream,
            "n": h.n_embd,
        }
        self.low_stride = padded(self.low_rank) + padded(self.n_stream)
        """A row of it: `down`, then `inject`."""
        self.low = b.buffer("hc_low", n_rows * self.low_stride)
        self.low_scratch = b.scratch(4 * self.low_rank)
        self.gate = b.buffer("hc_gate", n_rows * stride)
        self.has_streams = False
        """Whether there are streams yet; else `x` holds the embedding."""
        self.pending = True
        """Whether `x` holds something that is not yet in the streams."""

    def norm(
        self, label: str, weight: str, act: Act, tensors: Sequence[int], *, gather: bool = False
    ) -> None:
        """The mix that stands in the norm's place, into the activation row."""
        blk, _, name = label.rpartition(".")
        self.mix(f"{blk}.{PREFIXES[name]}" if blk else PREFIXES[name], act, tensors, gather=gather)

    def combine(self, label: str, *, gather: bool = False) -> None:
        """Put what `x` holds, the embedding or a block's output, into the streams, unless it is there."""
        if not self.pending:
            return
        fields = {
            "block": self.x,
            "block_stride": self.x_stride,
            "inject": self.low,
            "inject_stride": self.low_stride,
            "inject_off": padded(self.low_rank),
            "first": int(not self.has_streams),
            "gather": int(gather),
        }
        self.has_streams, self.pending = True, False
        self.b.op("hc_combine", label, fields | self.streams, count="out" if gather else "rows")

    def mix(self, name: str, act: Act, tensors: Sequence[int], *, gather: bool) -> None:
        """Append a mix, its tensors named `name`_norm, _down, _up and, unless it is the last, _inject."""
        self.combine(f"{name}_combine", gather=gather)
        xn = self._normed(name, gather)
        self._gate(name, gather)
        mixed = {
            "xn_scratch": xn.scratch,
            "xn_shared": xn.shared,
            "xn_stride": xn.stride,
            "xn_off": xn.offsets["F32"],
            "gate": self.gate,
            "gate_stride": self.gate_stride,
            "n_stream": self.n_stream,
            "n": self.h.n_embd,
            "count": STEP_N_OUT if gather else STEP_N_ROWS,
            "block": self.x,
            "block_stride": self.x_stride,
            "clear": int(not gather),
            "tmp_scratch": self.row_scratch,
        }
        count: Count = "out" if gather else "rows"
        self.b.op("hc_mix", f"{name}_mix", mixed | self.wanted(act, tensors), count=count)
        self.pending = True

    def _normed(self, name: str, gather: bool) -> Act:
        """Norm of the streams, then `down` and `inject`; returns the normed streams."""
        b = self.b
        count: Count = "out" if gather else "rows"
        inputs = {"down": b.matrix(f"{name}_down.weight", self.n_streams, self.low_rank)}
        if not gather:
            inputs["inject"] = b.matrix(f"{name}_inject.weight", self.n_streams, self.n_stream)
        xn = self.act("hc_act", self.n_streams, list(inputs.values()))
        norm = {
            "weight": b.vector(f"{name}_norm.weight", self.n_streams),
            "eps": self.h.eps,
            "gather": int(gather),
        }
        written = self.wanted(xn, list(inputs.values())) | {"off_f32": xn.offsets["F32"]}
        b.op("hc_norm", f"{name}_norm", self.streams | norm | written, count=count)
        offsets = {"down": 0, "inject": padded(self.low_rank)}
        segments = [
            self.segment(tensor, xn, self.low, self.low_stride, offsets[part], scale=1 / self.n_stream)
            for part, tensor in inputs.items()
        ]
        self.linear(f"{name}_down", xn, segments, count=count)
        return xn

    def _gate(self, name: str, gather: bool) -> None:
        """From `down`'s output to the gate of every element of the streams."""
        b = self.b
        count: Count = "out" if gather else "rows"
        up = b.matrix(f"{name}_up.weight", self.low_rank, self.n_streams)
        act = self.act("hc_low_act", self.low_rank, [up])
        low = {
            "low": self.low,
            "low_stride": self.low_stride,
            "n": self.low_rank,
            "count": STEP_N_OUT if gather else STEP_N_ROWS,
            "tmp_scratch": self.low_scratch,
        }
        b.op("hc_low", f"{name}_low", low | self.wanted(act, [up]), count=count)
        segment = self.segment(up, act, self.gate, self.gate_stride, sigmoid=True)
        self.linear(f"{name}_up", act, [segment], count=count)


def _multiple(file: GGUFFile, key: str, factor: int) -> int:
    value = file.get(key, int)
    if value <= 0 or value % factor:
        raise ModelError.at(file.path, key, str(value), f"a positive multiple of {factor}")
    return value
