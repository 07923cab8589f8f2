"""`strata-jit perplexity` on a small model: figures, JSON, a base, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from strata_jit.cli import main
from strata_jit.report.perplexity import JSON_KEYS
from tests.test_cli import VARIABLES

DATA = Path(__file__).parent / "data"
MODEL = DATA / "golden" / "llama" / "model.gguf"
TEXT = (DATA / "perplexity.txt").read_text("utf-8")[:1200]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run(*args: object, stdin: str = TEXT) -> Result:
    command = ["perplexity", str(MODEL), "--pool-workers", "1", *map(str, args)]
    result = CliRunner().invoke(main, command, input=stdin, prog_name="strata-jit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def document(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert list(found) == JSON_KEYS
    return found


def test_figures_go_to_stdout_and_the_running_value_to_stderr() -> None:
    result = run("--text", "-", "--ctx", 100)
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["perplexity", "mean", "scored"]
    progress = [line for line in result.stderr.splitlines() if line.startswith("perplexity: window")]
    n = int(progress[0].split()[4].rstrip(","))
    assert len(progress) == n > 1
    value = float(result.stdout.split()[1])
    assert float(progress[-1].split()[-3]) == pytest.approx(value, abs=1e-3)


def test_document_and_a_base(tmp_path: Path) -> None:
    text, base = tmp_path / "text", tmp_path / "base"
    text.write_text(TEXT + "\n")
    first = document("--text", text, "--ctx", 64, "--kl-base", base)
    assert (first["kl"], first["ctx"], first["model"]["arch"]) == (None, 64, "llama")
    assert first["scored"] == len(first["per_position"]["nll"]) == 31 * first["windows"]
    second = document("--text", text, "--kl", base)  # the base's window
    assert second["nll"] == first["nll"]
    assert second["kl"]["same_top"] == 1.0 and second["kl"]["max"] < 1e-6
    assert len(second["per_position"]["kl"]) == second["scored"]
    shown = run("--text", text, "--kl", base, "--per-position").stdout.splitlines()
    assert shown[0].split("\t") == ["position", "token_id", "nll", "kl"]
    assert shown[1].split("\t")[0] == str(second["per_position"]["position"][0])
    assert shown[second["scored"] + 1] == "" and shown[-1].startswith("same likeliest    100.00 %")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--text", "-", "--ctx", "2000"), "the text has"),
        (("--text", "-", "--ctx", "3"), "expected a window of 4"),
        (("--text", "no-such-file"), "cannot read the text: no-such-file"),
        (("--text", "-", "--ctx", "64", "--kl-base", "/no/such/file"), "cannot write the base"),
        (("--text", "-", "--ctx", "64", "--kl-base", "/dev/null"), "not a regular file"),
        (("--text", "-", "--ctx", "64", "--kl", "no-such-file"), "cannot read the base"),
        (("--text", "-", "--ctx", "64", "--kl", str(MODEL)), "expected one that --kl-base wrote"),
    ],
)
def test_refusals_are_one_line(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"ab\xff")
    result = run("--text", tmp_path / "text")
    assert result.exit_code == 2 and "the text is not UTF-8: byte 0xff at offset 2" in result.stderr
