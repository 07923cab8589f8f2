"""The built-in model: runs without options, knows its text, uses all experts, fits into the package."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import strata_jit
from strata_jit.cli import main
from strata_jit.engine.builtin import BUILTIN_START, recommended_sampling
from strata_jit.gguf.reader import GGUFFile, open_gguf
from tests.engine.rewrite import read_tensors, write

ROOT = Path(__file__).parents[1]
MODEL = strata_jit.builtin_model()
MAX_BYTES = 12_000_000
MAX_PERPLEXITY = 25.0
"""On three chapters that were held out: 22.4 was measured. docs/builtin-model.md has it for all of them."""
LEAST_SHARE = 0.04
"""Of an expert among the choices of its layer; an even share is 1/8."""


def run(*args, **env):
    result = CliRunner().invoke(main, ["decode", *args], env=env, prog_name="strata-jit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def evaluation():
    """The module that training judges models with."""
    spec = importlib.util.spec_from_file_location("evaluate", ROOT / "training" / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the file ----------------------------------------------------------------------------------------------


def test_file_is_small_and_says_what_it_is():
    file = open_gguf(MODEL)
    assert MODEL.stat().st_size <= MAX_BYTES
    assert file.get("general.name", str) == MODEL.stem
    assert file.get("general.license", str) == "mit"
    arch = file.get("general.architecture", str)
    assert arch == "qwen3moe"
    assert file.get(f"{arch}.context_length", int) >= 1024
    assert file.get(f"{arch}.attention.head_count_kv", int) == 2
    assert file.get(f"{arch}.embedding_length", int) % 256 == 0
    assert file.get(f"{arch}.expert_feed_forward_length", int) % 256 == 0
    assert "IQ4_XS" in {tensor.type.name for tensor in file.tensors.values()}


def test_start_is_one_token_and_none_is_added():
    tokenizer = strata_jit.Tokenizer.from_gguf(MODEL)
    assert tokenizer.encode(BUILTIN_START) == [tokenizer.bos_id]
    assert tokenizer.bos_id in tokenizer.eog_ids
    text = "And it came to pass,\nthat é 12 \U0001f600"
    ids = tokenizer.encode(text)
    assert tokenizer.bos_id not in ids
    assert tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def judged():
    """Nats of each held-out token, and the experts' counts [n_layer, n_expert] on the way."""
    evaluate = evaluation()
    text = (ROOT / "tests" / "data" / "held-out.txt").read_text("utf-8")
    with strata_jit.load(MODEL, ctx=evaluate.WINDOW) as model:
        counts = evaluate.ExpertCounts(model)
        chapters = BUILTIN_START + text.replace("\n\n", "\n" + BUILTIN_START)
        nats = list(evaluate.surprise(model, model.tokenizer.encode(chapters)))
        return np.concatenate(nats), counts.counts


def test_perplexity_of_held_out_text(judged):
    nats, _ = judged
    assert len(nats) > 1000
    assert np.exp(nats.mean()) < MAX_PERPLEXITY


def test_long_context_is_used(judged):
    """Late in a window of 1,023 tokens the model is no worse than early: positions up there were trained."""
    nats, _ = judged
    assert nats[512:1023].mean() < nats[:256].mean() + 0.1


def test_every_expert_is_used(judged):
    _, counts = judged
    assert counts.sum(axis=1).min() >= 2 * 1000  # two choices a token
    share = counts / counts.sum(axis=1, keepdims=True)
    assert counts.shape == (4, 8)
    assert share.min() > LEAST_SHARE


# --- the command -------------------------------------------------------------------------------------------


def test_decode_needs_no_model():
    result = run("-p", "And it came to pass", "-n", "40", "--seed", "1")
    assert result.exit_code == 0
    assert len(re.findall(r"[a-z]+", result.stdout)) >= 15
    notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2
    assert MODEL.stem in notes[0]
    assert "temp 0.8, top-p 0.9, repeat-penalty 1.1" in notes[1]


def test_decode_begins_a_chapter_without_prompt():
    result = run("-n", "12", "--temp", "0")
    assert result.exit_code == 0
    assert re.match(r"(\d )?([A-Z]\w+ )*\d+\n", result.stdout)


def test_decode_greedy_is_said_by_options():
    first = run("-p", "In the beginning", "-n", "8", "--temp", "0", "--json")
    second = run("-p", "In the beginning", "-n", "8", "--temp", "0", "--json", "--pool-workers", "0")
    assert "recommends" not in first.stderr
    documents = [json.loads(result.stdout) for result in (first, second)]
    assert documents[0]["token_ids"] == documents[1]["token_ids"]
    assert documents[0]["seed"] is None
    assert documents[0]["model"]["path"] == str(MODEL)


@pytest.mark.parametrize("options", [("--system", "be brief"), ("--think",), ("--no-think",)])
def test_decode_refuses_what_needs_a_chat_template(options):
    result = run("-p", "hi", *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


# --- sampling that a file recommends -----------------------------------------------------------------------


def with_keys(**keys):
    pairs = {f"general.sampling.{name}": value for name, value in keys.items()}
    return GGUFFile(Path("m.gguf"), (Path("m.gguf"),), 3, 32, pairs, {})


def test_recommended_sampling_names_llama_cpp_keys():
    given = {"temp": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "penalty_repeat": 1.1, "penalty_last_n": 9}
    expected = {"temp": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}
    expected |= {"repeat_penalty": 1.1, "repeat_last_n": 9}
    assert recommended_sampling(with_keys(**given, mirostat=2)) == expected
    assert recommended_sampling(with_keys()) == {}


@pytest.mark.parametrize("keys", [{"temp": -1.0}, {"top_p": 2.0}, {"temp": "hot"}, {"top_k": 1.5}])
def test_recommended_sampling_refuses_nonsense(keys):
    with pytest.raises(strata_jit.ModelError, match=r"general\.sampling"):
        recommended_sampling(with_keys(**keys))


def test_options_win_over_recommended_sampling(tmp_path):
    keys = {"general.sampling.temp": 0.9, "general.sampling.top_k": 1}
    path = write(tmp_path / "model.gguf", MODEL, read_tensors(MODEL), keys=keys)
    args = ("--model", str(path), "--raw", "-p", "The king", "-n", "6")
    recommended, greedy = run(*args), run(*args, "--temp", "0")
    assert "temp 0.9, top-k 1" in recommended.stderr
    assert recommended.stdout == greedy.stdout  # of one candidate
    assert "top-k" not in run(*args, "--top-k", "2", "--seed", "1").stderr


# --- the package -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wheel_carries_the_model(tmp_path):
    """Built in a copy, since setuptools leaves its `build` folder behind."""
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("this environment's setuptools is older than the build needs")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    command = [*pip, "-w", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 25_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert f"strata_jit/data/{MODEL.name}" in names
    assert not [name for name in names if name.startswith(("training", "tests", "bench"))]
