"""Lists and masks of CPUs: examples, round trips, and junk of every kind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_jit.errors import TopologyError
from strata_jit.topology.cpulist import MAX_NUMBER, format_cpulist, parse_cpulist, parse_cpumask

NUMBERS = st.frozensets(st.integers(0, 5000), max_size=200)
JUNK = st.text(alphabet="0123456789abcdefx,-:/ \n\0", max_size=40) | st.text(max_size=20)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", {0, 1, 2, 3, 8}),
        ("", set()),
        ("5\n", {5}),
        ("0-10:4", {0, 4, 8}),
        ("0-9:2/5", {0, 1, 5, 6}),
        ("1,1-2", {1, 2}),
        (" 0-1, 3 ", {0, 1, 3}),
        ("0,64,1500", {0, 64, 1500}),
    ],
)
def test_parse_cpulist(text, cpus):
    assert parse_cpulist(text) == cpus


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "1-",
        "-1",
        "1--2",
        "0x3",
        "1;2",
        "3-1",
        "0-99999999999",
        f"{MAX_NUMBER + 1}",
        "0-9:5/2",
        "٣",
        "(null)",
    ],
)
def test_parse_cpulist_raises_on_junk(text):
    with pytest.raises(TopologyError, match="CPU list"):
        parse_cpulist(text)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("3", {0, 1}),
        ("00000001,80000000", {31, 32}),
        ("0000,00000000,00000008", {3}),
        ("0x1,0x0", {32}),
        ("1,1", {0, 32}),  # words are padded
        ("100000000000000000", {68}),
        ("0", set()),
    ],
)
def test_parse_cpumask(text, cpus):
    assert parse_cpumask(text) == cpus


@pytest.mark.parametrize("text", ["", "g", "1,", ",1", "123456789,0", "0x", "-1", "1 2", "f" * 300_000])
def test_parse_cpumask_raises_on_junk(text):
    with pytest.raises(TopologyError, match="CPU mask"):
        parse_cpumask(text)


@given(NUMBERS)
def test_lists_go_round(numbers):
    text = format_cpulist(numbers)
    assert parse_cpulist(text) == numbers
    assert text.count(",") == max(0, sum(n - 1 not in numbers for n in numbers) - 1)


@given(NUMBERS)
def test_masks_go_round(numbers):
    bits = sum(1 << n for n in numbers)
    words = [f"{bits >> 32 * i & 0xFFFFFFFF:08x}" for i in range(bits.bit_length() // 32 + 1)]
    assert parse_cpumask(",".join(reversed(words))) == numbers
    assert parse_cpumask(f"{bits:x}") == numbers


@given(JUNK)
def test_junk_gives_numbers_or_a_topology_error(text):
    for parse in (parse_cpulist, parse_cpumask):
        try:
            found = parse(text)
        except TopologyError as fault:
            assert len(str(fault)) < 300
            assert str(fault).isprintable()
        else:
            assert all(0 <= number <= MAX_NUMBER for number in found)


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((2, 1, 0, 5, 7, 8), "0-2,5,7-8")])
def test_format_cpulist(numbers, text):
    assert format_cpulist(numbers) == text
