"""Relative RMSE of our quantisers beside those of ggml, without importance matrix.

    python -m bench.compare_quantizers LIBGGML_BASE.so [MODEL.gguf]

From the root of the repository. Takes the seeded weights of tests/kernels/quantizer_data.py and, where a
model is named, one matrix of every role, as float32. The library's functions: ggml.h, ggml_quantize_chunk.
The last line is one JSON document: kind -> type -> [ours, ggml's].
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from strata_jit.engine.quantize_types import can_be_quantized, role_of
from strata_jit.gguf.quants import dequantize
from strata_jit.gguf.reader import open_gguf
from strata_jit.gguf.types import GGMLType
from strata_jit.kernels.cache import open_cache
from tests.kernels.quantizer_data import KINDS, TYPES, relative_rmse, weights

MAX_ROWS = 256


def ggml(path: str) -> Any:
    """A function (type, float32[n_rows, n_cols]) -> uint8[n_rows, row bytes]."""
    library = ctypes.CDLL(path)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]

    def quantize(kind: GGMLType, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        library.ggml_quantize_init(int(kind))
        packed = np.zeros((len(x), kind.row_bytes(x.shape[1])), np.uint8)
        library.ggml_quantize_chunk(kind, x.ctypes.data, packed.ctypes.data, 0, *x.shape, None)
        return packed

    return quantize


def ours(kind: GGMLType, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The same by our kernels."""
    from strata_jit.kernels.quantizers import WORK_BYTES, quantizer

    packed = np.zeros((len(x), kind.row_bytes(x.shape[1])), np.uint8)
    work = np.zeros(WORK_BYTES // 8)
    bad = quantizer(kind.name)(
        x.ctypes.data, x.size // kind.block_size, packed.ctypes.data, work.ctypes.data
    )
    assert bad < 0, f"value {bad} cannot be held"
    return packed


def of_model(path: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Role and first rows of one matrix of every role."""
    file, seen = open_gguf(path), set()
    for info in file.tensors.values():
        role = role_of(info.name)
        if can_be_quantized(info) and role not in seen:
            seen.add(role)
            n_rows = min(info.n_rows, MAX_ROWS)
            with open(file.parts[info.part], "rb") as part:
                part.seek(info.offset)
                rows = np.frombuffer(part.read(n_rows * info.row_bytes), np.uint8)
            yield role, dequantize(info.type, rows.reshape(n_rows, -1), info.n_cols)


def main(library: str, model: str | None = None) -> None:
    """Print the table."""
    numba.config.CACHE_DIR = str(open_cache().path)
    theirs = ggml(library)
    cases = [(kind, weights(kind)) for kind in KINDS]
    cases += of_model(model) if model else []
    found: dict[str, dict[str, list[float]]] = {}
    for name, x in cases:
        found[name] = {}
        for kind in (GGMLType[type_name] for type_name in TYPES):
            if x.shape[1] % kind.block_size == 0:
                values = [dequantize(kind, q(kind, x), x.shape[1]) for q in (ours, theirs)]
                found[name][kind.name] = [relative_rmse(x, v) for v in values]
        row = "  ".join(f"{kind} {a:.5f} / {b:.5f}" for kind, (a, b) in found[name].items())
        print(f"{name:<14} {row}")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
