"""`quantize` from file to file: what it writes, that it decodes, and what it refuses or leaves undone."""

import gguf
import numpy as np
import pytest

import strata_jit
from strata_jit.engine import quantize as engine
from strata_jit.engine.quantize import plan_quantization, quantize
from strata_jit.errors import ModelError, UsageError
from strata_jit.gguf.reader import open_gguf, raw_pairs
from strata_jit.gguf.writer import u32_pair
from strata_jit.kernels.ref.quantizers import quantize as quantize_rows
from tests.engine.judge import kl
from tests.engine.rewrite import quantized, read_tensors, write

TOKENS = list(range(7, 31))
ROLE_TYPES = {
    "IQ4_XS": {"ffn_up_exps": "IQ4_XS", "ffn_down_exps": "IQ4_NL", "attn_v": "Q6_K", "output": "Q6_K"},
    "IQ4_NL": {"ffn_up_exps": "IQ4_NL", "ffn_down_exps": "IQ4_NL", "attn_v": "Q6_K", "output": "Q6_K"},
    "Q6_K": {"ffn_up_exps": "Q6_K", "ffn_down_exps": "Q8_0", "attn_v": "Q6_K", "output": "Q6_K"},
    "Q8_0": {"ffn_up_exps": "Q8_0", "ffn_down_exps": "Q8_0", "attn_v": "Q8_0", "output": "Q8_0"},
    "BF16": {"ffn_up_exps": "BF16", "ffn_down_exps": "BF16", "attn_v": "BF16", "output": "BF16"},
    "F16": {"ffn_up_exps": "F16", "ffn_down_exps": "F16", "attn_v": "F16", "output": "F16"},
    "F32": {"ffn_up_exps": "F32", "ffn_down_exps": "F32", "attn_v": "F32", "output": "F32"},
}
FILE_TYPES = {"IQ4_XS": 30, "IQ4_NL": 25, "Q6_K": 18, "Q8_0": 7, "BF16": 32, "F16": 1, "F32": 0}
MOST_KL = {"IQ4_XS": 0.6, "IQ4_NL": 0.6, "Q6_K": 0.07, "Q8_0": 0.02, "BF16": 2e-3, "F16": 2e-3, "F32": 1e-9}
"""Nats between the logits of the float file and of the quantised one, mean over positions; the weights are
random, so that a small error can change the choice of experts."""


def as_floats(tensors):
    """The same weights as F32 (embedding), F16 (values) and BF16."""
    changed = {}
    for name, (kind, data, shape) in tensors.items():
        values = gguf.quants.dequantize(data, kind) if len(shape) > 1 else data
        if len(shape) == 1 or "ffn_gate_inp" in name or "token_embd" in name:
            changed[name] = (gguf.GGMLQuantizationType.F32, np.ascontiguousarray(values, np.float32), shape)
        elif "attn_v" in name:
            changed[name] = (gguf.GGMLQuantizationType.F16, values.astype(np.float16), shape)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            changed[name] = (kind, gguf.quants.quantize(values, kind), shape)
    return changed


@pytest.fixture(scope="module")
def golden(request_golden):
    return request_golden("qwen3moe-nl") / "model.gguf"


@pytest.fixture(scope="module")
def tensors(golden):
    return as_floats(read_tensors(golden))


@pytest.fixture(scope="module")
def source(golden, tensors, tmp_path_factory):
    """The float file."""
    return write(tmp_path_factory.mktemp("source") / "float.gguf", golden, tensors)


@pytest.fixture(scope="module")
def float_logits(source):
    return logits(source)


def logits(path):
    with strata_jit.load(path, ctx=32, chunk=16, reference=True) as model:
        return model.logits(TOKENS)


def values(entry):
    kind, data, _ = entry
    return data.astype(np.float32) if kind in (0, 1) else gguf.quants.dequantize(data, kind)


def run(source, target, type_name, overrides=()):
    return quantize(plan_quantization(source, target, type_name, overrides))


