"""Options that point tests at data and tools outside the repository, and the data within it.

Without an option, the tests that would use what it names are skipped, saying so.
"""

from __future__ import annotations

import signal
from pathlib import Path

import hypothesis
import pytest

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("strata", deadline=None)
hypothesis.settings.load_profile("strata")

# A shell that runs the tests in the background has SIGINT ignored, and so would every process started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).parent / "data"
DIRECTORIES = {
    "golden": "reference values of engines, one directory a model",
    "tokenizers": "vocabularies with strings and their ids (*.gguf, *.inp, *.out)",
    "templates": "chat templates with conversations and what they render (*.jinja, *.json)",
    "models": "model files",
    "topologies": "recorded machines with what hwloc reads of them (*.tar.bz2, *.console, *.xml)",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, what in DIRECTORIES.items():
        parser.addoption(f"--{name}", metavar="DIR", type=Path, help=f"directory of {what}")
    parser.addoption(
        "--rig", metavar="PATH", type=Path, help="numa-vm, which boots guests with several nodes"
    )


def directory(request: pytest.FixtureRequest, name: str) -> Path:
    path: Path | None = request.config.getoption(f"--{name}")
    if path is None:
        pytest.skip(f"no --{name} DIR given")
    if not path.is_dir():
        pytest.fail(f"--{name} {path}: no such directory")
    return path


@pytest.fixture
def data_dir() -> Path:
    return DATA


@pytest.fixture
def golden_dir(request: pytest.FixtureRequest) -> Path:
    return directory(request, "golden")


@pytest.fixture
def tokenizers_dir(request: pytest.FixtureRequest) -> Path:
    return directory(request, "tokenizers")


@pytest.fixture
def templates_dir(request: pytest.FixtureRequest) -> Path:
    return directory(request, "templates")


@pytest.fixture
def models_dir(request: pytest.FixtureRequest) -> Path:
    return directory(request, "models")


@pytest.fixture
def topologies_dir(request: pytest.FixtureRequest) -> Path:
    return directory(request, "topologies")


@pytest.fixture(scope="session")
def rig_path(request: pytest.FixtureRequest) -> Path:
    path: Path | None = request.config.getoption("--rig")
    if path is None:
        pytest.skip("no --rig PATH given")
    if not path.is_file():
        pytest.fail(f"--rig {path}: no such file")
    return path.absolute()
