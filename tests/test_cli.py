"""The command line against a fake engine: options, streams, exit codes, the JSON document."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

import strata_jit
import strata_jit.__main__ as entry
from strata_jit.cli import main
from strata_jit.engine.builtin import BUILTIN_START

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
DECODE = ("decode", "--model", "some.gguf")
JSON_KEYS = """
    text prompt_tokens generated_tokens token_ids stop_reason prompt_tok_s decode_tok_s ttft_s load_s
    compile_s wait_us_per_token weight_bytes_per_token workers threads split nodes kernels output_sha256 model
    versions seed
""".split()
EXIT_INTERRUPTED = 130
VARIABLES = (
    "STRATA_NUMA_POOL",
    "STRATA_POOL_SPIN_US",
    "STRATA_EXCHANGE_ROTATE",
    "STRATA_DECODE_TIMING",
    "STRATA_ROUTE_TAIL_SKIP",
)


def _fakes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_engine", FAKE_ENGINE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_engine"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fake_engine = _fakes()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake engine's script, in place of the real engine; no variable of the user's is set."""

    def assign(module: ModuleType, name: str, value: object) -> None:
        monkeypatch.setitem(vars(module), name, value)

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    script = fake_engine.Script()
    fake_engine.install(script, assign)
    return script


def run(*args: str, stdin: str | bytes | None = None, **env: str) -> Result:
    result = CliRunner().invoke(main, [*DECODE, *args], input=stdin, env=env, prog_name="strata-jit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def call(script: Any, name: str) -> dict[str, Any]:
    (found,) = [given for called, given in script.calls if called == name]
    return dict(found)


# --- text --------------------------------------------------------------------------------------------------


def test_decode_writes_text_and_newline(script: Any) -> None:
    result = run("-p", "hi")
    assert (result.exit_code, result.stdout) == (0, "Hello you\n")
    called = [name for name, _ in script.calls]
    assert called == ["encode", "load", "generate", "close_generation", "close_model"]


def test_decode_adds_no_second_newline(script: Any) -> None:
    script.pieces = ["a", "\n"]
    assert run("-p", "hi").stdout == "a\n"


def test_decode_leaves_pipe_unchanged(script: Any) -> None:
    script.pieces = ["\x1b[2Jé", "\r\n\x07\U0001f600"]
    assert run("-p", "hi").stdout_bytes == "\x1b[2Jé\r\n\x07\U0001f600\n".encode()


def test_decode_prints_summary_on_stderr(script: Any) -> None:
    stderr = run("-p", "hi").stderr
    for shown in ("0-1", "3.00 GiB", "1.00 GiB", "123.4 tok/s", "45.6 tok/s", "91.20 GB/s", "250 ms"):
        assert shown in stderr
    assert "7.5 us/token" in stderr
    assert "\x1b" not in stderr


def test_decode_summary_names_what_is_missing(script: Any) -> None:
    script.pieces, script.pinned = ["one"], False
    stderr = run("-p", "hi").stderr
    assert "not pinned" in stderr
    assert "1 tokens, not measured" in stderr


def test_decode_prints_warnings_as_lines(script: Any) -> None:
    script.warnings = ["5 threads on 2 CPUs:\nnot pinned\x1b[0m"]
    assert run("-p", "hi").stderr.splitlines()[0] == "warning: 5 threads on 2 CPUs:\\nnot pinned\\x1b[0m"


# --- options -----------------------------------------------------------------------------------------------


def test_decode_defaults(script: Any) -> None:
    run("-p", "hi")
    given = {"path": "some.gguf", "text": "hi", "system": None, "raw": False, "think": None}
    assert call(script, "encode") == given
    assert call(script, "load") == {
        "path": "some.gguf",
        "workers": None,
        "ctx": fake_engine.N_CTX_TRAIN,  # 3 + 128 tokens are more than the model's
        "chunk": None,
        "isa": None,
        "reference": False,
        "numa_pool": None,
        "test_slices": None,
        "spin_us": None,
        "pool_affinity": None,
        "pool_tasks": 0,
        "exchange_rotate": False,
        "route_tail_skip": 0,
        "aux_cpus": "off",
        "arena": "memfd",
    }
    generate = call(script, "generate")
    assert (generate["ids"], generate["max_tokens"]) == (fake_engine.PROMPT_IDS, 128)
    assert generate["sampling"] == strata_jit.Sampling()


def test_decode_passes_options_on(script: Any) -> None:
    sampling = "--temp 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.1 --seed 3"
    pool = "--ctx 50 --pool-workers 0 --chunk 7 --isa portable --reference --arena anon"
    pool += " --pool-affinity p-cores --pool-tasks 9 --aux-cpus auto"
    run("-p", "hi", "--system", "be brief", "-n", "9", *sampling.split(), *pool.split())
    assert call(script, "encode")["system"] == "be brief"
    expected: dict[str, Any]
    expected = {"workers": 0, "ctx": 50, "chunk": 7, "isa": "portable", "reference": True, "arena": "anon"}
    expected |= {"pool_affinity": "p-cores", "pool_tasks": 9, "aux_cpus": "auto"}
    assert expected.items() <= call(script, "load").items()
    generate = call(script, "generate")
    assert generate["max_tokens"] == 9
    assert generate["sampling"] == strata_jit.Sampling(
        temp=0.7, top_k=5, top_p=0.9, min_p=0.1, repeat_penalty=1.1, seed=3
    )


@pytest.mark.parametrize(("option", "think"), [("--think", True), ("--no-think", False)])
def test_decode_says_that_template_has_no_thinking(script: Any, option: str, think: bool) -> None:
    stderr = run("-p", "hi", option).stderr
    assert call(script, "encode")["think"] is think
    note = f"note: the chat template reads no variable for thinking: {option} changes nothing"
    assert stderr.splitlines()[0] == note


def test_decode_says_nothing_where_template_has_thinking(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "CHAT_TEMPLATE", "{% if enable_thinking %}x{% endif %}")
    assert "note" not in run("-p", "hi", "--no-think").stderr


def test_decode_warns_where_rules_are_forced(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine.TOKENIZER, "forced", "words are cut", raising=False)
    assert run("-p", "hi", "--force").stderr.splitlines()[0] == "warning: words are cut"
    assert fake_engine.TOKENIZER.force is True


def test_decode_context_defaults_to_prompt_and_tokens(script: Any) -> None:
    run("-p", "hi", "-n", "10")
    assert call(script, "load")["ctx"] == len(fake_engine.PROMPT_IDS) + 10


@pytest.mark.parametrize("ctx", ["2", "65"])
def test_decode_refuses_context(script: Any, ctx: str) -> None:
    result = run("-p", "hi", "--ctx", ctx)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("value", ["0", "1", "test"])
def test_decode_reads_environment(script: Any, value: str) -> None:
    run("-p", "hi", STRATA_NUMA_POOL=value, STRATA_POOL_SPIN_US="0")
    expected = {"numa_pool": value, "test_slices": None, "spin_us": 0}
    assert expected.items() <= call(script, "load").items()


def test_decode_reads_exchange_rotation(script: Any) -> None:
    run("-p", "hi", STRATA_EXCHANGE_ROTATE="1")
    assert call(script, "load")["exchange_rotate"] is True


def test_decode_shows_what_was_left_out(script: Any) -> None:
    stderr = run("-p", "hi", STRATA_ROUTE_TAIL_SKIP="5").stderr
    assert call(script, "load")["route_tail_skip"] == 5
    assert "lossy: 12 choices of experts at rank 5 or later were left out of this run\n" in stderr


def test_decode_prints_one_line_of_times(script: Any) -> None:
    timings = [
        line for line in run("-p", "hi", STRATA_DECODE_TIMING="1").stderr.splitlines() if "timing" in line
    ]
    assert timings == ["timing: 3 + 3 tokens, linear 2.50 s, attention 250 ms"]
    assert "timing" not in run("-p", "hi", STRATA_DECODE_TIMING="0").stderr


def test_decode_option_wins_over_environment(script: Any) -> None:
    run("-p", "hi", "--test-slices", "3", STRATA_NUMA_POOL="0")
    assert {"numa_pool": "test", "test_slices": 3}.items() <= call(script, "load").items()


@pytest.mark.parametrize(
    ("name", "value"),
    [("STRATA_NUMA_POOL", value) for value in ("2", "on", "Test")]
    + [("STRATA_ROUTE_TAIL_SKIP", "-1"), ("STRATA_EXCHANGE_ROTATE", "2"), ("STRATA_DECODE_TIMING", "yes")]
    + [("STRATA_POOL_SPIN_US", value) for value in ("-1", "1.5", "fast", "9" * 30, " 5", "٣")],
)
def test_decode_refuses_environment_by_name(script: Any, name: str, value: str) -> None:
    result = run("-p", "hi", **{name: value})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {name}=")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ("-p", "hi", "-n", "0"),
        ("-p", "hi", "--pool-workers", "-1"),
        ("-p", "hi", "--isa", "sse9"),
        ("-p", "hi", "--pool-affinity", "e-cores"),
        ("-p", "hi", "--pool-tasks", "4097"),
        ("-p", "hi", "--no-such-option"),
        ("-p", "hi", "--top-p", "much"),
        ("-p", "hi", "--top-p", "1.5"),
        (),
        ("-p", "hi", "--prompt-file", "x"),
    ],
)
def test_decode_refuses_options(script: Any, args: tuple[str, ...]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "rror: " in result.stderr


@pytest.mark.parametrize("args", [("-p", "hi"), ("--prompt-file", "-"), ()])
def test_decode_without_model_takes_the_builtin_one(script: Any, args: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["decode", *args], input="hi\n", prog_name="strata-jit")
    assert (result.exit_code, result.stdout) == (0, "Hello you\n")
    path = str(strata_jit.builtin_model())
    text = "hi" if args else BUILTIN_START
    expected = {"path": path, "text": text, "system": None, "raw": True, "think": None}
    assert call(script, "encode") == expected
    assert result.stderr.startswith("note: no --model: ")


def test_decode_samples_as_the_file_recommends(script: Any) -> None:
    script.metadata = {"general.sampling.temp": 0.5, "general.sampling.penalty_repeat": 1.25}
    result = run("-p", "hi", "--repeat-penalty", "1.5", "--seed", "2")
    assert call(script, "generate")["sampling"] == strata_jit.Sampling(temp=0.5, repeat_penalty=1.5, seed=2)
    assert result.stderr.startswith("note: sampling as the file recommends: temp 0.5; --temp 0 is greedy\n")


def test_decode_greedy_by_option_says_nothing_of_sampling(script: Any) -> None:
    script.metadata = {"general.sampling.temp": 0.5}
    result = run("-p", "hi", "--temp", "0")
    assert call(script, "generate")["sampling"].is_greedy
    assert "recommends" not in result.stderr


# --- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [("-p", "-"), ("--prompt-file", "-")])
def test_decode_reads_prompt_from_stdin(script: Any, args: tuple[str, str]) -> None:
    run(*args, stdin="first\nsecond é\n\n")
    assert call(script, "encode")["text"] == "first\nsecond é\n"


def test_decode_reads_prompt_file(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "stdin"
    path.write_bytes(b"from a file\r\n")
    run("--prompt-file", str(path), "--raw")
    assert {"text": "from a file", "raw": True}.items() <= call(script, "encode").items()


def test_decode_refuses_prompt_that_is_not_utf8(script: Any) -> None:
    result = run("-p", "-", stdin=b"ab\xff")
    assert result.exit_code == 2
    assert result.stderr == "error: stdin: the prompt is not UTF-8: byte 0xff at offset 2\n"


def test_decode_refuses_missing_prompt_file(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "none"
    result = run("--prompt-file", str(path))
    assert result.exit_code == 2
    assert result.stderr == f"error: cannot read the prompt: {path}: No such file or directory\n"


def test_decode_refuses_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    result = CliRunner().invoke(main, ["decode", "-p", "hi", "--model", str(path)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert str(path) in result.stderr


# --- JSON --------------------------------------------------------------------------------------------------


def test_decode_json_document(script: Any) -> None:
    result = run("-p", "hi", "--json")
    document = json.loads(result.stdout)
    assert list(document) == JSON_KEYS
    assert (result.exit_code, result.stderr) == (0, "")
    assert (document["text"], document["token_ids"]) == ("Hello you", [100, 101, 102])
    assert document["output_sha256"] == hashlib.sha256(struct.pack("<3i", 100, 101, 102)).hexdigest()
    assert document["split"] == {"on": True, "reason": "test"}
    second = {"node": 1, "workers": 1, "cpus": [4], "bytes": 1 << 30, "placed_share": 1.0, "verified": "all"}
    assert document["nodes"][1] == second
    assert document["kernels"][0] == {"op": "attention", "variant": "avx2"}
    assert document["model"] == {"path": "some.gguf", "arch": "llama", "types": {"IQ4_XS": 10, "F32": 3}}
    assert document["versions"]["strata_jit"] == strata_jit.__version__


def test_decode_json_after_interrupt(script: Any) -> None:
    script.pieces = ["half", "!interrupt", "rest"]
    result = run("-p", "hi", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, list(document)) == (EXIT_INTERRUPTED, JSON_KEYS)
    assert (document["text"], document["stop_reason"]) == ("half", "interrupted")


def test_decode_json_after_interrupt_while_loading(script: Any) -> None:
    script.load = "interrupt"
    result = run("-p", "hi", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, list(document)) == (EXIT_INTERRUPTED, JSON_KEYS)
    assert (document["text"], document["stop_reason"]) == (None, "interrupted")


def test_list_kernels(script: Any) -> None:
    result = run("--list-kernels")
    assert (result.exit_code, result.stdout) == (0, "attention\tavx2\nhead Q6_K\tportable\n")
    assert "generate" not in [name for name, _ in script.calls]


def test_list_kernels_as_json(script: Any) -> None:
    document = json.loads(run("--list-kernels", "--json").stdout)
    assert document["kernels"][1] == {"op": "head Q6_K", "variant": "portable"}


# --- ends --------------------------------------------------------------------------------------------------


def test_decode_interrupt_keeps_text(script: Any) -> None:
    script.pieces = ["half", "!interrupt", "rest"]
    result = run("-p", "hi")
    assert (result.exit_code, result.stdout) == (EXIT_INTERRUPTED, "half\n")
    assert "Aborted" not in result.stderr
    assert ("close_model", None) in script.calls


def test_decode_interrupt_while_loading_is_quiet(script: Any) -> None:
    script.load = "interrupt"
    result = run("-p", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (EXIT_INTERRUPTED, "", "")


def test_decode_dead_node_is_one_line(script: Any) -> None:
    script.pieces = ["half", "!die"]
    result = run("-p", "hi")
    assert (result.exit_code, result.stdout) == (1, "half\n")
    assert result.stderr == "error: node process 1 died: killed by SIGKILL\n"
    assert ("close_model", None) in script.calls


def test_decode_os_error_is_one_line(script: Any) -> None:
    script.pieces = ["half", "!oserror"]
    result = run("-p", "hi")
    assert (result.exit_code, result.stderr) == (1, "error: part-2.gguf: Input/output error\n")


# --- the command itself ------------------------------------------------------------------------------------


def test_entry_ends_quietly_on_early_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("strata_jit.cli.main", interrupted)
    with pytest.raises(SystemExit) as end:
        entry.run()
    assert end.value.code == EXIT_INTERRUPTED


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"strata-jit, version {strata_jit.__version__}\n")


def test_help_names_every_option() -> None:
    help_text = CliRunner().invoke(main, ["decode", "--help"]).stdout
    for option in main.commands["decode"].params:
        assert option.opts[-1] in help_text
    assert "STRATA_NUMA_POOL" in help_text


def test_changelog_names_the_version() -> None:
    changelog = FAKE_ENGINE.parents[1] / "CHANGELOG.md"
    headings = [line for line in changelog.read_text("utf-8").splitlines() if line.startswith("## ")]
    assert headings[0].split()[1] == strata_jit.__version__
