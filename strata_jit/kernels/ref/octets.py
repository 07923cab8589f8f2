"""Twin of the repacking: GGUF rows -> octets, vector by vector as the layout is defined. Obvious and slow.

Owns the arrangement of an octet's bytes; the meaning of a file's blocks is in `ref/blocks.py`.
"""

from __future__ import annotations

import numpy as np

from strata_jit.kernels.ref.blocks import BLOCK_COLS, FLOAT_BYTES, Array, Blocks, read_blocks, read_floats

STORE_TYPE = {"F16": "F32", "F32_BF16": "BF16"}
"""Conversions that are not named as the type that they store."""


def pack_octets(name: str, rows: Array, n_cols: int) -> Array:
    """uint8[ceil(n_rows / 8), octet bytes] of `rows` (uint8[n_rows, row bytes]).

    `name` is a ggml type, or "F32_BF16" for float32 rows stored as BF16. Missing rows of the last octet are
    zero bytes.
    """
    if name in FLOAT_BYTES:
        weights = _pad_rows(read_floats(name, rows, n_cols))
        pack = _pack_bf16 if STORE_TYPE.get(name, name) == "BF16" else _pack_f32
        return np.stack([pack(weights[r : r + 8]) for r in range(0, len(weights), 8)])
    blocks = read_blocks(name, rows, n_cols)
    fields = {
        part: _pad_rows(value)
        for part in ("codes", "d", "dmin", "scales", "mins")
        if (value := getattr(blocks, part)) is not None
    }
    n_rows = len(fields["codes"])
    octets = [Blocks(name, **{k: v[r : r + 8] for k, v in fields.items()}) for r in range(0, n_rows, 8)]
    return np.stack([_pack_quantised(octet) for octet in octets])


def _pad_rows(array: Array) -> Array:
    missing = -len(array) % 8
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])


def _pad_bytes(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


def _pack_f32(weights: Array) -> Array:
    """Per column: eight float32."""
    return np.frombuffer(_pad_bytes(np.ascontiguousarray(weights.T).tobytes()), np.uint8)


def _pack_bf16(weights: Array) -> Array:
    """Per two columns: lane r = bf16 of row r, column k, then of column k + 1."""
    upper = (np.ascontiguousarray(weights).view(np.uint32) >> 16).astype(np.uint16)
    pairs = upper.reshape(8, -1, 2).transpose(1, 0, 2)
    return np.frombuffer(_pad_bytes(pairs.tobytes()), np.uint8)


def _pack_quantised(octet: Blocks) -> Array:
    n_blocks = octet.d.shape[1]
    header = b"".join(_header(octet, block) for block in range(n_blocks))
    payload = b"".join(_payload(octet, block) for block in range(n_blocks))
    return np.frombuffer(_pad_bytes(_pad_bytes(header) + payload), np.uint8)


def _header(octet: Blocks, block: int) -> bytes:
    d = octet.d[:, block].tobytes()
    return d if octet.dmin is None else d + octet.dmin[:, block].tobytes()


def _payload(octet: Blocks, block: int) -> bytes:
    name = octet.type_name
    n_cols = BLOCK_COLS[name]
    codes = octet.codes[:, n_cols * block : n_cols * (block + 1)]
    out = b""
    for scales in (octet.scales, octet.mins):
        if scales is not None:
            n_sub = scales.shape[1] // octet.d.shape[1]
            out += _scale_vectors(scales[:, n_sub * block : n_sub * (block + 1)])
    for start in range(0, n_cols, 32):
        out += _SUB_BLOCK[name](codes[:, start : start + 32])
    return out


def _vector(codes: Array, i: int) -> Array:
    """V_i: byte 4 * r + t is the code of row r, column 4 * i + t."""
    out = np.zeros(32, np.uint8)
    for r in range(8):
        for t in range(4):
            out[4 * r + t] = codes[r, 4 * i + t] & 255
    return out


def _scale_vectors(scales: Array) -> bytes:
    """Byte 32 * h + 4 * r + t is the scale of row r, sub-block 4 * h + t: the arrangement of V_h."""
    return b"".join(_vector(scales, h).tobytes() for h in range(scales.shape[1] // 4))


def _nibbles(codes: Array) -> bytes:
    """N_i = V_2i | V_2i+1 << 4 of the low four bits."""
    low = codes & 15
    return b"".join((_vector(low, 2 * i) | _vector(low, 2 * i + 1) << 4).tobytes() for i in range(4))


def _five_bits(codes: Array) -> bytes:
    high = np.zeros(32, np.uint8)
    for i in range(8):
        high |= (_vector(codes, i) >> 4) << i
    return _nibbles(codes) + high.tobytes()


def _six_bits(codes: Array) -> bytes:
    out = _nibbles(codes)
    for h in range(2):
        high = np.zeros(32, np.uint8)
        for m in range(4):
            high |= (_vector(codes, 4 * h + m) >> 4) << 2 * m
        out += high.tobytes()
    return out


def _eight_bits(codes: Array) -> bytes:
    return b"".join(_vector(codes, i).tobytes() for i in range(8))


_SUB_BLOCK = {
    "IQ4_XS": _nibbles,
    "IQ4_NL": _nibbles,
    "Q4_K": _nibbles,
    "Q5_K": _five_bits,
    "Q6_K": _six_bits,
    "Q8_0": _eight_bits,
}
