"""Writes a synthetic `qwen3moe` GGUF with the geometry of Qwen3-30B-A3B and random weights, for speed
measurements.

Owns: the tensor list and its types, the header (metadata: gguf_pairs.py) and random quantised blocks. Needs
NumPy only. The same seed and options give the same file, byte by byte.

Types follow llama.cpp's IQ4_XS mix: experts and attention IQ4_XS, `attn_v` Q5_K, router and norms F32;
embedding and head are Q8_0. Every quantised block is valid and has random bits, and block scales are set so
that a row of n weights has the norm `gain` (root mean square gain/sqrt(n)): activations keep their size
through all layers and the router spreads tokens over all experts. The text that comes out is noise, of
course.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf_pairs import copied_vocab, f32, gguf_string, made_up_vocab, string, u32
from numpy.typing import NDArray

N_EMBD, N_HEAD, N_HEAD_KV, HEAD = 2048, 32, 4, 128
N_EXPERT, N_USED, N_FF = 128, 8, 768
DEFAULT_VOCAB = 49_152
ALIGNMENT = 32
POOL_BYTES = 64 << 20
SLAB_BYTES = 8 << 20

IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A ggml tensor type. `columns`, `size`: of a block; `rms`: of a random block's values, over its `d`."""

    name: str
    id: int
    columns: int
    size: int
    rms: float


def uniform_rms(low: int, high: int) -> float:
    """Root mean square of the integers low..high."""
    return math.sqrt(sum(v * v for v in range(low, high + 1)) / (high - low + 1))


