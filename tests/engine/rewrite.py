"""Writes variants of a small model file with the `gguf` package: other tensors, keys, parts."""

import gguf
import numpy as np

from strata_jit.gguf.reader import open_gguf

RANDOM_BLOCKS = {
    "IQ4_NL": (16, (0,)),
    "IQ4_XS": (512, (0,)),
    "IQ3_XXS": (256, (0,)),
    "IQ3_S": (128, (0,)),
    "Q2_K": (16, (80, 82)),
    "Q3_K": (64, (108,)),
    "Q4_K": (512, (0, 2)),
    "Q5_K": (512, (0, 2)),
    "Q6_K": (512, (208,)),
}
"""Types that the package cannot quantise: the size of weights in units of d, and where the scales stand."""
SKIPPED = ("GGUF.", "general.architecture")


def read_tensors(path):
    """name -> (gguf type, uint8 data as the file holds it, NumPy shape in elements)."""
    return {
        t.name: (t.tensor_type, t.data.copy(), t.shape.tolist()[::-1]) for t in gguf.GGUFReader(path).tensors
    }


def quantized(rng, name, shape, scale=0.02):
    """Random weights of a type, as `read_tensors` gives them; `shape` is NumPy's, rows last."""
    kind = gguf.GGMLQuantizationType[name]
    weights = (scale * rng.standard_normal(shape)).astype(np.float32)
    if name not in RANDOM_BLOCKS:
        return kind, gguf.quants.quantize(weights, kind), list(shape)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    step, places = RANDOM_BLOCKS[name]
    d = np.array([scale / step], np.float16).view(np.uint8)
    for at in places:
        blocks[..., at : at + 2] = d
    return kind, blocks.reshape(*shape[:-1], -1), list(shape)


def write(target, source, tensors, keys=None, parts=1):
    """Write a model with `source`'s metadata, changed by `keys` (None removes), and these tensors.

    With parts > 1 returns the paths of a split model, else the one path.
    """
    file = open_gguf(source)
    metadata = {k: v for k, v in gguf.GGUFReader(source).fields.items() if not k.startswith(SKIPPED)}
    keys = keys or {}
    names = list(tensors)
    per_part = -(-len(names) // parts)
    paths = []
    for part in range(parts):
        path = target if parts == 1 else target.with_name(f"{target.stem}-{part + 1:05d}-of-{parts:05d}.gguf")
        writer = gguf.GGUFWriter(path, file.metadata["general.architecture"])
        if part == 0:
            _write_keys(writer, metadata, keys)
        if parts > 1:
            writer.add_key_value("split.no", part, gguf.GGUFValueType.UINT16)
            writer.add_key_value("split.count", parts, gguf.GGUFValueType.UINT16)
            writer.add_key_value("split.tensors.count", len(names), gguf.GGUFValueType.INT32)
        for name in names[part * per_part : (part + 1) * per_part]:
            kind, data, _ = tensors[name]
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths if parts > 1 else paths[0]


def _write_keys(writer, fields, changes):
    for name, field in fields.items():
        if name in changes:
            continue
        kind, *inner = field.types
        writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    for name, value in changes.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            kinds = {bool: gguf.GGUFValueType.BOOL, float: gguf.GGUFValueType.FLOAT32}
            writer.add_key_value(name, value, kinds.get(type(value), gguf.GGUFValueType.UINT32))
