"""Gated delta net as a piece of a transformer: projections, convolution, recurrence, gated norm, output.

Owns the tensors' names and forms (as llama.cpp's src/models/qwen3next.cpp reads them), the buffers of a step,
and the memory that the states need. Which layers have one is read here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.registry import (
    DELTA_COLUMNS,
    DELTA_TAPS,
    GATE_SIGMOID,
    GATE_SILU,
    delta_scratch_bytes,
    delta_state_bytes,
)
from strata_jit.models.builder import Act, Target, padded
from strata_jit.models.hparams import Hparams
from strata_jit.models.transformer import Transformer

__all__ = ["GATE_SIGMOID", "GATE_SILU", "DeltaNet", "recurrent_layers"]

FULL_ATTENTION_INTERVAL = 4
"""Where a file says nothing: every fourth layer has attention."""


def recurrent_layers(file: GGUFFile, h: Hparams) -> tuple[int, ...]:
    """Layers with a recurrent state instead of attention, ascending."""
    key = f"{h.arch}.attention.recurrent_layers"
    if key in file.metadata:
        flags = file.get(key, np.ndarray)
        if len(flags) < h.n_layer:
            raise ModelError.at(file.path, key, f"{len(flags)} items", f"one for each of {h.n_layer} layers")
        return tuple(layer for layer in range(h.n_layer) if flags[layer])
    key = f"{h.arch}.full_attention_interval"
    interval = file.get(key, int, FULL_ATTENTION_INTERVAL)
    if interval < 1:
        raise ModelError.at(file.path, key, str(interval), "1 or more")
    return tuple(layer for layer in range(h.n_layer) if (layer + 1) % interval)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a delta net. Keys of the file are named as for Mamba layers."""

    n_k: int
    n_v: int
    dim: int
    """Of q, k and v heads alike."""

    @property
    def group(self) -> int:
        """v heads for each k head."""
        return self.n_v // self.n_k

    @property
    def n_key(self) -> int:
        return self.n_k * self.dim

    @property
    def n_value(self) -> int:
        return self.n_v * self.dim

    @property
    def channels(self) -> int:
        """q, k and v elements, which the convolution runs over."""
        return 2 * self.n_key + self.n_value


def read_heads(file: GGUFFile, arch: str) -> DeltaHeads:
    """ModelError names the key and what is expected of it."""

    def checked(name: str, is_right: bool, expected: str) -> None:
        if not is_right:
            raise ModelError.at(file.path, f"{arch}.ssm.{name}", str(found[name]), expected)

    names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    found = {name: file.get(f"{arch}.ssm.{name}", int) for name in names}
    _, dim, n_k, n_v, inner = found.values()
    checked("conv_kernel", found["conv_kernel"] == DELTA_TAPS, f"{DELTA_TAPS}")
    checked("state_size", dim > 0 and dim % DELTA_COLUMNS == 0, f"a multiple of {DELTA_COLUMNS}")
    checked("group_count", n_k > 0, "a positive number")
    checked("time_step_rank", n_v > 0 and n_v % n_k == 0, f"a multiple of group_count {n_k}")
    checked("inner_size", inner == n_v * dim, f"time_step_rank {n_v} x state_size {dim}")
    return DeltaHeads(n_k, n_v, dim)


