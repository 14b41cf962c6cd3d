"""One MLflow database for all tests of this folder, as it takes seconds to make; each test is a project."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlhf_core.artifacts import ArtifactRef
from rlhf_core.ledger import ProjectRecord, RoundRecord
from rlhf_core.settings import Execution
from tasks.context import Round
from tasks.project import Project
from tasks.tracking import Tracker


@pytest.fixture(scope="session")
def mlflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a home, with #ümlaut")


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
def project(mlflow_home: Path, request: pytest.FixtureRequest) -> Project:
    """A project whose trunk and first policy are files made by hand."""
    project = Project(mlflow_home, request.node.name[:60], Execution(device="cpu"), Told())
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


@pytest.fixture
def open_round(project: Project) -> Callable[[int], Round]:
    """Opens a round on the champion."""

    def open(number: int) -> Round:
        run_id = project.tracker.open_round(number, settings_yaml="", parameters={}, tags={})
        record = project.ledger.open_round(
            RoundRecord(
                round=number,
                settings={},
                seed=5,
                champion=project.ledger.champion(),
                source=files(project, "prompt_source", "prompts"),
                mlflow_run_id=run_id,
                prefect_flow_run_id="",
            )
        )
        return Round(project, record)

    return open
