"""`strata-jit quantize` as a command: what it prints, its exit codes, and how it ends when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import strata_jit
from strata_jit.cli import main
from strata_jit.gguf.reader import open_gguf
from strata_jit.gguf.types import GGMLType
from strata_jit.gguf.writer import GGUFWriter, NewTensor

PROCESS_TIMEOUT_S = 300
N_ROWS, N_COLS = 64, 256


def model(path: Path, n_rows: int = N_ROWS, poison: float | None = None) -> Path:
    """A file with two float matrices and a norm."""
    tensors = [
        NewTensor("blk.0.ffn_up_exps.weight", (N_COLS, n_rows, 2), GGMLType.F32),
        NewTensor("blk.1.ffn_up_exps.weight", (N_COLS, n_rows, 2), GGMLType.F32),
        NewTensor("output_norm.weight", (N_COLS,), GGMLType.F32),
    ]
    rows = np.random.default_rng(2).standard_normal((n_rows, N_COLS), np.float32)
    with GGUFWriter(path, [], tensors, 32) as writer:
        for number, tensor in enumerate(tensors):
            for offset in range(0, tensor.nbytes, rows.nbytes):
                writer.write(number, offset, rows.tobytes()[: tensor.nbytes - offset])
        if poison is not None:
            writer.write(1, 4 * (N_COLS * 3 + 5), np.float32(poison).tobytes())
        writer.finish()
    return path


def run(*args: object) -> Result:
    result = CliRunner().invoke(main, ["quantize", *map(str, args)], prog_name="strata-jit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_table(tmp_path: Path) -> None:
    result = run(model(tmp_path / "in.gguf"), tmp_path / "out.gguf", "iq4_xs")
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    (experts,) = [line for line in lines if "ffn_up_exps" in line]
    cells = [cell.strip() for cell in experts.split("\u2502")[1:-1]]
    assert cells[:7] == ["ffn_up_exps", "2", "F32", "IQ4_XS", "256.0 KiB", "34.0 KiB", "4.25"]
    assert 0.05 < float(cells[7]) < 0.09
    assert any("output_norm" in line and "copied" in line for line in lines)
    assert open_gguf(tmp_path / "out.gguf").tensor("blk.1.ffn_up_exps.weight").type.name == "IQ4_XS"


def test_json(tmp_path: Path) -> None:
    source = model(tmp_path / "in.gguf")
    result = run(source, tmp_path / "out.gguf", "Q8_0", "--json", "--tensor-type", r"blk\.1\.=F16")
    document = json.loads(result.stdout)
    assert document["type"] == "Q8_0" and document["path"] == str(tmp_path / "out.gguf")
    assert [(role["role"], role["type"], role["tensors"]) for role in document["roles"]] == [
        ("ffn_up_exps", "Q8_0", 1),
        ("ffn_up_exps", "F16", 1),
        ("output_norm", "F32", 1),
    ]
    first, second, norm = document["tensors"]
    assert (first["bits_per_weight"], second["bits_per_weight"], norm["relative_rmse"]) == (8.5, 16, None)
    assert 0.004 < first["relative_rmse"] < 0.008 and second["relative_rmse"] < 0.001
    n_weights = 2 * 2 * N_ROWS * N_COLS + N_COLS
    assert document["source_bytes"] == 4 * n_weights
    assert document["bits_per_weight"] == 8 * document["bytes"] / n_weights
    assert document["threads"] >= 1 and document["seconds"] > 0


def test_quantised_input_is_a_warning_line(tmp_path: Path) -> None:
    run(model(tmp_path / "in.gguf"), tmp_path / "q8.gguf", "Q8_0")
    result = run(tmp_path / "q8.gguf", tmp_path / "out.gguf", "IQ4_NL")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: 2 tensors are quantised already (Q8_0)")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["IN", "OUT", "Q4_0"], "TYPE: found type 'Q4_0', expected one of IQ4_XS, IQ4_NL, Q6_K, Q8_0"),
        (["IN", "OUT", "Q8_0", "--tensor-type", "attn=F16"], "found pattern 'attn', expected part of"),
        (["IN", "OUT", "Q8_0", "--tensor-type", "ffn=F17"], "found type 'F17'"),
        (["IN", "IN", "Q8_0"], "found the input as output"),
        (["none.gguf", "OUT", "Q8_0"], "none.gguf"),
        (["BAD", "OUT", "Q8_0"], "'blk.1.ffn_up_exps.weight', row 3, column 5 of expert 0: found nan"),
    ],
)
def test_refusals_are_one_line(tmp_path: Path, args: list[str], message: str) -> None:
    paths = {
        "IN": str(model(tmp_path / "in.gguf")),
        "BAD": str(model(tmp_path / "bad.gguf", poison=np.nan)),
        "OUT": str(tmp_path / "out.gguf"),
    }
    result = run(*[paths.get(arg, arg) for arg in args])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["bad.gguf", "in.gguf"]


def test_missing_directory_of_output(tmp_path: Path) -> None:
    result = run(model(tmp_path / "in.gguf"), tmp_path / "no" / "out.gguf", "Q8_0")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot write ") and "No such file or directory" in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_process_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    source = model(tmp_path / "in.gguf", n_rows=64 << 10)  # 256 MiB: seconds of work
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "strata_jit", "quantize", source, tmp_path / "out" / "x.gguf", "IQ4_XS"]
    environment = os.environ | {"PYTHONPATH": str(Path(strata_jit.__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + PROCESS_TIMEOUT_S
        while not os.listdir(tmp_path / "out") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(number)
        _, stderr = process.communicate(timeout=PROCESS_TIMEOUT_S)
    assert (process.returncode, stderr) == (code, "")
    assert os.listdir(tmp_path / "out") == []
