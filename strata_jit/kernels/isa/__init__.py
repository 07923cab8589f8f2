"""One module per instruction set, each giving the same few exact integer operations.

An instruction set is an object with the methods of `portable.Portable`. The dot kernels are written once on
top of them (`kernels/dot.py`); since every operation here is exact, all instruction sets give the same bits.
"""

from llvmlite import binding

from strata_jit.kernels.isa.avx2 import Avx2
from strata_jit.kernels.isa.portable import Portable
from strata_jit.kernels.isa.vnni import Avx512Vnni, AvxVnni

ISAS = {isa.name: isa for isa in (Avx512Vnni(), AvxVnni(), Avx2(), Portable())}
"""By preference, the best first."""


def host_features() -> frozenset[str]:
    """Features of the CPU at hand, by LLVM's names."""
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def choose(name: str) -> str:
    """Name of the instruction set to use: `auto` picks the best that this CPU has.

    Raises ValueError, naming what is missing, for one that this CPU cannot run.
    """
    features = host_features()
    if name == "auto":
        return next(isa.name for isa in ISAS.values() if isa.needs <= features)
    if name not in ISAS:
        raise ValueError(f"unknown instruction set {name!r}; known: auto, {', '.join(ISAS)}")
    missing = ISAS[name].needs - features
    if missing:
        raise ValueError(f"this CPU lacks {', '.join(sorted(missing))} for --isa {name}; use --isa auto")
    return name
