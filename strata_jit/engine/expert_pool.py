"""The routed experts of a model as a service: for programs that do the rest of the model elsewhere.

Same machinery as `load`, with a program of one MoE layer. Owns the mapping from a layer's expert ids to its
complement, the experts that the pool holds.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strata_jit.engine.setup import Progress, check_pool_options, node_specs
from strata_jit.engine.setup import spin_us as _spin
from strata_jit.errors import UsageError
from strata_jit.gguf.reader import open_gguf
from strata_jit.models.expert_layers import build_expert_layers, complement
from strata_jit.placement import PlanOptions, plan
from strata_jit.pool.host import Pool
from strata_jit.pool.program import PoolSpec
from strata_jit.topology.machine import read_machine

DEFAULT_MAX_TOKENS = 64


class ExpertPool:
    """Computes y = sum over a token's experts of weight * down(silu(gate(x)) * up(x)), layer by layer.

    path        a GGUF model file, of a split one any part
    resident    layer -> ids of experts that are held elsewhere: they are not loaded and contribute nothing
    max_tokens  rows that one call may have
    The other options are those of `strata_jit.load`. Raises as `load` does; close it, or use `with`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        resident: Mapping[int, Collection[int]] | None = None,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        workers: int | None = None,
        isa: str | None = None,
        numa_pool: str | None = None,
        test_slices: int | None = None,
        spin_us: int | None = None,
        arena: Literal["memfd", "anon"] = "memfd",
        on_progress: Progress | None = None,
    ) -> None:
        check_pool_options(spin_us, arena)
        if max_tokens < 1:
            raise UsageError(f"max_tokens: found {max_tokens}, expected 1 or more")
        file = open_gguf(path)
        options = PlanOptions(workers=workers, numa_pool=numa_pool, test_slices=test_slices)
        planned = plan(read_machine(), None, options)
        resident = _as_sets(resident or {})
        self._layers = layers = build_expert_layers(file, max_tokens, resident)
        self._max_tokens = max_tokens
        self._places = {layer: self._place(resident.get(layer, ())) for layer in layers.layers}
        self._pending: int | None = None
        self._pool = Pool(
            PoolSpec(
                program=layers.program,
                nodes=node_specs(planned, layers.program),
                files=tuple(str(part) for part in file.parts),
                max_rows=max_tokens,
                n_seq=1,
                kv_blocks=1,
                isa=isa,
                spin_us=_spin(planned, spin_us),
                arena=arena,
            ),
            on_progress,
        )
        f32, shape = np.dtype(np.float32), (-1, layers.stride // 4)
        self._x = self._pool.buffer(layers.x, f32).reshape(shape)[:max_tokens, : layers.n_embd]
        self._y = self._pool.buffer(layers.y, f32).reshape(shape)[:max_tokens, : layers.n_embd]
        self._ids = self._routing(layers.ids, np.dtype(np.int64))
        self._weights = self._routing(layers.weights, f32)

    @property
    def n_embd(self) -> int:
        """Columns of x and y."""
        return self._layers.n_embd

    @property
    def n_expert(self) -> int:
        """Experts of a layer, residents included."""
        return self._layers.n_expert

    @property
    def n_expert_used(self) -> int:
        """Columns of ids and weights."""
        return self._layers.n_expert_used

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        return tuple(self._layers.layers)

    def submit(self, layer: int, x: ArrayLike, ids: ArrayLike, weights: ArrayLike) -> None:
        """Start a layer and return at once; `wait` gives its result.

        x        float32[n, n_embd]
        ids      int[n, n_expert_used], -1 for none; residents contribute nothing
        weights  float32[n, n_expert_used], applied in the order of ids
        UsageError for an unknown layer, an id out of range, shapes that do not fit, or a second submit.
        """
        if self._pending is not None:
            raise UsageError("submit: the result of the step before was not waited for")
        if layer not in self._layers.layers:
            raise UsageError(
                f"layer {layer}: the model has experts in layers {self.layers[0]} to {self.layers[-1]}"
            )
        rows, chosen, factors = self._checked(x, ids, weights)
        n = len(rows)
        if n:
            self._pool.drain()  # an interrupted wait may have left a step running
            self._x[:n] = rows
            self._y[:n] = 0
            self._ids[:n] = self._places[layer][chosen]
            self._weights[:n] = factors
            self._pool.submit(*self._layers.layers[layer], n, 0)
        self._pending = n

    def wait(self) -> NDArray[np.float32]:
        """The submitted layer's y, float32[n, n_embd], a new array. UsageError if nothing was submitted."""
        if self._pending is None:
            raise UsageError("wait: nothing was submitted")
        n, self._pending = self._pending, None
        if n:
            self._pool.wait()
        return self._y[:n].copy()

    def run(self, layer: int, x: ArrayLike, ids: ArrayLike, weights: ArrayLike) -> NDArray[np.float32]:
        """`submit` and `wait`."""
        self.submit(layer, x, ids, weights)
        return self.wait()

    def close(self) -> None:
        """End the node processes and free all memory; may be called again."""
        # views keep the shared mapping alive
        for name in ("_x", "_y", "_ids", "_weights"):
            self.__dict__.pop(name, None)
        self._pool.close()

    def __enter__(self) -> ExpertPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _routing(self, buffer: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        used = self._layers.n_expert_used
        return self._pool.buffer(buffer, dtype)[: self._max_tokens * used].reshape(-1, used)

    def _place(self, resident: Collection[int]) -> NDArray[np.int64]:
        """int64[n_expert + 1]: position in the complement; -1 for residents and for id -1, the last entry."""
        places = np.full(self._layers.n_expert + 1, -1, np.int64)
        held = list(complement(self._layers.n_expert, resident))
        places[held] = np.arange(len(held))
        return places

    def _checked(
        self, x: ArrayLike, ids: ArrayLike, weights: ArrayLike
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        try:
            rows, factors = np.asarray(x, np.float32), np.asarray(weights, np.float32)
            chosen = np.asarray(ids)
        except (TypeError, ValueError) as fault:
            raise UsageError(f"x, ids or weights: {fault}; expected arrays of numbers") from None
        if rows.ndim != 2:
            raise UsageError(f"x: found {rows.ndim} dimensions, expected 2: [n, n_embd]")
        if chosen.dtype.kind not in "iu":
            raise UsageError(f"ids: found dtype {chosen.dtype}, expected integers")
        n, used = len(rows), self._layers.n_expert_used
        for name, array, shape in (("x", rows, (n, self._layers.n_embd)), ("ids", chosen, (n, used)),
                                   ("weights", factors, (n, used))):  # fmt: skip
            if array.shape != shape:
                raise UsageError(f"{name}: found shape {array.shape}, expected {shape}")
        if n > self._max_tokens:
            raise UsageError(f"{n} tokens in one step, expected at most max_tokens = {self._max_tokens}")
        outside = chosen[(chosen < -1) | (chosen >= self._layers.n_expert)]
        if outside.size:
            raise UsageError(
                f"expert id {outside[0]}: expected 0 to {self._layers.n_expert - 1}, or -1 for none"
            )
        return rows, chosen.astype(np.int64), factors


def _as_sets(resident: Mapping[int, Collection[int]]) -> dict[int, frozenset[int]]:
    try:
        return {int(layer): frozenset(map(operator.index, ids)) for layer, ids in resident.items()}
    except (TypeError, AttributeError):
        raise UsageError("resident: expected a mapping from layers to expert ids") from None
