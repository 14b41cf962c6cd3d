"""One MLflow database for all tests of this folder, as it takes seconds to make; each test is a project."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlhf_core.artifacts import ArtifactRef
from rlhf_core.ledger import ProjectRecord, RoundRecord
from rlhf_core.settings import Execution
from tasks.context import Round
from tasks.mlflow_store import MlflowStore
from tasks.project import Project
from tasks.tracking import Tracker


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database before any project."""
    home = tmp_path_factory.mktemp("template")
    _ = MlflowStore(home).client
    return home / "mlflow" / "mlflow.db"


def home_with(database: Path, home: Path) -> Path:
    """A home with a copy of this database."""
    (home / "mlflow").mkdir(parents=True)
    shutil.copy(database, home / "mlflow" / "mlflow.db")
    return home


@pytest.fixture(scope="session")
def mlflow_home(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    return home_with(empty_database, tmp_path_factory.mktemp("homes") / "a home, with #ümlaut")


@pytest.fixture
def tracker(mlflow_home: Path, request: pytest.FixtureRequest) -> Tracker:
    return Tracker(mlflow_home, request.node.name)


@dataclass
class Told:
    """A display that keeps what it is told."""

    lines: list[tuple[str, ...]] = field(default_factory=list)

    def started(self, name: str) -> None:
        self.lines.append(("started", name))

    def progress(self, name: str, done: int, total: int, text: str) -> None:
        self.lines.append(("progress", name, f"{done}/{total}"))

    def finished(self, name: str, seconds: float, cached: bool) -> None:
        self.lines.append(("finished", name, "cached" if cached else "computed"))

    def alarm(self, name: str, sentence: str) -> None:
        self.lines.append(("alarm", name, sentence))


@pytest.fixture
def project(mlflow_home: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    """A project whose trunk and first policy are files made by hand."""
    project = project_in(mlflow_home, request.node.name[:60])
    yield project
    project.teller.stop()


@pytest.fixture
def lone_project(empty_database: Path, tmp_path: Path) -> Iterator[Project]:
    """A project in a home of its own, whose MLflow a test may break."""
    project = project_in(home_with(empty_database, tmp_path / "home"), "demo")
    yield project
    project.teller.stop()


def project_in(home: Path, name: str) -> Project:
    """A new project whose trunk and first policy are files made by hand."""
    project = Project(home, name, Execution(device="cpu"), Told())
    project.ledger.open_project(
        ProjectRecord(
            name=project.name,
            settings={},
            base="none",
            inputs={"trunk": files(project, "trunk", "base"), "policy": files(project, "policy", "initial")},
        )
    )
    return project


def files(project: Project, kind: str, content: str) -> ArtifactRef:
    """An artifact of one small file."""
    with project.store.writing() as folder:
        (folder / "adapter.safetensors").write_text(f"{project.name} {content}")
        return project.store.commit(folder, kind, f"key of {content}")


def round_of(project: Project, number: int) -> Round:
    """A round opened on the champion."""
    journal = project.journals.begin_round(number)
    project.teller.settle()
    record = project.ledger.open_round(
        RoundRecord(
            round=number,
            settings={},
            seed=5,
            champion=project.ledger.champion(),
            source=files(project, "prompt_source", "prompts"),
            mlflow_run_id=journal.run_id,
            prefect_flow_run_id="",
        )
    )
    return Round(project, record)


@pytest.fixture
def open_round(project: Project) -> Callable[[int], Round]:
    """Opens a round on the champion."""
    return lambda number: round_of(project, number)
