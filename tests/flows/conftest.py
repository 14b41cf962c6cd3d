"""One home with two tiny rounds, played once for all tests that look at it; none of them may change it."""

from pathlib import Path
from typing import Any

import pytest

from tests.flows.tiny import play


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def first(home: Path) -> dict[str, Any]:
    return play(home)
