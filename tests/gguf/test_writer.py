"""Files written in pieces, read back by our reader and the gguf package; what is left of unfinished ones."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest

from strata_jit.errors import UsageError
from strata_jit.gguf.reader import open_gguf, raw_pairs
from strata_jit.gguf.types import GGMLType
from strata_jit.gguf.writer import GGUFWriter, NewTensor, u32_pair
from tests.gguf import build

TENSORS = [
    NewTensor("token_embd.weight", (4, 3), GGMLType.F32),
    NewTensor("blk.0.ffn_up_exps.weight", (32, 2, 2), GGMLType.Q8_0),
    NewTensor("output_norm.weight", (4,), GGMLType.F32),
]


def data_of(tensor: NewTensor) -> bytes:
    return bytes((i * 7 + len(tensor.name)) % 251 for i in range(tensor.nbytes))


def pairs_of(path: Path) -> list[bytes]:
    return list(raw_pairs(path).values())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    path.write_bytes(build.small_model())
    return path


@pytest.mark.parametrize("alignment", [32, 64])
def test_file_is_read_back(tmp_path: Path, source: Path, alignment: int) -> None:
    target = tmp_path / "target.gguf"
    pairs = raw_pairs(source) | {"general.alignment": u32_pair("general.alignment", alignment)}
    with GGUFWriter(target, pairs.values(), TENSORS, alignment) as writer:
        for number, tensor in reversed(list(enumerate(TENSORS))):
            data = data_of(tensor)
            writer.write(number, 5, data[5:])
            writer.write(number, 0, np.frombuffer(data[:5], np.uint8))
        assert not target.exists()
        writer.finish()
    assert raw_pairs(target) == pairs and list(raw_pairs(target)) == list(pairs)
    file, raw = open_gguf(target), target.read_bytes()
    assert file.alignment == alignment
    assert [(t.name, t.shape, t.type) for t in file.tensors.values()] == [
        (t.name, t.shape, t.type) for t in TENSORS
    ]
    for info, tensor in zip(file.tensors.values(), TENSORS, strict=True):
        assert info.offset % alignment == 0
        assert raw[info.offset : info.offset + info.nbytes] == data_of(tensor)
    assert os.listdir(tmp_path) and not list(tmp_path.glob("*.partial"))


def test_gguf_package_reads_it(tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    pair = build.pair("general.architecture", build.STRING, build.string("llama"))
    with GGUFWriter(target, [pair, u32_pair("general.file_type", 7)], TENSORS, 32) as writer:
        for number, tensor in enumerate(TENSORS):
            writer.write(number, 0, data_of(tensor))
        writer.finish()
    reader = oracle.GGUFReader(target)
    assert reader.fields["general.file_type"].contents() == 7
    found = {t.name: (t.shape.tolist(), t.tensor_type.name, t.data.tobytes()) for t in reader.tensors}
    assert found == {t.name: (list(t.shape), t.type.name, data_of(t)) for t in TENSORS}


def test_no_tensors(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target.gguf"
    with GGUFWriter(target, pairs_of(source), [], 64) as writer:
        writer.finish()
    assert open_gguf(target).tensors == {}


def test_without_finish_nothing_is_left_and_nothing_replaced(tmp_path: Path, source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(KeyboardInterrupt), GGUFWriter(source, pairs_of(source), TENSORS, 64) as writer:
        writer.write(0, 0, data_of(TENSORS[0]))
        raise KeyboardInterrupt
    assert source.read_bytes() == before
    assert os.listdir(tmp_path) == ["source.gguf"]


def test_finish_replaces_the_file_behind_a_link(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(source)
    with GGUFWriter(tmp_path / "link.gguf", pairs_of(source), TENSORS[2:], 64) as writer:
        writer.finish()
    assert (tmp_path / "link.gguf").is_symlink()
    assert list(open_gguf(source).tensors) == ["output_norm.weight"]


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    target.mkdir() if kind == "directory" else os.mkfifo(target)
    with pytest.raises(UsageError, match=r"target: found something that is not a regular file"):
        GGUFWriter(target, [], TENSORS, 32)
    assert os.listdir(tmp_path) == ["target"]


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*no/target.gguf: No such file"):
        GGUFWriter(tmp_path / "no" / "target.gguf", [], TENSORS, 32)


def test_too_little_room_shows_at_the_start(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the system refuses in the same place."""
    target = tmp_path / "target.gguf"
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from strata_jit.gguf.writer import *\n"
        "from strata_jit.gguf.types import GGMLType\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, {resource.RLIM_INFINITY}))\n"
        "try: GGUFWriter(Path(sys.argv[1]), [], [NewTensor('t', (1 << 20,), GGMLType.F32)], 32)\n"
        "except OSError as error: print(error.filename, error.strerror)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{target} File too large\n"
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    target = tmp_path / "target.gguf"
    with (
        pytest.raises(OSError, match="No space left") as caught,
        GGUFWriter(target, [], TENSORS, 32) as writer,
    ):
        monkeypatch.setattr(os, "pwrite", full)
        writer.write(0, 0, data_of(TENSORS[0]))
    assert caught.value.filename == str(target)
    assert os.listdir(tmp_path) == []
