"""One MLflow database for all tests of this folder, as it takes seconds to make; each test is a project."""

from pathlib import Path

import pytest

from tasks.tracking import Tracker


@pytest.fixture(scope="session")
def mlflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a home, with #ümlaut")


@pytest.fixture
def tracker(mlflow_home: Path, request: pytest.FixtureRequest) -> Tracker:
    return Tracker(mlflow_home, request.node.name)
