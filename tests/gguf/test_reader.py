"""Valid files: every value type, both versions, tensors, typed look-up, and the gguf package as oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import GGUFFile, StringArray, open_gguf
from strata_jit.gguf.types import QUANT_TYPES, REMOVED_TYPES, GGMLType
from tests.gguf import build

SCALARS = [
    (build.U8, 255),
    (build.I8, -128),
    (build.U16, 65535),
    (build.I16, -32768),
    (build.U32, 2**32 - 1),
    (build.I32, -(2**31)),
    (build.F32, 0.5),
    (build.BOOL, True),
    (build.BOOL, False),
    (build.U64, 2**64 - 1),
    (build.I64, -(2**63)),
    (build.F64, 0.1),
]


def opened(tmp_path: Path, raw: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return open_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_open_gguf_reads_versions(tmp_path: Path, version: int) -> None:
    model = opened(tmp_path, build.small_model(version=version))
    assert (model.version, model.alignment, model.parts) == (version, 64, (tmp_path / "model.gguf",))
    assert list(model.tensors) == ["token_embd.weight", "blk.0.ffn_up_exps.weight", "output_norm.weight"]
    assert model.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize(("value_type", "value"), SCALARS)
def test_open_gguf_reads_scalars_and_arrays_of(tmp_path: Path, value_type: int, value: Any) -> None:
    single = build.pair("one", value_type, build.scalar(value_type, value))
    several = build.pair("many", build.ARRAY, build.array(value_type, [value, value]))
    empty = build.pair("none", build.ARRAY, build.array(value_type, []))
    metadata = opened(tmp_path, build.gguf([single, several, empty])).metadata
    assert metadata["one"] == value and type(metadata["one"]) is type(value)
    assert metadata["many"].tolist() == [value, value]
    assert metadata["many"].dtype == metadata["none"].dtype and len(metadata["none"]) == 0
    assert metadata["many"].dtype == (bool if value_type == build.BOOL else build.CODES[value_type])


def test_open_gguf_reads_strings(tmp_path: Path) -> None:
    words = ["", "a", "\u4e2d\u6587", "line\nend", "a" * 300, "\U0001f600"]
    pairs = [
        build.pair("text", build.STRING, build.string("\u00e9")),
        build.pair("words", build.ARRAY, build.array(build.STRING, words)),
        build.pair("none", build.ARRAY, build.array(build.STRING, [])),
    ]
    metadata = opened(tmp_path, build.gguf(pairs)).metadata
    strings = metadata["words"]
    assert metadata["text"] == "\u00e9"
    assert isinstance(strings, StringArray) and isinstance(metadata["none"], StringArray)
    assert strings.tolist() == list(strings) == words
    assert [strings.bytes_at(i) for i in range(len(words))] == [word.encode() for word in words]
    assert strings[-1] == words[-1] and strings[1:3] == words[1:3] and "a" in strings
    assert metadata["none"].tolist() == [] and len(metadata["none"]) == 0
    with pytest.raises(IndexError):
        strings[len(words)]


def test_string_array_keeps_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    raw = build.gguf([build.pair("words", build.ARRAY, build.array(build.STRING, [b"\xff\xfe", b"ok"]))])
    words = opened(tmp_path, raw).metadata["words"]
    assert words.bytes_at(0) == b"\xff\xfe"
    assert words.tolist() == ["\ufffd\ufffd", "ok"]


def test_open_gguf_reads_nested_arrays(tmp_path: Path) -> None:
    inner = build.array(build.ARRAY, [build.array(build.STRING, ["x", "y"]), build.array(build.I64, [])])
    raw = build.gguf(
        [build.pair("deep", build.ARRAY, build.array(build.ARRAY, [inner, build.array(build.U8, [7])]))]
    )
    first, second = opened(tmp_path, raw).metadata["deep"]
    assert first[0].tolist() == ["x", "y"] and first[1].tolist() == []
    assert second.tolist() == [7]


def test_open_gguf_reads_headers_longer_than_one_read(tmp_path: Path) -> None:
    words = [f"token {i}" for i in range(150_000)]
    pairs = [
        build.pair("words", build.ARRAY, build.array(build.STRING, words)),
        build.pair("text", build.STRING, build.string("b" * 3_000_000)),
        build.pair("numbers", build.ARRAY, build.array(build.U32, range(1000))),
    ]
    metadata = opened(tmp_path, build.gguf(pairs)).metadata
    assert metadata["words"].tolist() == words
    assert len(metadata["text"]) == 3_000_000
    assert metadata["numbers"].tolist() == list(range(1000))


def test_tensor_info_places_tensors(tmp_path: Path) -> None:
    raw = build.small_model()
    model = opened(tmp_path, raw)
    experts = model.tensor("blk.0.ffn_up_exps.weight")
    start = len(raw) - 272
    assert (experts.type, experts.shape) == (GGMLType.Q8_0, (32, 2, 2))
    assert (experts.n_cols, experts.n_rows, experts.n_expert) == (32, 2, 2)
    assert (experts.row_bytes, experts.nbytes, experts.offset, experts.part) == (34, 136, start + 64, 0)
    norm = model.tensor("output_norm.weight")
    assert (norm.n_cols, norm.n_rows, norm.n_expert, norm.nbytes) == (4, 1, 1, 16)
    assert raw[experts.offset] == 64


def test_open_gguf_accepts_scalars_empty_tensors_and_gaps(tmp_path: Path) -> None:
    tensors = [
        build.tensor("scalar", [], build.TYPE_F32, 0),
        build.tensor("empty", [0, 3], build.TYPE_F32, 32),
        build.tensor("after a gap", [1], build.TYPE_F32, 96),
    ]
    model = opened(tmp_path, build.gguf([], tensors, bytes(100)))
    assert [info.nbytes for info in model.tensors.values()] == [4, 0, 4]
    assert model.alignment == 32


def test_get_accepts_any_integer_width(tmp_path: Path) -> None:
    pairs = [build.pair(str(kind), kind, build.scalar(kind, 7)) for kind in (0, 1, 2, 3, 4, 5, 10, 11)]
    model = opened(tmp_path, build.gguf(pairs))
    assert [model.get(key, int) for key in model.metadata] == [7] * len(pairs)
    assert type(model.get("4", float)) is float


def test_get_returns_values_and_defaults(tmp_path: Path) -> None:
    model = opened(tmp_path, build.small_model())
    assert model.get("llama.rope.freq_base", float) == 10000.0
    assert model.get("tokenizer.ggml.add_bos_token", bool) is True
    assert model.get("tokenizer.ggml.tokens", StringArray)[1] == "a"
    assert model.get("tokenizer.ggml.scores", np.ndarray).tolist() == [0.0, -1.5, 2.0, 3.0]
    assert model.get("absent", int, 5) == 5
    assert model.get("absent", str, None) is None


@pytest.mark.parametrize(
    ("key", "wanted", "message"),
    [
        ("absent", int, "'absent': found no such key, expected int"),
        ("llama.rope.freq_base", int, "'llama.rope.freq_base': found float 10000.0, expected int"),
        (
            "tokenizer.ggml.add_bos_token",
            int,
            "'tokenizer.ggml.add_bos_token': found bool True, expected int",
        ),
        ("general.architecture", float, "'general.architecture': found str 'llama', expected float"),
        ("tokenizer.ggml.tokens", str, "'tokenizer.ggml.tokens': found StringArray of 4 items, expected str"),
        ("llama.block_count", StringArray, "'llama.block_count': found int 2, expected StringArray"),
    ],
)
def test_get_names_key_found_and_expected(tmp_path: Path, key: str, wanted: type, message: str) -> None:
    model = opened(tmp_path, build.small_model())
    with pytest.raises(ModelError) as caught:
        model.get(key, wanted)
    assert str(caught.value) == f"{tmp_path / 'model.gguf'}: {message}"


def test_tensor_names_what_is_missing(tmp_path: Path) -> None:
    model = opened(tmp_path, build.small_model())
    with pytest.raises(ModelError, match=r"tensor 'output\.weight': found none of that name among 3"):
        model.tensor("output.weight")


def test_types_match_oracle() -> None:
    assert {kind.name: int(kind) for kind in GGMLType} == {kind.name: int(kind) for kind in QUANT_TYPES}
    for kind, (block_size, type_size) in oracle.GGML_QUANT_SIZES.items():
        ours = QUANT_TYPES[GGMLType(int(kind))]
        assert ours.name == kind.name
        if kind.name != "Q8_1":  # the package counts two f32 there, block_q8_1 has two f16
            assert (ours.block_size, ours.type_size) == (block_size, type_size), kind.name
    assert not set(REMOVED_TYPES) & {int(kind) for kind in GGMLType}
    assert set(REMOVED_TYPES) | {int(kind) for kind in GGMLType} == set(range(43))


def test_open_gguf_matches_oracle(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "written.gguf"
    writer = oracle.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b", "\u00df"])
    writer.add_token_scores([0.5, 1.5, -2.0])
    writer.add_token_types([1, 3, 1])
    writer.add_array("ints", [1, 2, 3])
    writer.add_custom_alignment(128)
    for name, kind, shape in [("b", "Q6_K", (3, 512)), ("a", "BF16", (5, 7)), ("e", "IQ4_XS", (2, 3, 256))]:
        ggml_type = oracle.GGMLQuantizationType[kind]
        raw = rng.integers(0, 256, oracle.quant_shape_to_byte_shape(shape, ggml_type), dtype=np.uint8)
        writer.add_tensor(name, raw, raw_dtype=ggml_type)
    writer.add_tensor("norm", rng.random(9, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours, theirs = open_gguf(path), oracle.GGUFReader(path)
    assert ours.alignment == theirs.alignment == 128
    for field in theirs.fields.values():
        if not field.name.startswith("GGUF."):
            value = ours.metadata[field.name]
            assert (value.tolist() if hasattr(value, "tolist") else value) == field.contents(), field.name
    assert len(ours.tensors) == len(theirs.tensors)
    for info in theirs.tensors:
        mine = ours.tensor(info.name)
        assert (mine.offset, mine.nbytes) == (info.data_offset, info.n_bytes)
        assert mine.shape == tuple(info.shape.tolist())
        assert mine.type.name == info.tensor_type.name
