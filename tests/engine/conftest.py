"""Golden models: those that the project carries, the others from `--golden DIR`."""

from pathlib import Path

import pytest

OWN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(scope="session")
def request_golden(request):
    """Function from a golden model's name to its folder; skips where there is none."""

    def find(name):
        directory = request.config.getoption("--golden", default=None)
        for base in (OWN, directory):
            if base is not None and (Path(base) / name).is_dir():
                return Path(base) / name
        return pytest.skip(f"golden model {name} is not part of the project: give --golden DIR")

    return find
