"""Numbers as people read them: sizes in MiB and GiB, rates in GB/s and tok/s, times in seconds.

Owns the wording of quantities, so that tables, messages and progress agree; knows not what they measure.
Sizes are binary (1 GiB = 2**30 bytes), rates decimal (1 GB/s = 10**9 bytes per second).
"""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def format_bytes(n_bytes: float) -> str:
    """A size: "17.25 GiB", "87.5 MiB", "3.0 KiB", "12 B"."""
    size = abs(n_bytes)
    if size >= GIB:
        return f"{n_bytes / GIB:.2f} GiB"
    if size >= MIB:
        return f"{n_bytes / MIB:.1f} MiB"
    if size >= KIB:
        return f"{n_bytes / KIB:.1f} KiB"
    return f"{n_bytes:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """A rate of bytes: "12.34 GB/s"."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def format_tok_per_s(tok_per_s: float) -> str:
    """A rate of tokens: "45.2 tok/s"."""
    return f"{tok_per_s:.1f} tok/s"


def format_seconds(seconds: float) -> str:
    """A duration: "12.5 us", "850 ms", "9.41 s", "2 min 05 s", "1 h 02 min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