@pytest.mark.parametrize("type_name", ROLE_TYPES)
def test_file_is_quantised_and_decodes(tmp_path, source, tensors, float_logits, type_name):
    target = tmp_path / "target.gguf"
    result = run(source, target, type_name)
    written = read_tensors(target)  # by the gguf package
    assert list(written) == list(tensors)
    for one in result.tensors:
        kind, data, shape = written[one.name]
        assert (one.type, one.bytes, one.n_elements) == (kind.name, data.nbytes, np.prod(shape))
        assert shape == tensors[one.name][2]
        if one.type == one.source_type:
            np.testing.assert_array_equal(data, tensors[one.name][1])
            assert one.relative_rmse is None
            continue
        before = values(tensors[one.name]).astype(np.float64)
        expected = quantize_rows(kind.name, before.reshape(-1, shape[-1]).astype(np.float32))
        np.testing.assert_array_equal(data.view(np.uint8).reshape(expected.shape), expected)
        error = np.sqrt(((values(written[one.name]) - before) ** 2).sum() / (before**2).sum())
        assert one.relative_rmse == pytest.approx(error, rel=1e-4, abs=1e-12)
    roles = {one.role: one.type for one in result.tensors}
    assert roles.items() >= ROLE_TYPES[type_name].items()
    assert {one.type for one in result.tensors if one.role.endswith(("norm", "inp"))} == {"F32"}
    assert kl(float_logits, logits(target)).mean() <= MOST_KL[type_name]


def test_metadata_is_copied_in_order(tmp_path, source):
    target = tmp_path / "target.gguf"
    run(source, target, "Q8_0")
    expected = raw_pairs(source)
    expected["general.file_type"] = u32_pair("general.file_type", FILE_TYPES["Q8_0"])
    expected["general.quantization_version"] = u32_pair("general.quantization_version", 2)
    assert list(raw_pairs(target).items()) == list(expected.items())


@pytest.mark.parametrize("type_name", FILE_TYPES)
def test_file_type_is_added_where_there_was_none(tmp_path, golden, type_name):
    bare = write(
        tmp_path / "bare.gguf",
        golden,
        {"token_embd.weight": quantized(np.random.default_rng(1), "BF16", [4, 256])},
        {"general.file_type": None, "general.quantization_version": None},
    )
    run(bare, tmp_path / "target.gguf", type_name)
    metadata = open_gguf(tmp_path / "target.gguf").metadata
    assert metadata["general.file_type"] == FILE_TYPES[type_name]
    assert metadata["general.quantization_version"] == 2


