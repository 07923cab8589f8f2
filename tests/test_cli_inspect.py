"""`strata-jit inspect`: what is shown of files that run, and of files that do not."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from strata_jit.cli import main
from strata_jit.engine.roles import layer_of, role_of
from strata_jit.engine.sizes import plan_model
from strata_jit.gguf import bpe
from strata_jit.gguf.reader import open_gguf
from strata_jit.placement import PlanOptions
from strata_jit.report.contents import JSON_KEYS
from strata_jit.topology.machine import read_machine
from tests.gguf import build
from tests.gguf import vocabularies as make

DATA = Path(__file__).parent / "data"
MODEL = DATA / "golden" / "qwen3moe-nl" / "model.gguf"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRATA_NUMA_POOL", "STRATA_EXCHANGE_ROTATE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_tokenizer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise AssertionError("a tokenizer is built")

    monkeypatch.setattr(bpe.RankedBPE, "__init__", build)


def run(*args: object) -> Result:
    result = CliRunner().invoke(main, ["inspect", *map(str, args)], prog_name="strata-jit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def view(*args: object) -> str:
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def document(*args: object) -> Any:
    text = view(*args, "--json")
    assert text.endswith("\n") and text.count("\n") == 1
    found = json.loads(text)
    assert list(found) == JSON_KEYS
    return found


def faults(found: Any) -> list[tuple[str, str]]:
    return [(fault["kind"], fault["found"]) for fault in found["unsupported"]]


def metadata(pairs: dict[str, object], tensors: list[bytes] = [], data: bytes = b"") -> bytes:  # noqa: B006
    kinds = {str: build.STRING, bool: build.BOOL, int: build.U32, float: build.F32}
    scalars = [build.pair(k, kinds[type(v)], build.scalar(kinds[type(v)], v)) for k, v in pairs.items()]
    return build.gguf(scalars, tensors, data)


# --- files that run ----------------------------------------------------------------------------------------


def test_model_that_runs() -> None:
    found = document(MODEL)
    assert (found["arch"], found["supported"], found["unsupported"]) == ("qwen3moe", True, [])
    expected = {"n_layer": 3, "n_embd": 256, "n_head": 4, "n_head_kv": 1, "head_dim_k": 64, "n_ff_exp": 160}
    expected |= {"n_expert": 10, "n_expert_used": 4, "n_vocab": 2048, "n_ctx_train": 4096, "rope_base": 1e6}
    assert expected.items() <= found["geometry"].items()
    assert found["tokenizer"]["pre"] == "smollm" and found["tokenizer"]["supported"]
    assert found["chat_templates"] == {"default": 368}


def test_tensors_add_up() -> None:
    found, file = document(MODEL), open_gguf(MODEL)
    uses = [use for role in found["roles"].values() for use in role.values()]
    assert sum(use["tensors"] for use in uses) == found["tensors"] == len(file.tensors)
    assert found["bytes"]["total"] == sum(info.nbytes for info in file.tensors.values())
    experts = sum(info.nbytes for info in file.tensors.values() if info.name.endswith("_exps.weight"))
    assert found["bytes"]["experts"] == experts
    assert found["bytes"]["other"] == found["bytes"]["total"] - experts
    assert found["file_bytes"] == MODEL.stat().st_size


def test_fit_is_that_of_the_plan() -> None:
    planned = plan_model(open_gguf(MODEL), read_machine(), PlanOptions(), ctx=100)
    found = document(MODEL, "--ctx", 100)
    assert found["weight_bytes_per_token"] == sum(planned.token_bytes)
    assert (found["fit"]["ctx"], found["fit"]["estimated"]) == (100, False)
    assert [node["bytes"] for node in found["fit"]["nodes"]] == [node.bytes for node in planned.plan.nodes]
    assert len(document(MODEL, "--test-slices", 3)["fit"]["nodes"]) == 3


def test_view_shows_the_same() -> None:
    text = view(MODEL)
    for shown in ("qwen3moe; can be run", "n_ff_exp", "IQ4_NL x 3", "pre-tokenizer smollm", "it fits"):
        assert shown in text
    assert "Not supported" not in text


def test_ctx_beyond_the_model_is_refused() -> None:
    result = run(MODEL, "--ctx", 99999)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


# --- files that do not -------------------------------------------------------------------------------------


def test_large_vocabulary_alone(tmp_path: Path) -> None:
    n = 250_000
    merges = [f"a{i} b{i}" for i in range(n)]
    data = make.vocabulary([f"token{i}" for i in range(n)], [1] * n, merges, model="gpt2", pre="qwen2")
    found = document(make.written(tmp_path / "v.gguf", data))
    assert (found["tokenizer"]["n_tokens"], found["tokenizer"]["n_merges"]) == (n, n)
    assert (found["geometry"]["n_vocab"], found["tokenizer"]["supported"]) == (n, True)
    assert faults(found) == [("architecture", "none named"), ("tensors", "none")]
    assert found["fit"] is None and found["weight_bytes_per_token"] is None


def test_vocabulary_of_real_model() -> None:
    text = view(DATA / "smollm2-vocab.gguf")
    assert "cannot be run" in text and "tensors none" in text and "it fits" not in text


def test_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    path = make.written(tmp_path / "v.gguf", make.byte_level(pre="newest"))
    found = document(path)
    assert ("tokenizer", "gpt2 newest") in faults(found)
    assert not found["tokenizer"]["supported"]
    assert "--force" in view(path) and str(path) not in found["unsupported"][-1]["reason"]


def test_unknown_architecture_is_estimated(tmp_path: Path) -> None:
    tensors = [
        build.tensor("token_embd.weight", [32, 8], build.TYPE_F32, 0),
        build.tensor("output.weight", [32, 8], build.TYPE_F32, 1024),
        build.tensor("blk.0.ffn_up_exps.weight", [32, 2, 4], 2, 2048),  # Q4_0: 8 rows of 18 bytes
    ]
    keys = {"general.architecture": "newest", "newest.expert_count": 4, "newest.expert_used_count": 1}
    data = metadata(keys, tensors, bytes(2048 + 144))
    found = document(make.written(tmp_path / "m.gguf", data))
    assert faults(found) == [("architecture", "newest"), ("type", "Q4_0"), ("tokenizer", "none")]
    assert found["roles"]["up experts"] == {"Q4_0": {"tensors": 1, "bytes": 144}}
    assert (found["geometry"]["n_ff_exp"], found["geometry"]["n_expert"]) == (2, 4)
    assert found["weight_bytes_per_token"] == 1024 + 144 // 4
    assert found["fit"]["estimated"] and found["fit"]["nodes"][0]["bytes"] == 2048 + 144


def test_feature_is_named(tmp_path: Path) -> None:
    data = bytearray(MODEL.read_bytes())
    key = b"qwen3moe.expert_used_count" + struct.pack("<II", build.U32, 4)
    at = data.index(key) + len(key) - 4
    data[at : at + 4] = struct.pack("<I", 11)  # of 10
    found = document(make.written(tmp_path / "m.gguf", bytes(data)))
    (fault,) = found["unsupported"]
    assert fault["kind"] == "feature" and "expert_used_count" in fault["reason"]
    assert found["fit"]["estimated"] and not found["supported"]


def test_sizes_that_differ_by_layer(tmp_path: Path) -> None:
    heads = build.pair("x.attention.head_count_kv", build.ARRAY, build.array(build.I32, [8, 8, 4]))
    arch = build.pair("general.architecture", build.STRING, build.string("x"))
    path = make.written(tmp_path / "m.gguf", build.gguf([arch, heads]))
    assert document(path)["geometry"]["n_head_kv"] == [8, 8, 4]
    assert "8 x 2, 4 x 1" in view(path)


def test_named_templates(tmp_path: Path) -> None:
    keys = {"tokenizer.chat_template.tool_use": "abc", "tokenizer.chat_template": "ab"}
    path = make.written(tmp_path / "m.gguf", metadata(keys))
    assert list(document(path)["chat_templates"].items()) == [("default", 2), ("tool_use", 3)]


def test_split_file(tmp_path: Path) -> None:
    arch = build.pair("general.architecture", build.STRING, build.string("x"))
    for no in range(2):
        data = build.split_part(no, 2, 2, [f"blk.{no}.attn_norm.weight"], [arch] if no == 0 else [])
        make.written(tmp_path / f"m-{no + 1:05d}-of-00002.gguf", data)
    found = document(tmp_path / "m-00002-of-00002.gguf")
    assert (len(found["parts"]), found["tensors"], found["arch"]) == (2, 2, "x")
    assert found["file_bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"", b"GGUF", b"x" * 100, build.small_model()[:300]])
def test_malformed_file_is_one_line(tmp_path: Path, data: bytes) -> None:
    result = run(make.written(tmp_path / "m.gguf", data))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "m.gguf" in result.stderr


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "none.gguf")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


# --- roles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("token_embd.weight", "embedding"),
        ("token_embd_norm.weight", "norms"),
        ("output.weight", "head"),
        ("output_norm.weight", "norms"),
        ("blk.11.attn_q.bias", "attention"),
        ("blk.0.attn_output.weight", "attention"),
        ("blk.0.attn_q_norm.weight", "norms"),
        ("blk.0.attn_kv_a_mqa.weight", "attention"),
        ("blk.0.ffn_gate_inp.weight", "router"),
        ("blk.0.ffn_gate_inp_shexp.weight", "shared experts"),
        ("blk.0.exp_probs_b.bias", "router"),
        ("blk.0.ffn_gate_exps.weight", "gate experts"),
        ("blk.0.ffn_gate_up_exps.weight", "gate/up experts"),
        ("blk.0.ffn_down_exps.bias", "down experts"),
        ("blk.0.ffn_up.7.weight", "up experts"),
        ("blk.0.ffn_up_shexp.weight", "shared experts"),
        ("blk.0.ffn_up.weight", "dense feed-forward"),
        ("blk.0.ssm_conv1d.weight", "recurrent"),
        ("blk.9.nextn.eh_proj.weight", "multi-token prediction"),
        ("something.else", "other"),
    ],
)
def test_role_of(name: str, role: str) -> None:
    assert role_of(name) == role


def test_layer_of() -> None:
    assert (layer_of("blk.12.attn_q.weight"), layer_of("output.weight")) == (12, None)
