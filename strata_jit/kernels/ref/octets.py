"""Twin of the repacking: GGUF rows -> octets, vector by vector as the layout is defined. Obvious and slow.

Owns the arrangement of an octet's bytes; the meaning of a file's blocks is in `ref/blocks.py`.
"""

from __future__ import annotations

import numpy as np

from strata_jit.kernels.ref.blocks import BLOCK_COLS, FLOAT_BYTES, Array, Blocks, read_blocks, read_floats


def pack_octets(name: str, rows: Array, n_cols: int) -> Array:
    """uint8[ceil(n_rows / 8), octet bytes] of `rows` (uint8[n_rows, row bytes]).

    `name` is a ggml type, or "F32_BF16" for float32 rows stored as BF16. Missing rows of the last octet are
    zero bytes.
    """
    if name in FLOAT_BYTES:
        bits = rows.view(np.uint16) if name == "F16" else read_floats(name, rows, n_cols)
        weights = _pad_rows(bits)
        pack = _pack_bf16 if name in ("BF16", "F32_BF16") else _pack_columns
        return np.stack([pack(weights[r : r + 8]) for r in range(0, len(weights), 8)])
    blocks = read_blocks(name, rows, n_cols)
    fields = {
        part: _pad_rows(value)
        for part in ("codes", "d", "dmin", "m", "scales", "mins")
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


def _pack_columns(weights: Array) -> Array:
    """Per column: eight float32, or eight f16 (as uint16)."""
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
    parts = (octet.d, octet.dmin, octet.m)
    return b"".join(part[:, block].tobytes() for part in parts if part is not None)


def _payload(octet: Blocks, block: int) -> bytes:
    name = octet.type_name
    n_cols = BLOCK_COLS[name]
    codes = octet.codes[:, n_cols * block : n_cols * (block + 1)]
    out = b""
    for scales in _scale_planes(octet):
        n_sub = scales.shape[1] // octet.d.shape[1]
        out += _scale_vectors(scales[:, n_sub * block : n_sub * (block + 1)])
    for start in range(0, n_cols, 32):
        out += _SUB_BLOCK[name](codes[:, start : start + 32])
    return out


def _scale_planes(octet: Blocks) -> list[Array]:
    """What stands before the codes: scales, then mins; Q2_K has both in a byte."""
    planes = [plane for plane in (octet.scales, octet.mins) if plane is not None]
    return [planes[0] | planes[1] << 4] if octet.type_name == "Q2_K" else planes


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


def _bits(codes: Array, place: int) -> bytes:
    """32 bytes whose bit i is bit `place` of V_i."""
    out = np.zeros(32, np.uint8)
    for i in range(8):
        out |= (_vector(codes, i) >> place & 1) << i
    return out.tobytes()


def _bit_pairs(codes: Array, place: int) -> bytes:
    """Twice 32 bytes whose bits 2m and 2m + 1 are bits `place` and `place` + 1 of V_m, then of V_4+m."""
    out = b""
    for h in range(2):
        pairs = np.zeros(32, np.uint8)
        for m in range(4):
            pairs |= (_vector(codes, 4 * h + m) >> place & 3) << 2 * m
        out += pairs.tobytes()
    return out


def _two_bits(codes: Array) -> bytes:
    return _bit_pairs(codes, 0)


def _three_bits(codes: Array) -> bytes:
    return _bit_pairs(codes, 0) + _bits(codes, 2)


def _five_bits(codes: Array) -> bytes:
    return _nibbles(codes) + _bits(codes, 4)


def _six_bits(codes: Array) -> bytes:
    return _nibbles(codes) + _bit_pairs(codes, 4)


def _eight_bits(codes: Array) -> bytes:
    return b"".join(_vector(codes, i).tobytes() for i in range(8))


_SUB_BLOCK = {
    "IQ4_XS": _nibbles,
    "IQ4_NL": _nibbles,
    "IQ3_XXS": _nibbles,
    "IQ3_S": _nibbles,
    "MXFP4": _nibbles,
    "Q4_0": _nibbles,
    "Q4_1": _nibbles,
    "Q5_0": _five_bits,
    "Q5_1": _five_bits,
    "Q2_K": _two_bits,
    "Q3_K": _three_bits,
    "Q4_K": _nibbles,
    "Q5_K": _five_bits,
    "Q6_K": _six_bits,
    "Q8_0": _eight_bits,
}
