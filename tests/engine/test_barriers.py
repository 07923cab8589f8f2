"""Between two barriers no buffer is written by one op and touched by another, unless by the same thread.

Ops share memory between threads without locks: a barrier must stand wherever a thread can meet what another
one has not finished. What each op reads and writes stands here a second time, apart from the builders.
"""

from dataclasses import replace

import pytest

from strata_jit import models
from strata_jit.gguf.reader import open_gguf
from strata_jit.kernels.registry import OPS
from strata_jit.models.language_model import StepLimits

FAMILIES = [
    "deepseek2", "glm4moe", "gpt-oss", "granitemoe", "llama", "olmoe", "qwen2moe", "qwen35moe", "qwen3moe",
    "qwen3next", "qwen4exp", "qwen4exp-qsa",
]  # fmt: skip

# "mode field", mode: r read, w written, by any thread; R, W: by the thread that has the row, one of the team
# in turn. #kv, #index, #state, #ring: memory of a layer, or of the row in the n-gram ring. Thread scratch is
# not shared. One row, then many.
ACCESS = {
    "rope_angles": ("w angles", "w angles"),
    "norm_quant": ("r x", "R x, W act_shared"),
    "linear": ("", "r act_shared"),
    "linear_rows": ("", "r act_shared"),
    "glu_quant": ("r h", "R h, W act_shared"),
    "attn_prepare": ("", "w qkv, r angles, w #kv"),
    "attention": ("r qkv, r angles, w #kv, w partial", "r qkv, r #kv, r mask, w partial"),
    "attn_merge": ("r partial, r gate", "r partial, r gate, r mask, W act_shared"),
    "attn_merge_heads": ("r partial, w act_shared", "r partial, w act_shared"),
    "mla_prepare": (*["r q, r kv, r angles, w queries, w act_shared, w #kv"] * 2,),
    "head_linear": (*["r act_shared, w out"] * 2,),
    "delta_conv": ("", "w proj, w history, w gates"),
    "delta_net": ("r proj, w history, w #state, w out", "r proj, r gates, w #state, w out"),
    "delta_norm": ("r out", "R out, W act_shared"),
    "route": ("r logits", "R logits, W ids, W weights"),
    "route_tail": ("", "w ids"),
    "moe_gate_up": ("w ff", "r act_shared, r ids, w ff"),
    "ff_quant": ("r ff", "r ff, r ids, w act_shared"),
    "moe_down": ("w x", "r act_shared, r ids, w d"),
    "moe_combine": ("", "r d, r ids, r weights, w x"),
    "hc_combine": ("r block, r inject", "R block, R inject, W streams"),
    "hc_norm": ("", "R streams, W act_shared"),
    "hc_low": ("r low", "R low, W act_shared"),
    "hc_mix": ("r gate", "R xn_shared, R gate, W act_shared"),
    "ngram_gate": ("r key_value, w #ring", "R key_value, W streams, W #ring"),
    "ngram_conv": ("", "r #ring, W streams"),
    "index_prepare": ("", "w index_qk, r angles, w #index"),
    "index_score": ("r index_qk, r angles, w #index, w scores", "r index_qk, r #index, w scores"),
    "index_select": ("r scores", "r scores, W mask"),
}
PLACES = {"#kv": "layer_off", "#index": "layer_off", "#state": "state_off", "history": "history_off"}


def accesses(op, is_many):
    """(memory, whether it is written, who: None for any thread) of one op."""
    spec = OPS[op.name]
    if (spec.many if is_many else spec.one) is None:
        return
    values = dict(zip(spec.fields, (value for _, value in op.args), strict=False))
    for access in filter(None, ACCESS[op.name][is_many].split(", ")):
        mode, field = access.split()
        unused = (field == "mask" and values["ratio"] == 0) or values.get(f"{field}_off", 0) == -1
        if not unused:
            memory = field if field.startswith("#") else values[field]
            turn = op.count if mode.isupper() else None
            yield (memory, values[PLACES[field]] if field in PLACES else None), mode in "wW", turn
    rest = [value for _, value in op.args[len(spec.fields) :]]
    for i in range(0, len(rest), len(spec.repeat) or 1):
        yield (dict(zip(spec.repeat, rest[i:], strict=False))["out"], None), True, None


def races(program, is_many):
    """Pairs of labels of ops that may meet in some memory, in a row of steps."""
    found, since_barrier = set(), []
    for op in program.ops * 2:
        new = [(op, *access) for access in accesses(op, is_many)]
        for other, memory, written, turn in since_barrier:
            for _, same, also_written, other_turn in new:
                if memory == same and (written or also_written) and (turn is None or turn != other_turn):
                    found.add((other.label, op.label))
        since_barrier += new
        if op.barrier_many if is_many else op.barrier_one:
            since_barrier = []
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def program(request, request_golden):
    file = open_gguf(request_golden(request.param) / "model.gguf")
    return models.build(file, StepLimits(max_rows=4, n_ctx=64, route_tail_skip=1)).program


@pytest.mark.parametrize("is_many", [False, True])
def test_no_op_meets_another(program, is_many):
    assert races(program, is_many) == set()


NOT_NEEDED = ("rope_angles", "linear_rows")
"""Ops after which another barrier comes in time."""


@pytest.mark.parametrize("is_many", [False, True])
def test_every_other_barrier_is_needed(program, is_many):
    """Else the table above would not see what it must."""
    for i, op in enumerate(program.ops[:-1]):  # the last one is for the host
        ops = list(program.ops)
        ops[i] = replace(op, barrier_one=False, barrier_many=False)
        is_barrier = op.barrier_many if is_many else op.barrier_one
        # the matrices of an n-gram embedding do not read what the last layer has left
        is_before_ngrams = any(next_op.label.endswith("ple_quantise") for next_op in ops[i + 1 : i + 3])
        if is_barrier and op.name not in NOT_NEEDED and not is_before_ngrams:
            assert races(replace(program, ops=tuple(ops)), is_many), op.label
