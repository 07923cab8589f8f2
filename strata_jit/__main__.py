"""The program's entry, as `strata-jit` and as `python -m strata_jit`.

Owns what may happen before the command line is there: an interrupt while it is imported.
"""

from __future__ import annotations

import sys

_EXIT_INTERRUPTED = 130


def run() -> None:
    """Run the command line and exit the process."""
    try:
        from strata_jit.cli import main

        main(prog_name="strata-jit")
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


if __name__ == "__main__":
    run()
