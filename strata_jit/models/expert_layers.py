"""The routed experts of every layer of a file, each layer a program of its own.

What `ExpertPool` runs: no attention, no router, no head. Ids and weights come from the host.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from strata_jit.errors import ModelError, UsageError
from strata_jit.gguf.reader import GGUFFile
from strata_jit.kernels.scratch import tmp_scratch_bytes
from strata_jit.models import check_architecture
from strata_jit.models.builder import ProgramBuilder, Target, padded
from strata_jit.models.experts import GIVEN, Experts, expert_matrices, expert_width
from strata_jit.models.hparams import FEATURES, read_hparams
from strata_jit.pool.program import Program

_DOWN = re.compile(r"blk\.(\d+)\.ffn_down_exps\.weight")

_OF_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_\w+_exps\.")


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The program, and where each layer's ops and the shared buffers are."""

    program: Program
    n_embd: int
    n_expert: int
    n_expert_used: int
    layers: Mapping[int, tuple[int, int]]
    """Layer -> (first op, number of ops)."""
    x: int
    """Buffer id of the input rows, float32[max_rows][stride / 4]."""
    y: int
    """Buffer id of the output rows, alike; the ops add to them."""
    stride: int
    ids: int
    """Buffer id of int64[max_rows][n_expert_used]: positions among the layer's complement, or -1."""
    weights: int
    """Buffer id of float32[max_rows][n_expert_used]."""


def complement(n_expert: int, resident: Collection[int]) -> tuple[int, ...]:
    """All experts but the residents, ascending. UsageError for a resident that does not exist."""
    strangers = sorted(e for e in resident if not 0 <= e < n_expert)
    if strangers:
        raise UsageError(f"resident expert {strangers[0]}: expected 0 to {n_expert - 1}")
    return tuple(e for e in range(n_expert) if e not in resident)


def build_expert_layers(
    file: GGUFFile, max_rows: int, resident: Mapping[int, Collection[int]]
) -> ExpertLayers:
    """Programs of the layers' complements: layer's experts minus `resident[layer]`, which are not loaded."""
    check_architecture(file)
    h = read_hparams(file, FEATURES)  # of which none concerns the experts
    found = (_DOWN.fullmatch(name) for name in file.tensors)
    numbers = sorted(n for match in found if match and (n := int(match[1])) < h.n_layer)
    if not numbers:
        raise ModelError(f"{file.path}: no tensor blk.N.ffn_down_exps.weight, expected a model with experts")
    unknown = sorted(set(resident) - set(numbers))
    if unknown:
        raise UsageError(f"resident experts of layer {unknown[0]}: the model has no experts there")
    b = ProgramBuilder(file)
    n_ff = expert_width(file, f"blk.{numbers[0]}.")
    stride = padded(h.n_embd)
    x, y = (b.buffer(name, max_rows * stride) for name in ("x", "y"))
    tile, row = b.scratch(tmp_scratch_bytes()), b.scratch(4 * h.n_embd)
    experts = Experts(b, h.n_expert, h.n_expert_used, h.n_embd, n_ff, max_rows, tile)
    kinds = [k for k, multiple in (("F32", 4), ("Q256", 256), ("Q32", 32)) if h.n_embd % multiple == 0]
    act = b.act("act", h.n_embd, kinds, max_rows)
    layers = {}
    for layer in numbers:
        first, blk = b.n_ops, f"blk.{layer}."
        chosen = complement(h.n_expert, resident.get(layer, ()))
        m = expert_matrices(b, blk, h.n_embd, n_ff, h.n_expert, chosen)
        wanted = {b.act_kind(m.gate), b.act_kind(m.up)}
        write = act.write | {f"off_{k.lower()}": -1 for k in act.offsets if k not in wanted}
        source = {"x": x, "x_stride": stride, "weight": -1, "n": h.n_embd, "eps": 0.0, "gather": 0}
        b.op("norm_quant", f"{blk}quantise", source | write | {"tmp_scratch": row})
        experts.route(f"{blk}route", GIVEN)
        experts.run(blk, act, m, Target(y, stride))
        layers[layer] = (first, b.n_ops - first)
    b.check_all_used(name for name in file.tensors if not _is_of_experts(name, numbers))
    return ExpertLayers(
        program=b.finish(kv_bytes=0),
        n_embd=h.n_embd,
        n_expert=h.n_expert,
        n_expert_used=h.n_expert_used,
        layers=layers,
        x=x,
        y=y,
        stride=stride,
        ids=experts.ids,
        weights=experts.weights,
    )


def _is_of_experts(name: str, layers: Collection[int]) -> bool:
    """Whether a tensor belongs to the routed experts of one of the layers."""
    match = _OF_EXPERTS.match(name)
    return match is not None and int(match[1]) in layers