def test_split_input_becomes_one_file(tmp_path, golden, tensors, source):
    parts = write(tmp_path / "split.gguf", golden, tensors, parts=3)
    run(parts[1], tmp_path / "target.gguf", "Q8_0")
    run(source, tmp_path / "whole.gguf", "Q8_0")
    assert (tmp_path / "target.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_threads_and_pieces_do_not_matter(tmp_path, source, monkeypatch):
    written = []
    for n_threads, piece_bytes in ((1, 4 << 20), (5, 1 << 14)):
        monkeypatch.setattr(engine, "_n_threads", lambda n=n_threads: n)
        monkeypatch.setattr(engine, "PIECE_BYTES", piece_bytes)
        target = tmp_path / f"{n_threads}.gguf"
        result = run(source, target, "IQ4_XS")
        assert result.threads == n_threads
        written.append((target.read_bytes(), result.tensors))
    assert written[0] == written[1]


def test_overrides_reach_the_file(tmp_path, source):
    result = run(source, tmp_path / "t.gguf", "IQ4_XS", ["ffn_down=Q8_0", r"blk\.1\.ffn_down=F16"])
    found = {one.name: one.type for one in result.tensors if one.role == "ffn_down_exps"}
    assert found == {
        "blk.0.ffn_down_exps.weight": "Q8_0",
        "blk.1.ffn_down_exps.weight": "F16",
        "blk.2.ffn_down_exps.weight": "Q8_0",
    }


def test_quantised_input_is_warned_of(tmp_path, golden, source):
    (warning,) = plan_quantization(golden, tmp_path / "t.gguf", "Q8_0").warnings
    assert "quantised already (IQ4_NL, IQ4_XS, Q4_K, Q5_K, Q6_K)" in warning
    assert plan_quantization(source, tmp_path / "t.gguf", "Q8_0").warnings == ()
    result = run(golden, tmp_path / "t.gguf", "Q8_0")
    copied = {one.name for one in result.tensors if one.source_type == "Q8_0"}
    assert copied and all(one.relative_rmse is None for one in result.tensors if one.name in copied)


@pytest.mark.parametrize("as_link", [False, True])
def test_input_is_not_overwritten(tmp_path, golden, tensors, as_link):
    parts = write(tmp_path / "split.gguf", golden, tensors, parts=2)
    target = parts[1]
    if as_link:
        target = tmp_path / "link.gguf"
        target.symlink_to(parts[1])
    with pytest.raises(UsageError, match="found the input as output, expected another file"):
        plan_quantization(parts[0], target, "Q8_0")


def test_weights_of_a_type_that_is_unknown_here(tmp_path, golden, tensors):
    own = dict(tensors)
    data = np.zeros((256, 66), np.uint8)
    own["blk.0.attn_q.weight"] = (gguf.GGMLQuantizationType.IQ2_XXS, data, [256, 256])
    path = write(tmp_path / "odd.gguf", golden, own)
    with pytest.raises(
        ModelError, match=r"tensor 'blk.0.attn_q.weight': found type IQ2_XXS, expected one of F32"
    ):
        plan_quantization(path, tmp_path / "t.gguf", "Q8_0")


@pytest.mark.parametrize(
    ("value", "type_name", "message"),
    [
        (np.nan, "IQ4_XS", "found nan, expected a number that IQ4_NL can hold"),
        (-np.inf, "F16", "found -inf, expected a number that F16 can hold"),
        (1e6, "F16", "found 1000000, expected a number that F16 can hold; choose another type"),
    ],
)
def test_values_that_cannot_be_held(tmp_path, golden, tensors, value, type_name, message):
    own = dict(tensors)
    name = "blk.1.ffn_down_exps.weight"
    values_of = gguf.quants.dequantize(*reversed(own[name][:2])).astype(np.float32)
    values_of[7, 33, 5] = value
    own[name] = (gguf.GGMLQuantizationType.F32, values_of, own[name][2])
    path = write(tmp_path / "bad.gguf", golden, own)
    target = tmp_path / "target.gguf"
    target.write_bytes(b"as it was")
    with pytest.raises(ModelError, match=message) as caught:
        run(path, target, type_name)
    assert f"tensor '{name}', row 33, column 5 of expert 7" in str(caught.value)
    assert target.read_bytes() == b"as it was"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.gguf", "target.gguf"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
def test_interrupted_run_leaves_nothing(tmp_path, source, fault):
    def progress(stage, done, total):
        if stage == "quantising":
            raise fault

    with pytest.raises(fault):
        quantize(plan_quantization(source, tmp_path / "t.gguf", "IQ4_XS"), progress)
    assert list(tmp_path.iterdir()) == []


def test_input_that_is_cut_meanwhile(tmp_path, source):
    path = tmp_path / "in.gguf"
    path.write_bytes(source.read_bytes())
    plan = plan_quantization(path, tmp_path / "t.gguf", "Q8_0")
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    with pytest.raises(ModelError, match="become shorter"):
        quantize(plan)
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_progress_ends_complete(tmp_path, source):
    seen = []
    quantize(plan_quantization(source, tmp_path / "t.gguf", "Q8_0"), lambda *call: seen.append(call))
    assert ("compile", 0, 1) in seen
    stage, done, total = seen[-1]
    assert (stage, done) == ("quantising", total)
    assert total == sum(info.nbytes for info in open_gguf(source).tensors.values())


def test_smollm2_requantised_answers(tmp_path, models_dir):
    """A real model: IQ4_XS -> Q8_0 -> IQ4_XS finds the codes again, up to the rounding of Q8_0."""
    source = models_dir / "smollm2-moe-iq4_xs.gguf"
    middle, target = tmp_path / "q8_0.gguf", tmp_path / "iq4_xs.gguf"
    run(source, middle, "Q8_0")
    result = run(middle, target, "IQ4_XS")
    assert max(one.relative_rmse for one in result.tensors if one.type.startswith("IQ4")) < 0.002
    with strata_jit.load(target, ctx=64) as model:
        ids = model.tokenizer.encode("The capital of France is")
        assert "Paris" in "".join(model.generate(ids, max_tokens=4))
