"""What people and programs see: text, progress, tables, JSON. The only use of rich.

The names of a run are here; those of other commands are in modules of their own.
"""

from strata_jit.report.run import (
    JSON_KEYS,
    LoadProgress,
    OutputClosed,
    TextOutput,
    json_document,
    kernel_listing,
    print_message,
    print_messages,
    print_skipped,
    print_summary,
    print_timing,
    print_warnings,
)

__all__ = [
    "JSON_KEYS",
    "LoadProgress",
    "OutputClosed",
    "TextOutput",
    "json_document",
    "kernel_listing",
    "print_message",
    "print_messages",
    "print_skipped",
    "print_summary",
    "print_timing",
    "print_warnings",
]