TYPE_F32 = BlockType("F32", 0, 1, 4, 1.0)
TYPE_Q8_0 = BlockType("Q8_0", 8, 32, 34, uniform_rms(-127, 127))
TYPE_Q5_K = BlockType("Q5_K", 13, 256, 176, uniform_rms(0, 63) * math.sqrt((32**2 - 1) / 12))
TYPE_IQ4_XS = BlockType(
    "IQ4_XS", 23, 256, 136, uniform_rms(-32, 31) * math.sqrt(sum(c * c for c in IQ4_CODES) / 16)
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. `shape` in GGUF order (input first); `gain`: rms of an output for inputs of rms 1."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    gain: float

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.columns * self.type.size


def tensors(n_layers: int, n_vocab: int) -> Iterator[Tensor]:
    """All tensors in file order."""
    xs = TYPE_IQ4_XS
    yield Tensor("token_embd.weight", TYPE_Q8_0, (N_EMBD, n_vocab), math.sqrt(N_EMBD))
    for i in range(n_layers):
        blk = f"blk.{i}."
        yield Tensor(blk + "attn_norm.weight", TYPE_F32, (N_EMBD,), 1.0)
        yield Tensor(blk + "attn_q.weight", xs, (N_EMBD, N_HEAD * HEAD), 1.0)
        yield Tensor(blk + "attn_k.weight", xs, (N_EMBD, N_HEAD_KV * HEAD), 1.0)
        yield Tensor(blk + "attn_v.weight", TYPE_Q5_K, (N_EMBD, N_HEAD_KV * HEAD), 1.0)
        yield Tensor(blk + "attn_q_norm.weight", TYPE_F32, (HEAD,), 1.0)
        yield Tensor(blk + "attn_k_norm.weight", TYPE_F32, (HEAD,), 1.0)
        yield Tensor(blk + "attn_output.weight", xs, (N_HEAD * HEAD, N_EMBD), 1.0)
        yield Tensor(blk + "ffn_norm.weight", TYPE_F32, (N_EMBD,), 1.0)
        yield Tensor(blk + "ffn_gate_inp.weight", TYPE_F32, (N_EMBD, N_EXPERT), 1.5)
        yield Tensor(blk + "ffn_gate_exps.weight", xs, (N_EMBD, N_FF, N_EXPERT), 1.0)
        yield Tensor(blk + "ffn_up_exps.weight", xs, (N_EMBD, N_FF, N_EXPERT), 1.0)
        yield Tensor(blk + "ffn_down_exps.weight", xs, (N_FF, N_EMBD, N_EXPERT), 3.0)
    yield Tensor("output_norm.weight", TYPE_F32, (N_EMBD,), 1.0)
    yield Tensor("output.weight", TYPE_Q8_0, (N_EMBD, n_vocab), 3.0)


def model_pairs(n_layers: int, n_vocab: int, context: int) -> list[bytes]:
    """Everything but the tokenizer."""
    arch = "qwen3moe"
    return [
        string("general.architecture", arch),
        string("general.name", f"synthetic {arch}, {n_layers} layers, random weights"),
        u32("general.quantization_version", 2),
        u32("general.file_type", 30),  # MOSTLY_IQ4_XS
        u32(f"{arch}.block_count", n_layers),
        u32(f"{arch}.context_length", context),
        u32(f"{arch}.embedding_length", N_EMBD),
        u32(f"{arch}.feed_forward_length", 6144),
        u32(f"{arch}.attention.head_count", N_HEAD),
        u32(f"{arch}.attention.head_count_kv", N_HEAD_KV),
        u32(f"{arch}.attention.key_length", HEAD),
        u32(f"{arch}.attention.value_length", HEAD),
        f32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        f32(f"{arch}.rope.freq_base", 1e6),
        u32(f"{arch}.expert_count", N_EXPERT),
        u32(f"{arch}.expert_used_count", N_USED),
        u32(f"{arch}.expert_feed_forward_length", N_FF),
        u32(f"{arch}.vocab_size", n_vocab),
    ]


def header(pairs: list[bytes], layout: list[Tensor]) -> bytes:
    """The GGUF header up to the first tensor's data."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(layout), len(pairs)), *pairs]
    offset = 0
    for tensor in layout:
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        parts += [gguf_string(tensor.name), shape, struct.pack("<IQ", tensor.type.id, offset)]
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    raw = b"".join(parts)
    return raw + bytes(-len(raw) % ALIGNMENT)


def fill_q8_0(blocks: Bytes) -> None:
    """f16 d, 32 int8: -128 is never written by a quantiser, so it becomes 0."""
    blocks[:, 2:][blocks[:, 2:] == 128] = 0


def fill_q5_k(blocks: Bytes) -> None:
    """f16 d, f16 dmin, 12 bytes of 6-bit scales and mins, 32 bytes of high bits, 128 of nibbles.

    Mins equal scales, so that with dmin = 15.5 d the weights d*scale*(q - 15.5) have mean 0.
    """
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17


class Weights:
    """Random blocks from pools drawn once; each slab takes another stretch and flips its quants' bits."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.Generator(np.random.SFC64(seed))
        self.pools: dict[str, Bytes] = {}
        self.jitter = self.rng.uniform(0.8, 1.2, 1 << 20).astype(np.float32)

    def pool(self, kind: BlockType) -> Bytes:
        if kind.name not in self.pools:
            raw = np.frombuffer(self.rng.bytes(POOL_BYTES // kind.size * kind.size), np.uint8)
            blocks = raw.reshape(-1, kind.size).copy()
            if kind is TYPE_Q8_0:
                fill_q8_0(blocks)
            elif kind is TYPE_Q5_K:
                fill_q5_k(blocks)
            self.pools[kind.name] = blocks
        return self.pools[kind.name]

    def slab(self, kind: BlockType, n_blocks: int, d: float) -> Bytes:
        """Blocks [n_blocks, size] whose scale is `d` times 0.8 to 1.2."""
        pool = self.pool(kind)
        start = int(self.rng.integers(len(pool) - n_blocks))
        blocks: Bytes = pool[start : start + n_blocks].copy()
        first = int(self.rng.integers(len(self.jitter) - n_blocks))
        scales = self.jitter[first : first + n_blocks] * np.float32(d)
        blocks[:, 0:2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
        if kind is TYPE_Q5_K:
            blocks[:, 2:4] = (scales * np.float32(15.5)).astype("<f2").view(np.uint8).reshape(-1, 2)
        if kind is not TYPE_Q8_0:  # its bytes are numbers: flipped bits would bring -128 back
            n_quants = 160 if kind is TYPE_Q5_K else 128
            blocks[:, -n_quants:] ^= np.frombuffer(self.rng.bytes(n_quants), np.uint8)
        return blocks

    def data(self, tensor: Tensor) -> Iterator[Bytes]:
        """The tensor's bytes in file order, some MB at a time."""
        kind = tensor.type
        if kind is TYPE_F32:
            yield self.floats(tensor).view(np.uint8)
            return
        d = tensor.gain / math.sqrt(tensor.shape[0]) / kind.rms
        left, most = tensor.nbytes // kind.size, SLAB_BYTES // kind.size
        while left:
            n_blocks = min(left, most)
            yield self.slab(kind, n_blocks, d)
            left -= n_blocks

    def floats(self, tensor: Tensor) -> NDArray[np.float32]:
        """Norms: 0.9 to 1.1. Matrices: normal; float32 bits that no shorter type holds."""
        n = math.prod(tensor.shape)
        if len(tensor.shape) == 1:
            return self.rng.uniform(0.9, 1.1, n).astype(np.float32)
        scale = np.float32(tensor.gain / math.sqrt(tensor.shape[0]))
        values: NDArray[np.float32] = self.rng.standard_normal(n, dtype=np.float32)
        values *= scale
        return values


def write(path: Path, pairs: list[bytes], layout: list[Tensor], seed: int) -> None:
    """Writes the file under a temporary name and renames it when it is whole."""
    total = sum(t.nbytes for t in layout)
    weights = Weights(seed)
    partial = path.with_name(path.name + ".part")
    started, done, shown = time.monotonic(), 0, 0.0
    with partial.open("wb", buffering=0) as file:
        file.write(header(pairs, layout))
        for tensor in layout:
            for chunk in weights.data(tensor):
                file.write(chunk.data)
            file.write(bytes(-tensor.nbytes % ALIGNMENT))
            done += tensor.nbytes
            seconds = time.monotonic() - started
            if seconds - shown > 1 or done == total:
                shown = seconds
                text = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / 1e9 / seconds:.2f} GB/s"
                print(f"{path.name}: {text}", file=sys.stderr, flush=True)
    partial.replace(path)


def check(path: Path, layout: list[Tensor]) -> None:
    """Reads the header back with the project's own reader and compares every tensor."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # where the project is not installed
    from strata_jit.gguf.reader import open_gguf

    found = open_gguf(path).tensors
    for tensor in layout:
        info = found[tensor.name]
        wanted = (tensor.shape, tensor.type.id, tensor.nbytes)
        if (got := (tuple(info.shape), int(info.type), info.nbytes)) != wanted:
            raise SystemExit(f"error: {tensor.name}: read back as {got}, written as {wanted}")
    print(f"{path}: {len(found)} tensors read back as written", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--layers", type=int, default=12, help="layers, 0.33 GB each (default: 12)")
    parser.add_argument("--context", type=int, default=32_768, help="context length of the metadata")
    parser.add_argument(
        "--vocab-from", type=Path, help="GGUF whose tokenizer is copied (default: a made-up one)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="read the header back with strata_jit's reader")
    args = parser.parse_args()
    if args.layers < 1:
        raise SystemExit(f"error: --layers {args.layers}: at least 1 is needed")
    try:
        vocab, n_vocab = copied_vocab(args.vocab_from) if args.vocab_from else made_up_vocab(DEFAULT_VOCAB)
        layout = list(tensors(args.layers, n_vocab))
        write(args.out, model_pairs(args.layers, n_vocab, args.context) + vocab, layout, args.seed)
    except OSError as error:
        raise SystemExit(f"error: {error}") from error
    if args.check:
        check(args.out, layout)


if __name__ == "__main__":
    main()
