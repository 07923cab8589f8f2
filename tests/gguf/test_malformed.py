"""Broken files: one line that names file, field, found and expected; nothing but `ModelError`, and soon."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from strata_jit.errors import ModelError
from strata_jit.gguf import cursor
from strata_jit.gguf.reader import StringArray, open_gguf
from tests.gguf import build
from tests.gguf.build import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    TYPE_F32,
    TYPE_Q6_K,
    U8,
    U32,
    array,
    gguf,
    pair,
    string,
    tensor,
)

PEAK_BYTES = 8 << 20
N_MUTANTS = 2000
N_SPLIT_MUTANTS = 300


def one(*args: object, **kwargs: object) -> bytes:
    """A file with one tensor and 64 bytes of data."""
    return gguf([], [tensor(*args, **kwargs)], bytes(64))  # type: ignore[arg-type]


CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "file: found an empty file, expected a GGUF file"),
    "magic": (gguf(magic=b"GGML"), "magic: found b'GGML', expected b'GGUF'"),
    "text": (b"version https://git-lfs", "magic: found b'vers', expected b'GGUF'"),
    "version 0": (gguf(version=0), "version: found 0, expected 2 or 3"),
    "version 1": (gguf(version=1), "version: found 1, expected 2 or 3"),
    "version 4": (gguf(version=4), "version: found 4, expected 2 or 3"),
    "big-endian 3": (
        gguf(version=0x03000000),
        "byte order: found a big-endian file, expected a little-endian one",
    ),
    "big-endian 2": (
        gguf(version=0x02000000),
        "byte order: found a big-endian file, expected a little-endian one",
    ),
    "tensor count": (
        gguf(n_tensors=2**60),
        "number of tensors: found 1152921504606846976, expected at most 0",
    ),
    "key count": (gguf(n_keys=2**63), "number of keys: found 9223372036854775808, expected at most 0"),
    "missing key": (
        gguf(n_keys=1) + bytes(14),
        "name of key 0: found a name of 0 bytes, expected 1 to 65535",
    ),
    "empty key": (
        gguf([pair("", U8, b"\1") + b"\1"], n_keys=1),
        "name of key 0: found a name of 0 bytes, expected 1 to 65535",
    ),
    "long key": (gguf([pair("k" * 65536, U8, b"\1")]), "name of key 0: found a name of 65536 bytes"),
    "key not UTF-8": (
        gguf([pair(b"a\xff", U8, b"\1")]),
        r"name of key 0: found 'a\\xff', invalid at byte 1, expected",
    ),
    "key length": (
        gguf([string("k", 2**62) + bytes(14)]),
        "name of key 0: found a string of 4611686018427387904 bytes",
    ),
    "key twice": (
        gguf([pair("k\n", U8, b"\1"), pair("k\n", U8, b"\1")]),
        r"name of key 1: found 'k\n' a second time, expected every key once",
    ),
    "value type": (
        gguf([pair("k", 13, b"\1")]),
        "'k': found unknown value type 13, expected one of the GGUF value",
    ),
    "array type": (
        gguf([pair("k", ARRAY, array(U8, []).replace(b"\0" * 4, b"\x63\0\0\0", 1))]),
        "'k': found unknown value type 99, expected one of the GGUF value types 0 to 12",
    ),
    "string length": (
        gguf([pair("k", STRING, string("v", 2**60))]),
        "'k': found a string of 1152921504606846976 bytes",
    ),
    "array length": (
        gguf([pair("k", ARRAY, array(F32, [], 2**61))]),
        "length of 'k': found 2305843009213693952",
    ),
    "array a bit too long": (
        gguf([pair("k", ARRAY, array(F32, [1.0, 2.0], 3))]),
        "length of 'k': found 3, expected at most 2 in the 8 bytes left",
    ),
    "array of strings length": (
        gguf([pair("k", ARRAY, array(STRING, ["a"], 2**60))]),
        "length of 'k': found 1152921504606846976, expected at most 1 in the 9 bytes left",
    ),
    "array of arrays length": (
        gguf([pair("k", ARRAY, array(ARRAY, [], 2**60))]),
        "length of 'k': found 1152921504606846976, expected at most 0",
    ),
    "string within an array": (
        gguf([pair("k", ARRAY, array(ARRAY, [array(STRING, ["aa"])]))]).replace(
            string("aa"), string("aa", 2**63)
        ),
        "'k'[0][0]: found a string of 9223372036854775808 bytes, expected at most the 2 bytes left",
    ),
    "string in an array's middle": (
        gguf([pair("k", ARRAY, array(STRING, ["aa", "bb", "cc"]))]).replace(string("bb"), string("bb", 13)),
        "'k'[1]: found a string of 13 bytes, expected at most the 12 bytes left",
    ),
    "array within arrays": (
        gguf(
            [pair("k", ARRAY, array(ARRAY, [array(ARRAY, [array(ARRAY, [array(ARRAY, [array(U8, [])])])])]))]
        ),
        "'k'[0][0][0][0]: found deeper nested arrays, expected at most 4 levels",
    ),
    "alignment 0": (
        gguf([pair("general.alignment", U32, build.u32(0))]),
        "'general.alignment': found 0, expected a power",
    ),
    "alignment 48": (
        gguf([pair("general.alignment", U32, build.u32(48))]),
        "'general.alignment': found 48, expected a power",
    ),
    "alignment type": (
        gguf([pair("general.alignment", BOOL, b"\1")]),
        "'general.alignment': found bool True, expected int",
    ),
    "alignment huge": (
        gguf([pair("general.alignment", U32, build.u32(2**31))], [tensor("t", [1], TYPE_F32, 0)], bytes(64)),
        "tensor 't': found data at bytes 2147483648 to 2147483652, expected all of it within the file's",
    ),
    "tensor name empty": (one("", [1], TYPE_F32, 0), "name of tensor 0: found a name of 0 bytes"),
    "tensor name not UTF-8": (
        one(b"\xc3(", [1], TYPE_F32, 0),
        r"name of tensor 0: found '\\xc3(', invalid at byte 0",
    ),
    "tensor twice": (
        gguf([], [tensor("t", [1], TYPE_F32, 0), tensor("t", [1], TYPE_F32, 32)], bytes(64)),
        "name of tensor 1: found 't' a second time, expected every name once",
    ),
    "dimensions": (one("t", [1] * 5, TYPE_F32, 0), "tensor 't': found 5 dimensions, expected at most 4"),
    "dimensions absurd": (
        one("t", [1], TYPE_F32, 0, n_dims=2**32 - 1),
        "tensor 't': found 4294967295 dimensions",
    ),
    "product overflow": (
        one("t", [2**32, 2**32], TYPE_F32, 0),
        "tensor 't': found a shape of 4294967296 x 4294967296, expected less than 2^63 elements",
    ),
    "product wraps to 1": (one("t", [2**63 + 1, 2**63 + 1], TYPE_F32, 0), "expected less than 2^63 elements"),
    "dimension overflow": (one("t", [0, 2**63], TYPE_F32, 0), "expected less than 2^63 elements"),
    "bytes past 2^63": (one("t", [2**62], TYPE_F32, 0), "to 18446744073709551680, expected all of it within"),
    "type id": (
        one("t", [1], 99, 0),
        "tensor 't': found unsupported tensor type id 99, expected one of the ggml types 0",
    ),
    "type id removed": (one("t", [1], 31, 0), "tensor 't': found unsupported tensor type Q4_0_4_4 (id 31)"),
    "row length": (
        one("t", [100, 2], TYPE_Q6_K, 0),
        "tensor 't': found rows of 100 elements in type Q6_K, expected a multiple of its block size 256",
    ),
    "scalar of blocks": (one("t", [], TYPE_Q6_K, 0), "tensor 't': found rows of 1 elements in type Q6_K"),
    "offset unaligned": (one("t", [1], TYPE_F32, 4), "tensor 't': found offset 4, expected a multiple of 32"),
    "offset past the end": (
        one("t", [1], TYPE_F32, 64),
        "tensor 't': found data at bytes 128 to 132, expected all",
    ),
    "offset huge": (
        one("t", [1], TYPE_F32, 2**64 - 32),
        "tensor 't': found data at bytes 18446744073709551648 to",
    ),
    "last byte past the end": (one("t", [17], TYPE_F32, 0), "expected all of it within the file's 128 bytes"),
    "overlap": (
        gguf([], [tensor("a", [9], TYPE_F32, 0), tensor("b", [1], TYPE_F32, 32)], bytes(64)),
        "tensor 'b': found data at byte 128, expected byte 132 or later, where tensor 'a' ends",
    ),
}


def raised(path: Path) -> str:
    """The message of the error on opening, checked to be one line about that file."""
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.isprintable()
    assert ": found " in message and ", expected " in message
    assert "corrupt" not in message
    return message


@pytest.mark.parametrize("name", CASES)
def test_open_gguf_raises_on(tmp_path: Path, name: str) -> None:
    raw, message = CASES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        assert message in raised(path)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


def test_open_gguf_raises_on_truncation_at_every_byte(tmp_path: Path) -> None:
    raw = build.small_model()
    path = tmp_path / "cut.gguf"
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        raised(path)


def test_open_gguf_names_the_end_of_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(build.small_model()[:13])
    assert raised(path) == (
        f"{path}: number of tensors: found the end of the file at byte 13, "
        "expected 8 bytes from byte 8 on (is the file cut short?)"
    )


def test_open_gguf_raises_on_counts_that_only_a_sparse_file_could_hold(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf([pair("k", ARRAY, array(STRING, [], 2**35))]))
    os.truncate(path, 2**40)
    assert "length of 'k': found 34359738368, expected at most 33554" in raised(path)


def test_open_gguf_raises_on_a_header_past_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "HEADER_LIMIT_BYTES", 1 << 20)
    path = tmp_path / "long.gguf"
    pairs = [pair(f"k{i}", ARRAY, array(STRING, ["x" * 1000] * 400)) for i in range(3)]
    path.write_bytes(gguf(pairs))
    assert "'k2'[241]: found a header of 1049438 bytes or more, expected at most 1048576" in raised(path)


def test_open_gguf_raises_on_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "file: found a directory, expected a GGUF file" in raised(tmp_path)
    assert "file: found something that is not a regular file" in raised(tmp_path / "pipe")
    assert "file: found an error (No such file or directory)" in raised(tmp_path / "absent.gguf")
    assert "file: found an error (No such file or directory)" in raised(tmp_path / "dangling")
    assert "file: found an error (File name too long)" in raised(tmp_path / ("n" * 300))
    assert "file: found an error (embedded null byte)" in raised_about("a\0b")
    assert raised_about("") == "the path of the model is empty, expected that of a GGUF file"


def raised_about(path: str) -> str:
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_open_gguf_keeps_messages_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "two\nlines.gguf"
    path.write_bytes(b"")
    assert raised_about(str(path)).count(r"two\nlines.gguf: file: found an empty file") == 1


def test_open_gguf_leaves_no_descriptor_open(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    good.write_bytes(build.small_model())
    bad.write_bytes(build.small_model()[:-1])
    before = len(os.listdir("/proc/self/fd"))
    open_gguf(good)
    raised(bad)
    assert len(os.listdir("/proc/self/fd")) == before


def mutated(raw: bytes, random_source: random.Random) -> bytes:
    """`raw` with one to three faults of the kinds that broken downloads and hostile writers make."""
    data = bytearray(raw)
    for _ in range(random_source.randint(1, 3)):
        at = random_source.randrange(len(data))
        kind = random_source.randrange(6)
        if kind == 0:
            data[at] ^= 1 << random_source.randrange(8)
        elif kind == 1:
            data[at] = random_source.choice([0, 1, 9, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            word = random_source.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
            data[at : at + 8] = word.to_bytes(8, "little")
        elif kind == 3:
            del data[at : at + random_source.randint(1, 16)]
        elif kind == 4:
            data[at:at] = data[at : at + random_source.randint(1, 16)]
        else:
            data[at : at + 4] = random_source.randrange(16).to_bytes(4, "little")
        if not data:
            break
    return bytes(data)


def use(path: Path) -> bool:
    """Open and touch everything; whether it was valid."""
    try:
        model = open_gguf(path)
    except ModelError as err:
        assert str(err).isprintable() and ": found " in str(err)
        return False
    for value in model.metadata.values():
        assert isinstance(value, (bool, int, float, str, list, np.ndarray, StringArray))
        if isinstance(value, StringArray):
            assert len(value.tolist()) == len(value)
    for info in model.tensors.values():
        assert info.offset + info.nbytes <= model.parts[info.part].stat().st_size
        assert info.row_bytes <= info.nbytes or info.nbytes == 0
    return True


def test_open_gguf_survives_mutations(tmp_path: Path) -> None:
    random_source = random.Random(1)
    raw = build.small_model()
    path = tmp_path / "mutant.gguf"
    outcomes = []
    for _ in range(N_MUTANTS):
        path.write_bytes(mutated(raw, random_source))
        outcomes.append(use(path))
    assert N_MUTANTS // 20 < sum(outcomes) < N_MUTANTS * 19 // 20


def test_open_gguf_survives_mutations_of_a_part(tmp_path: Path) -> None:
    random_source = random.Random(2)
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(build.split_part(0, 2, 3, ["a"]))
    raw = build.split_part(1, 2, 3, ["b", "c"])
    for _ in range(N_SPLIT_MUTANTS):
        second.write_bytes(mutated(raw, random_source))
        use(random_source.choice([first, second]))
