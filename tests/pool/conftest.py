"""Makes `ops_for_tests` and `programs` importable, here and (through sys.path) in node processes."""

import sys
from pathlib import Path

import numpy as np
import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def rng():
    """Seeded random numbers."""
    return np.random.default_rng(20)
