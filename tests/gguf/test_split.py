"""Split models: any part leads to all of them, and parts that do not belong together are refused."""

from __future__ import annotations

from pathlib import Path

import gguf as oracle
import numpy as np
import pytest

from strata_jit.errors import ModelError
from strata_jit.gguf.reader import open_gguf
from tests.gguf import build

N_PARTS = 3


def part_path(folder: Path, no: int, count: int = N_PARTS) -> Path:
    return folder / f"m-{no + 1:05d}-of-{count:05d}.gguf"


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three parts with 1, 2 and 1 tensors; the architecture is in the first only."""
    name = build.pair("general.architecture", build.STRING, build.string("llama"))
    part_path(tmp_path, 0).write_bytes(build.split_part(0, N_PARTS, 4, ["a"], [name]))
    part_path(tmp_path, 1).write_bytes(build.split_part(1, N_PARTS, 4, ["b", "c"]))
    part_path(tmp_path, 2).write_bytes(build.split_part(2, N_PARTS, 4, ["d"]))
    return [part_path(tmp_path, no) for no in range(N_PARTS)]


@pytest.mark.parametrize("given", range(N_PARTS))
def test_open_gguf_finds_all_parts_from_any(parts: list[Path], given: int) -> None:
    model = open_gguf(parts[given])
    assert model.path == parts[given]
    assert model.parts == tuple(parts)
    assert model.metadata["general.architecture"] == "llama"
    assert [(info.name, info.part) for info in model.tensors.values()] == [
        ("a", 0),
        ("b", 1),
        ("c", 1),
        ("d", 2),
    ]
    assert model.tensor("c").offset == model.tensor("b").offset + 32


def test_open_gguf_finds_parts_beside_a_link_not_its_target(parts: list[Path], tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for no, part in enumerate(parts):
        blob = part.rename(tmp_path / f"blob{no}")
        part_path(links, no).symlink_to(blob)
    assert len(open_gguf(part_path(links, 1)).parts) == N_PARTS


@pytest.mark.parametrize("given", [0, 2])
def test_open_gguf_names_a_missing_part(parts: list[Path], given: int) -> None:
    parts[1].unlink()
    with pytest.raises(ModelError) as caught:
        open_gguf(parts[given])
    assert str(caught.value) == (
        f"{parts[1]}: file: found no such file, which is part 2 of 3, expected all 3 parts in one directory"
    )


def test_open_gguf_refuses_a_part_under_another_name(parts: list[Path], tmp_path: Path) -> None:
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(
        ModelError, match=r"model\.gguf: file name: found part 1 of 3 .* -00001-of-00003\.gguf"
    ):
        open_gguf(renamed)


@pytest.mark.parametrize(
    ("no", "raw", "message"),
    [
        (1, build.split_part(2, 3, 4, ["b", "c"]), "found part 3 of 3, expected part 2 of 3"),
        (1, build.split_part(1, 2, 4, ["b", "c"]), "found part 2 of 2, expected part 2 of 3"),
        (1, build.gguf([], []), "found part 1 of 1, expected part 2 of 3"),
        (1, build.split_part(1, 3, 4, ["a", "c"]), "tensor 'a': found a second one"),
        (1, build.split_part(1, 3, 4, ["b"]), "'split.tensors.count': found 4, expected the 3 tensors"),
        (1, build.split_part(1, 3, 4, ["b", "c"])[:-17], "tensor 'c': found data at bytes"),
        (0, build.split_part(3, 3, 4, ["a"]), "'split.no': found 3, expected 0 to 2"),
    ],
)
def test_open_gguf_refuses_parts_that_disagree(parts: list[Path], no: int, raw: bytes, message: str) -> None:
    parts[no].write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        open_gguf(parts[0])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("split.count", build.U16, 3)], "'split.no': found nothing, expected 0 to 2"),
        ([("split.count", build.U64, 2**40)], "'split.count': found 1099511627776, expected at most 65535"),
        ([("split.count", build.F32, 3.0)], "'split.count': found float 3.0, expected int"),
        (
            [("split.count", build.U16, 3), ("split.no", build.I16, -1)],
            "'split.no': found -1, expected 0 to 2",
        ),
    ],
)
def test_open_gguf_refuses_bad_split_keys(
    tmp_path: Path, pairs: list[tuple[str, int, float]], message: str
) -> None:
    path = part_path(tmp_path, 0)
    path.write_bytes(
        build.gguf([build.pair(key, kind, build.scalar(kind, value)) for key, kind, value in pairs])
    )
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    assert message in str(caught.value)


def test_open_gguf_needs_the_tensor_count(tmp_path: Path) -> None:
    for no in range(2):
        pairs = [
            build.pair("split.no", build.U16, build.scalar(build.U16, no)),
            build.pair("split.count", build.U16, build.scalar(build.U16, 2)),
        ]
        part_path(tmp_path, no, 2).write_bytes(build.gguf(pairs))
    with pytest.raises(ModelError, match=r"'split\.tensors\.count': found nothing, expected the 0 tensors"):
        open_gguf(part_path(tmp_path, 0, 2))


@pytest.mark.parametrize("count", [0, 1])
def test_open_gguf_reads_a_split_of_one(tmp_path: Path, count: int) -> None:
    path = tmp_path / "any-name.gguf"
    path.write_bytes(build.split_part(0, count, 1, ["a"]))
    assert open_gguf(path).parts == (path,)


def test_open_gguf_matches_oracle_on_a_split_model(tmp_path: Path) -> None:
    writer = oracle.GGUFWriter(tmp_path / "w.gguf", "llama", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full(i + 3, i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    model = open_gguf(tmp_path / "w-00002-of-00003.gguf")
    assert len(model.parts) == 3 and model.metadata["general.architecture"] == "llama"
    for i in range(5):
        info = model.tensor(f"t{i}")
        raw = model.parts[info.part].read_bytes()[info.offset : info.offset + info.nbytes]
        assert np.frombuffer(raw, np.float32).tolist() == [i] * (i + 3)
