"""From the names of kernels to their addresses, by way of the cache.

Owns the order in which a node process compiles or loads what a model needs, under the cache's lock: one
process compiles while the others wait. Knows no program and no model.
"""

import gc
import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llvmlite import binding
from numba import config
from numba.core.errors import NumbaError

from strata_jit.kernels import cache, isa
from strata_jit.kernels._jit import Op
from strata_jit.kernels.dot import dot_many_kernel, dot_one_kernel
from strata_jit.kernels.dot_float import FLOAT_TYPES
from strata_jit.kernels.repack import repack

T = TypeVar("T")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Kernels:
    """Everything that a node process calls; addresses are valid in this process only."""

    ops: dict[str, int]
    """"module:attribute" -> address of the op."""
    dots: dict[str, tuple[int, int]]
    """Stored type -> addresses of its one-token and many-token kernels."""
    variants: dict[str, str]
    """Op or stored type -> which variant of its kernels runs."""
    isa: str


def load_kernels(
    ops: Sequence[str],
    types: Sequence[str],
    conversions: Sequence[str],
    isa_name: str,
    cache_path: Path,
    on_progress: Progress | None = None,
) -> Kernels:
    """Compile, or load from the cache, the op kernels, the dot kernels of `types` and the repack converters.

    A cache that cannot be read (truncated files) is cleared and filled again, once. ValueError for an
    instruction set that this CPU cannot run.
    """
    chosen = isa.choose(isa_name)
    wanted = [*ops, *(f"dot {t} {chosen}" for t in types), *(f"repack {c}" for c in conversions)]

    def load() -> Kernels:
        return _load(ops, types, conversions, chosen, on_progress)

    return _from_cache(cache_path, wanted, load)


def load_quantizers(
    types: Sequence[str], cache_path: Path, on_progress: Progress | None = None
) -> dict[str, Any]:
    """Compile, or load from the cache, `quantizers.quantizer` of each type; as `load_kernels` otherwise.

    In a process that has compiled nothing yet: where Numba keeps its files is set for all of it.
    """
    config.CACHE_DIR = str(cache_path)  # type: ignore[attr-defined]  # Numba makes its options itself
    from strata_jit.kernels.quantizers import quantizer  # node processes have no use for it

    @_without_collection()
    def load() -> dict[str, Any]:
        compiled = {}
        for i, name in enumerate(types):
            if on_progress is not None:
                on_progress(i, len(types), f"quantize {name}")
            compiled[name] = quantizer(name)
        return compiled

    return _from_cache(cache_path, [f"quantize {name}" for name in types], load)


def _from_cache(cache_path: Path, wanted: Sequence[str], load: Callable[[], T]) -> T:
    """load() under the cache's lock; once more, with a cleared cache, if that cannot be read."""
    ready = cache_path / f"ready-{_cpu_hash()}"
    is_warm = _is_ready(ready, wanted)
    with cache.lock(cache_path, exclusive=not is_warm):
        try:
            kernels = load()
            if not is_warm:
                _mark_ready(ready, wanted)
            return kernels
        except (NumbaError, ImportError):
            raise  # a kernel that does not compile, or does not exist, is no fault of the cache
        except Exception as fault:  # noqa: BLE001 - a cut file may raise anything while it is unpickled
            unreadable = fault
    with cache.lock(cache_path, exclusive=True):
        cache.clear(cache_path)
        try:
            kernels = load()
        except Exception as fault:
            raise fault from unreadable
        _mark_ready(ready, wanted)
        return kernels


def _resolve(reference: str) -> Op:
    module, _, attribute = reference.partition(":")
    op: Op = getattr(importlib.import_module(module), attribute)
    return op


def _mark_ready(ready: Path, wanted: Sequence[str]) -> None:
    known = set(ready.read_text().splitlines()) if ready.exists() else set()
    ready.write_text("\n".join(sorted(known.union(wanted))))


def _cpu_hash() -> str:
    features = binding.get_host_cpu_features().flatten()
    return hashlib.sha256(f"{binding.get_host_cpu_name()} {features}".encode()).hexdigest()[:12]


def _is_ready(ready: Path, wanted: Sequence[str]) -> bool:
    try:
        return set(wanted) <= set(ready.read_text().splitlines())
    except FileNotFoundError:
        return False


@contextmanager
def _without_collection() -> Iterator[None]:
    """The compilers make many objects and few cycles: collecting them costs 10 to 20 % of a cold start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_without_collection()
def _load(
    ops: Sequence[str],
    types: Sequence[str],
    conversions: Sequence[str],
    chosen: str,
    on_progress: Progress | None,
) -> Kernels:
    total, done = len(ops) + 2 * len(types) + len(conversions), 0

    def step(name: str) -> None:
        nonlocal done
        if on_progress is not None:
            on_progress(done, total, name)
        done += 1

    addresses, dots, variants = {}, {}, {}
    for reference in ops:
        step(reference)
        addresses[reference] = _resolve(reference).address
        variants[reference] = "vector"
    for name in types:
        step(f"dot one {name}")
        one = dot_one_kernel(name, chosen).address
        step(f"dot many {name}")
        dots[name] = (one, dot_many_kernel(name, chosen).address)
        variants[name] = "vector" if name in FLOAT_TYPES else chosen
    for name in conversions:
        step(f"repack {name}")
        repack(name)
    step("")
    return Kernels(addresses, dots, variants, chosen)
