"""What every transformer family is built on: the residual stream, norms, matrices, the head.

Owns the activation rows that pieces share and the end of the program. Pieces (`attention.py`, `ffn.py`)
append ops between; the residual stream `x` is the only state between them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile, TensorInfo
from strata_jit.kernels.abi import STEP_N_OUT, STEP_N_ROWS
from strata_jit.kernels.scratch import tmp_scratch_bytes
from strata_jit.models.builder import NONE as NONE
from strata_jit.models.builder import Act, Count, ProgramBuilder, Target, padded
from strata_jit.models.hparams import Hparams, read_hparams
from strata_jit.models.language_model import Constant, LanguageModel, NgramTable, StepLimits


class Half(Protocol):
    """One half of a layer: a mixer or a feed-forward, apart from the norm before it."""

    def inputs(self, layer: int) -> list[int]:
        """The matrices that read the layer's input."""

    def run(self, layer: int, act: Act) -> None:
        """Append the half, of activation rows [n_embd] in the kinds of `inputs`."""


class Transformer:
    """Builds the program of one model: pieces append their ops, then `finish`."""

    def __init__(self, file: GGUFFile, limits: StepLimits, features: Collection[str] = ()) -> None:
        """`features`: keys of the file that the family's pieces read, see `hparams.FEATURES`."""
        self.h: Hparams = read_hparams(file, features)
        self.file, self.limits = file, limits
        self.b = ProgramBuilder(file, reference=limits.reference)
        self.x_stride = padded(self.h.n_embd)
        self.x = self.b.buffer("x", limits.max_rows * self.x_stride)
        self.row_scratch = self.b.scratch(4 * self.h.n_embd)
        self.tile_scratch = self.b.scratch(tmp_scratch_bytes())
        self.constants: list[Constant] = []
        self._acts: dict[str, Act] = {}
        self._on_host: list[str] = []

    # --- what pieces use ----------------------------------------------------------------------------------

    def act(self, name: str, n_cols: int, tensors: Sequence[int]) -> Act:
        """The activation row `name`, wide enough for every kind that any layer may want."""
        if name not in self._acts:
            kinds = {self.b.act_kind(t) for t in tensors} if self.limits.reference else ("F32", "Q256", "Q32")
            usable = [k for k in kinds if n_cols % {"F32": 4, "Q256": 256, "Q32": 32}[k] == 0]
            self._acts[name] = self.b.act(name, n_cols, usable, self.limits.max_rows)
        return self._acts[name]

    def wanted(self, act: Act, tensors: Sequence[int]) -> dict[str, int]:
        """Fields to write `act`, with only the kinds that `tensors` read."""
        kinds = {self.b.act_kind(t) for t in tensors}
        return act.write | {f"off_{k.lower()}": NONE for k in act.offsets if k not in kinds}

    def norm(
        self, label: str, weight: str, act: Act, tensors: Sequence[int], *, gather: bool = False
    ) -> None:
        """RMS norm of the residual stream into the activation row."""
        h = self.h
        fields = {
            "x": self.x,
            "x_stride": self.x_stride,
            "weight": self.b.vector(weight, h.n_embd),
            "n": h.n_embd,
            "eps": h.eps,
            "gather": int(gather),
            "tmp_scratch": self.row_scratch,
            **self.wanted(act, tensors),
        }
        self.b.op("norm_quant", label, fields, count="out" if gather else "rows")

    def normed(self, half: Half, layer: int, norm: str) -> None:
        """Append a layer's half behind the norm `norm` of the residual stream."""
        tensors, name = half.inputs(layer), f"blk.{layer}.{norm}"
        act = self.act("act", self.h.n_embd, tensors)
        self.norm(name, f"{name}.weight", act, tensors)
        half.run(layer, act)

    def linear(
        self,
        label: str,
        act: Act,
        segments: Sequence[dict[str, float]],
        count: Count = "rows",
        *,
        at_one_row: bool = True,
    ) -> None:
        """Matrices that read the same activation row; segments as `segment` gives them.

        at_one_row  False: nothing in a step of one row, where another op does it
        """
        fields = {
            **act.read,
            "count": STEP_N_OUT if count == "out" else STEP_N_ROWS,
            "tmp_scratch": self.tile_scratch,
            "n_segments": len(segments),
        }
        self.b.op("linear" if at_one_row else "linear_rows", label, fields, segments, count)

    def segment(
        self,
        tensor: int,
        act: Act,
        out: int,
        stride: int,
        offset: int = 0,
        *,
        add: bool = False,
        bias: int = NONE,
        scale: float = 1.0,
        sigmoid: bool = False,
    ) -> dict[str, float]:
        """One matrix of a `linear`."""
        return {
            "tensor": tensor,
            "act_off": act.offsets[self.b.act_kind(tensor)],
            "out": out,
            "out_stride": stride,
            "out_offset": offset,
            "add": int(add),
            "bias": bias,
            "scale": scale,
            "sigmoid": int(sigmoid),
        }

    def segment_to(self, target: Target, tensor: int, act: Act, *, bias: int = NONE) -> dict[str, float]:
        """One matrix of a `linear` whose output is the result of a layer's half."""
        add, scale = target.add, target.scale
        return self.segment(tensor, act, target.buffer, target.stride, add=add, bias=bias, scale=scale)

    @property
    def residual(self) -> Target:
        """The residual stream, to which a layer's half adds its result."""
        return Target(self.x, self.x_stride, scale=self.h.residual_scale)

    def optional_bias(self, name: str, n: int) -> int:
        """Id of a bias vector, NONE where the file has none."""
        return self.b.vector(name, n) if self.b.has(name) else NONE

    def host_vector(self, name: str, n: int) -> list[float]:
        """Values of a short float32 tensor that the host itself needs; ModelError unless all are positive."""
        info = self.file.tensor(name)
        if info.shape != (n,) or info.type.name != "F32":
            found = f"{info.type.name} of {' x '.join(map(str, info.shape))}"
            raise ModelError.at(self.file.path, f"tensor {name}", found, f"F32 of {n}")
        values = np.fromfile(self.file.parts[info.part], "<f4", n, offset=info.offset)
        if not (len(values) == n and (values > 0).all() and np.isfinite(values).all()):
            raise ModelError.at(self.file.path, f"tensor {name}", "other values", "positive numbers")
        self._on_host.append(name)
        return [float(value) for value in values]

    def host_rows(self, name: str, n_cols: int) -> TensorInfo:
        """A matrix whose rows the host reads from the file one by one."""
        self._on_host.append(name)
        return self.b.embedding(name, n_cols)

    # --- the end ------------------------------------------------------------------------------------------

    def finish(
        self,
        *,
        kv_blocks: int,
        kv_bytes: int,
        state_bytes: int = 0,
        skipped: int | None = None,
        ngram: NgramTable | None = None,
    ) -> LanguageModel:
        """Output norm and head; then the whole model.

        kv_blocks, kv_bytes  as the family's attention has them
        state_bytes          as `delta_net.DeltaNet` has them
        skipped              buffer id of the int64 that counts choices of experts left out
        """
        h, b = self.h, self.b
        embd = self.host_rows("token_embd.weight", h.n_embd)
        n_vocab = embd.n_rows
        head = b.matrix("output.weight" if b.has("output.weight") else embd.name, h.n_embd, n_vocab)
        act = self.act("act", h.n_embd, [head])
        stride = padded(n_vocab)
        logits = b.buffer("logits", self.limits.max_rows * stride)
        self.norm("output_norm", "output_norm.weight", act, [head], gather=True)
        segment = self.segment(head, act, logits, stride, scale=1 / h.logit_scale)
        self.linear("output", act, [segment], count="out")
        nextn = [n for n in self.file.tensors if self._is_nextn(n)]
        b.check_all_used([*self._on_host, *nextn])
        notes = (f"{h.n_nextn} multi-token prediction layer(s) of the file are not run",) if nextn else ()
        return LanguageModel(
            arch=h.arch,
            program=b.finish(kv_bytes, state_bytes),
            n_embd=h.n_embd,
            n_vocab=n_vocab,
            n_ctx_train=h.n_ctx_train,
            kv_blocks=kv_blocks,
            x=self.x,
            x_stride=self.x_stride,
            logits=logits,
            logits_stride=stride,
            token_embd=embd,
            embedding_scale=h.embedding_scale,
            constants=tuple(self.constants),
            n_expert_used=h.n_expert_used,
            skipped=skipped,
            ngram=ngram,
            notes=notes,
        )

    def _is_nextn(self, name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "blk" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) >= self.h.n_layer
