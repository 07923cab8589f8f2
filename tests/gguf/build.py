"""Builds GGUF files byte by byte, right ones and wrong ones; nothing here uses the package under test.

Layout: ggml's gguf.h. Everything is little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}
TYPE_F32 = 0
TYPE_Q8_0 = 8
TYPE_Q6_K = 14


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes, n_bytes: int | None = None) -> bytes:
    """A string, with a length of its own or a wrong one."""
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw) if n_bytes is None else n_bytes) + raw


def scalar(value_type: int, value: object) -> bytes:
    if value_type == STRING:
        assert isinstance(value, (str, bytes))
        return string(value)
    return struct.pack("<" + CODES[value_type], value)


def array(item_type: int, values: Sequence[object], n_items: int | None = None) -> bytes:
    """The payload of an array; items of an ARRAY are payloads themselves."""
    items = [
        value if isinstance(value, bytes) and item_type == ARRAY else scalar(item_type, value)
        for value in values
    ]
    return u32(item_type) + u64(len(values) if n_items is None else n_items) + b"".join(items)


def pair(key: str | bytes, value_type: int, payload: bytes) -> bytes:
    return string(key) + u32(value_type) + payload


def tensor(
    name: str | bytes, shape: Sequence[int], type_id: int, offset: int, n_dims: int | None = None
) -> bytes:
    dims = b"".join(u64(n) for n in shape)
    return string(name) + u32(len(shape) if n_dims is None else n_dims) + dims + u32(type_id) + u64(offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file. Counts are those of the lists unless given; `data` begins at the next aligned byte."""
    head = magic + u32(version)
    head += u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(pairs) if n_keys is None else n_keys)
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) * bool(data) + data


def small_model(*, version: int = 3, extra: Sequence[bytes] = ()) -> bytes:
    """A valid file with every kind of value and three tensors, the last of which ends with the file."""
    pairs = [
        pair("general.architecture", STRING, string("llama")),
        pair("general.alignment", U32, u32(64)),
        pair("llama.block_count", U16, scalar(U16, 2)),
        pair("llama.rope.freq_base", F32, scalar(F32, 10000.0)),
        pair("tokenizer.ggml.tokens", ARRAY, array(STRING, ["<s>", "a", "", "\u00e9t\u00e9"])),
        pair("tokenizer.ggml.scores", ARRAY, array(F32, [0.0, -1.5, 2.0, 3.0])),
        pair("tokenizer.ggml.add_bos_token", BOOL, scalar(BOOL, True)),
        pair("nested", ARRAY, array(ARRAY, [array(I32, [1, -2]), array(STRING, ["x"])])),
        *extra,
    ]
    tensors = [
        tensor("token_embd.weight", [4, 4], TYPE_F32, 0),
        tensor("blk.0.ffn_up_exps.weight", [32, 2, 2], TYPE_Q8_0, 64),
        tensor("output_norm.weight", [4], TYPE_F32, 256),
    ]
    return gguf(pairs, tensors, bytes(range(256)) + bytes(16), version=version, alignment=64)


def split_part(
    no: int, count: int, n_tensors: int, names: Sequence[str], pairs: Sequence[bytes] = ()
) -> bytes:
    """One part of a split model, with one tensor of four F32 for each name."""
    keys = [
        *pairs,
        pair("split.no", U16, scalar(U16, no)),
        pair("split.count", U16, scalar(U16, count)),
        pair("split.tensors.count", I32, scalar(I32, n_tensors)),
    ]
    tensors = [tensor(name, [4], TYPE_F32, 32 * i) for i, name in enumerate(names)]
    return gguf(keys, tensors, bytes(32 * len(names)))
