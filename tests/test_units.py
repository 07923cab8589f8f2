from __future__ import annotations

import pytest

from strata_jit.units import format_bytes, format_rate, format_seconds, format_tok_per_s


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (3072, "3.0 KiB"),
        (91_729_728, "87.5 MiB"),
        (2**30, "1.00 GiB"),
        (18_521_999_999, "17.25 GiB"),
        (-(2**31), "-2.00 GiB"),
    ],
)
def test_format_bytes(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text


def test_format_rate() -> None:
    assert format_rate(12_340_000_000) == "12.34 GB/s"
    assert format_tok_per_s(45.24) == "45.2 tok/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000125, "12.5 us"),
        (0.85, "850 ms"),
        (9.414, "9.41 s"),
        (59.999, "60.00 s"),
        (60, "1 min 00 s"),
        (125.2, "2 min 05 s"),
        (3600 + 125, "1 h 02 min"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
