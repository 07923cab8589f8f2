"""The program's entry, as `strata-jit` and as `python -m strata_jit`.

Owns what may happen before the command line is there, and how the process meets signals.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_EXIT_INTERRUPTED = 130


def run() -> None:
    """Run the command line and exit the process."""
    try:
        _open_standard_descriptors()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        from strata_jit.cli import main

        main(prog_name="strata-jit")
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def _open_standard_descriptors() -> None:
    """Give closed descriptors 0 to 2 to /dev/null: else our own files get them, and children lose those."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind, so that node processes and temporary files go as they do after an interrupt."""
    sys.exit(128 + number)


if __name__ == "__main__":
    run()