class DeltaNet:
    """The delta nets of a model's recurrent layers."""

    def __init__(
        self,
        t: Transformer,
        layers: Sequence[int],
        *,
        tiled: bool = False,
        z_mode: int = GATE_SILU,
        target: Target | None = None,
    ) -> None:
        """
        layers  layers that have one, ascending
        tiled   v head h reads k head h mod n_k, else h // (n_v / n_k)
        z_mode  GATE_SILU or GATE_SIGMOID: what the output is multiplied with
        target  where the result goes; None: it is added to the residual stream, times `h.residual_scale`
        """
        self.t, self.layers, self.tiled, self.z_mode = t, tuple(layers), tiled, z_mode
        self.target = target or t.residual
        self.heads = heads = read_heads(t.file, t.h.arch)
        b, n_rows = t.b, t.limits.max_rows
        # q, k, v, z of either form, then beta and alpha
        self.gate_off = padded(heads.channels) + padded(heads.n_value)
        self.proj_stride = self.gate_off + padded(2 * heads.n_v)
        self.proj = b.buffer("delta_proj", n_rows * self.proj_stride)
        self.gates = b.buffer("delta_gates", n_rows * 8 * heads.n_v)
        self.out_stride = 8 * heads.n_value
        self.out = b.buffer("delta_out", n_rows * self.out_stride)
        self.history_layer_bytes = 4 * DELTA_TAPS * heads.channels
        self.history_stride = len(self.layers) * self.history_layer_bytes
        self.history = b.buffer("delta_history", t.limits.n_seq * self.history_stride)
        self.state_layer_bytes = delta_state_bytes(heads.n_v, heads.dim)
        self.state_stride = len(self.layers) * self.state_layer_bytes
        self.work = b.scratch(delta_scratch_bytes(heads.dim))
        self.norm_scratch = b.scratch(4 * heads.n_value)

    @property
    def state_bytes(self) -> int:
        """State of all layers and sequences."""
        return self.t.limits.n_seq * self.state_stride

    def add(self, layer: int) -> None:
        """Append a layer: norm of the residual stream, and the delta net."""
        self.t.normed(self, layer, "attn_norm")

    def inputs(self, layer: int) -> list[int]:
        """The matrices that read the layer's input: whoever writes it writes their kinds of activation."""
        return [tensor for tensor, _ in self._projections(layer)]

    def run(self, layer: int, act: Act) -> None:
        """Append a layer's delta net alone, of activation rows [n_embd] in the kinds of `inputs`."""
        t, b, heads, blk = self.t, self.t.b, self.heads, f"blk.{layer}."
        segments = [
            t.segment(tensor, act, self.proj, self.proj_stride, offset)
            for tensor, offset in self._projections(layer)
        ]
        t.linear(f"{blk}delta_proj", act, segments)
        common = self._common(layer)
        b.op("delta_conv", f"{blk}delta_conv", common)
        index, result = self.layers.index(layer), {"out": self.out, "out_stride": self.out_stride}
        recurrence = {
            "state_off": index * self.state_layer_bytes,
            "state_stride": self.state_stride,
            "z_mode": self.z_mode,
            "work_scratch": self.work,
        }
        b.op("delta_net", f"{blk}delta_net", common | result | recurrence)
        ssm_out = b.matrix(f"{blk}ssm_out.weight", heads.n_value, t.h.n_embd)
        normed = t.act("delta_act", heads.n_value, [ssm_out])
        norm = {
            "n_head": heads.n_v,
            "head_dim": heads.dim,
            "norm": b.vector(f"{blk}ssm_norm.weight", heads.dim),
            "eps": t.h.eps,
            "tmp_scratch": self.norm_scratch,
        }
        b.op("delta_norm", f"{blk}delta_norm", result | norm | t.wanted(normed, [ssm_out]))
        t.linear(f"{blk}ssm_out", normed, [t.segment_to(self.target, ssm_out, normed)])

    def _is_grouped(self, layer: int) -> bool:
        """Whether q, k, v and z of a k head's group come together, as in qwen3next's first files."""
        return self.t.b.has(f"blk.{layer}.ssm_in.weight")

    def _projections(self, layer: int) -> list[tuple[int, int]]:
        """(matrix, byte offset of its output in a row of projections)."""
        b, heads, n_embd, blk = self.t.b, self.heads, self.t.h.n_embd, f"blk.{layer}."
        if self._is_grouped(layer):
            wide = [("ssm_in", heads.channels + heads.n_value, 0)]
        else:
            wide = [("attn_qkv", heads.channels, 0), ("attn_gate", heads.n_value, padded(heads.channels))]
        if b.has(f"{blk}ssm_ba.weight"):
            gates = [("ssm_ba", 2 * heads.n_v, self.gate_off)]
        else:
            alpha_off = self.gate_off + 4 * heads.n_v
            gates = [("ssm_beta", heads.n_v, self.gate_off), ("ssm_alpha", heads.n_v, alpha_off)]
        return [(b.matrix(f"{blk}{name}.weight", n_embd, n), offset) for name, n, offset in wide + gates]

    def _common(self, layer: int) -> dict[str, float]:
        """Arguments that delta_conv and delta_net share."""
        b, heads, blk = self.t.b, self.heads, f"blk.{layer}."
        return self._places(layer) | {
            "proj": self.proj,
            "proj_stride": self.proj_stride,
            "gate_off": self.gate_off,
            "gate_group": heads.group if b.has(f"{blk}ssm_ba.weight") else heads.n_v,
            "n_head_k": heads.n_k,
            "n_head_v": heads.n_v,
            "head_dim": heads.dim,
            "k_run": 1 if self.tiled else heads.group,
            "conv": b.vector(f"{blk}ssm_conv1d.weight", DELTA_TAPS, heads.channels),
            "dt": b.vector(f"{blk}ssm_dt.bias", heads.n_v),
            "a": b.vector(f"{blk}ssm_a", heads.n_v),
            "history": self.history,
            "history_off": self.layers.index(layer) * self.history_layer_bytes,
            "history_stride": self.history_stride,
            "eps": self.t.h.eps,
            "q_scale": heads.dim**-0.5,
            "gates": self.gates,
        }

    def _places(self, layer: int) -> dict[str, float]:
        """Where q, k, v and z heads stand in a row of projections."""
        heads, head = self.heads, 4 * self.heads.dim
        if self._is_grouped(layer):
            starts = (0, head, 2 * head, head * (2 + heads.group))
            qk_stride = vz_stride = head * (2 + 2 * heads.group)
        else:
            starts = (0, 4 * heads.n_key, 8 * heads.n_key, padded(heads.channels))
            qk_stride, vz_stride = head, head * heads.group
        offsets = zip(("q_off", "k_off", "v_off", "z_off"), starts, strict=True)
        return {**dict(offsets), "qk_stride": qk_stride, "vz_stride": vz_stride}
