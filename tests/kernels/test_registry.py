"""The table of ops: every function exists, every name is unique."""

import importlib

import pytest

from strata_jit.kernels._jit import Op
from strata_jit.kernels.registry import OPS, OpDef, arg_index, repeat_index


@pytest.mark.parametrize("name", OPS)
def test_op_functions_exist(name):
    """Resolving compiles nothing."""
    functions = {f for f in (OPS[name].one, OPS[name].many) if f is not None}
    assert functions
    for function in functions:
        module, _, attribute = function.partition(":")
        assert isinstance(getattr(importlib.import_module(module), attribute), Op)


@pytest.mark.parametrize("name", OPS)
def test_op_arguments(name):
    op = OPS[name]
    assert len(set(op.fields)) == len(op.fields) == len(op.field_kinds)
    assert len(set(op.repeat)) == len(op.repeat) == len(op.repeat_kinds)
    assert {*op.field_kinds, *op.repeat_kinds} <= {"b", "t", "t?", "s", "i", "f"}
    assert arg_index(name)._asdict() == {field: i for i, field in enumerate(op.fields)}
    assert repeat_index(name)._asdict() == {field: i for i, field in enumerate(op.repeat)}


@pytest.mark.parametrize("name", OPS)
def test_op_with_an_empty_form_meets_nobody_there(name):
    op = OPS[name]
    assert op.one is not None or not op.barrier_one
    assert op.many is not None or not op.barrier_many


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "off_f32" in op.fields])
def test_act_arguments_are_in_the_order_that_kernels_rely_on(name):
    fields = OPS[name].fields
    first = fields.index("act_scratch")
    act = ("act_scratch", "act_shared", "act_stride", "off_f32", "off_q256", "off_q32")
    assert fields[first : first + 6] == act


def test_attention_begins_with_the_arguments_of_attn_prepare():
    fields = OPS["attn_prepare"].fields
    assert OPS["attention"].fields[: len(fields)] == fields


def test_index_score_begins_with_the_arguments_of_index_prepare():
    fields = OPS["index_prepare"].fields
    assert OPS["index_score"].fields[: len(fields)] == fields


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "streams" in op.fields])
def test_stream_arguments_are_in_the_order_that_kernels_rely_on(name):
    fields = OPS[name].fields
    first = fields.index("streams_scratch")
    assert fields[first : first + 3] == ("streams_scratch", "streams", "streams_stride")


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "mask" in op.fields])
def test_select_arguments_are_in_the_order_that_kernels_rely_on(name):
    fields = OPS[name].fields
    first = fields.index("mask_scratch")
    assert fields[first : first + 4] == ("mask_scratch", "mask", "mask_stride", "ratio")


def test_op_def_rejects_an_unknown_kind():
    with pytest.raises(ValueError, match="op x: kind 'y'"):
        OpDef("x", None, None, False, False, "y", (), ())
