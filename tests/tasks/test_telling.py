"""MLflow locked, away or gone: stages go on, and what it lacked arrives later with its own times."""

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.records import Completion, StopReason
from rlhf_core.sources import write_rows
from rlhf_core.stages.pairing import Pairing
from rlhf_core.stages.promotion import Decision
from tasks.context import Round, RoundEnded, _do
from tasks.decisions import conclude
from tasks.journal import Measured
from tasks.mlflow_store import TrackingUnavailable
from tasks.project import Project
from tasks.telling import STAGE_SECONDS, Told
from tests.tasks.conftest import Told as Display
from tests.tasks.conftest import files, home_with, project_in, round_of


@contextmanager
def locked(project: Project) -> Iterator[None]:
    """Another program holds MLflow's database for itself."""
    with closing(sqlite3.connect(project.tracker.store.folder / "mlflow.db")) as database:
        database.execute("begin exclusive")
        yield
        database.rollback()


@contextmanager
def away(project: Project) -> Iterator[None]:
    """A folder is where MLflow's database was."""
    database = project.tracker.store.folder / "mlflow.db"
    database.rename(database.with_suffix(".away"))
    database.mkdir()
    yield
    database.rmdir()
    database.with_suffix(".away").rename(database)


def pair(round: Round, *texts: str) -> object:
    """Runs the pairing of one prompt's completions."""
    rows = [
        Completion(
            id=f"p/{k}", prompt_id="p", prompt_text="?", prompt_ids=[1], response_ids=[2], text=text,
            stop=StopReason.LENGTH,
        )
        for k, text in enumerate(texts)
    ]  # fmt: skip
    with round.project.store.writing() as folder:
        write_rows(rows, folder / "completions.parquet")
        ref = round.project.store.commit(folder, "completions", "by hand")
    return _do(round, "pairing", "pairing", Pairing(), {"completions": ref}, 3)


def shown(project: Project) -> dict[str, tuple[Any, ...]]:
    """What MLflow shows of each run: times, status, tags that do not name runs, every point, inputs."""
    client = project.tracker.client
    found: dict[str, tuple[Any, ...]] = {}
    for run in client.search_runs([project.tracker.experiment_id]):
        points = {
            name: sorted(
                (p.timestamp, p.step, p.value) for p in client.get_metric_history(run.info.run_id, name)
            )
            for name in run.data.metrics
        }
        tags = {name: value for name, value in run.data.tags.items() if name != "mlflow.parentRunId"}
        inputs = sorted((given.dataset.name, given.dataset.digest) for given in run.inputs.dataset_inputs)
        info = run.info
        found[info.run_name] = (info.start_time, info.end_time, info.status, tags, points, inputs)
    return found


def alarms(project: Project) -> list[str]:
    assert isinstance(project.display, Display)
    return [line[2] for line in project.display.lines if line[:2] == ("alarm", "MLflow")]


def test_a_stage_goes_on_while_the_database_is_locked_and_is_told_later(lone_project: Project) -> None:
    project = lone_project
    round = round_of(project, 1)
    with locked(project):
        started = time.monotonic()
        assert isinstance(pair(round, "a", "b", "c"), dict)
        first = time.monotonic()
        assert isinstance(pair(round_of(project, 2), "a", "b", "d"), dict)
        # It is waited for once: then it is known to be behind.
        assert first - started < STAGE_SECONDS + 2 and time.monotonic() - first < 2
        record = project.ledger.stage(1, "pairing")
        assert record is not None and record.mlflow_run_id == ""
    assert len(alarms(project)) == 1 and "told later" in alarms(project)[0]
    assert project.teller.settle(30, patient=True)
    told = shown(project)["pairing"]
    assert told[2] == "FINISHED" and told[4]["preference/comparisons"][0][2] == 3
    run_id = project.run_id(1, "pairing")
    assert project.tracker.client.get_run(run_id).info.status == "FINISHED"
    assert project.teller.tell() == Told(0, 0)


def test_a_run_told_late_shows_what_one_told_at_once_shows(
    lone_project: Project, empty_database: Path, tmp_path: Path
) -> None:
    project = lone_project
    with away(project):
        round = round_of(project, 1)
        pair(round, "a", "b", "c")
        project.journals.round(1).close("FINISHED")
        with pytest.raises(TrackingUnavailable):
            project.teller.tell()
    assert project.teller.tell().runs == 2
    # The same journals, told one fact at a time as they come.
    other = project_in(home_with(empty_database, tmp_path / "other"), "demo")
    for journal in project.journals.all():
        copy = other.journals.folder / journal.path.relative_to(project.journals.folder)
        copy.parent.mkdir(exist_ok=True, parents=True)
        for line in journal.path.read_bytes().splitlines(keepends=True):
            with copy.open("ab") as file:
                file.write(line)
            other.teller.tell()
    other.teller.stop()
    assert shown(project) == shown(other)
    journal = project.journals.round(1)
    assert journal.closed is not None
    start, end, *_ = shown(project)["round-0001"]
    assert (start, end) == (journal.opened.t, journal.closed.t)


def test_an_empty_database_is_told_everything_again_once(
    lone_project: Project, empty_database: Path, tmp_path: Path
) -> None:
    project = lone_project
    round = round_of(project, 1)
    pair(round, "a", "b", "c")
    project.journals.round(1).add(Measured(t=1000, step=0, metrics={"eval/x": 0.5}))
    project.journals.round(1).close("FINISHED")
    assert project.teller.settle()
    fresh = home_with(empty_database, tmp_path / "fresh")
    for folder in ("projects", "store", "work"):
        shutil.copytree(project.home / folder, fresh / folder)
    again = Project(fresh, project.name, project.execution, project.display)
    assert again.teller.tell().runs == 2
    assert again.teller.tell() == Told(0, 0)
    again.teller.stop()
    assert shown(again) == shown(project)
    assert again.run_id(1) != project.run_id(1) != ""


def test_promotion_alone_waits_for_mlflow_and_the_round_stays_open(lone_project: Project) -> None:
    project = lone_project
    project.execution = project.execution.model_copy(update={"tracking_seconds": 0.5})
    round, candidate = round_of(project, 1), files(project, "policy", "better")
    with away(project):
        with pytest.raises(RoundEnded, match="not decided") as ended:
            conclude(round, candidate, Decision(promoted=True, gates=[]))
        assert ended.value.outcome == "TrackingBehind"
        assert project.ledger.decision(1) is None
    with pytest.raises(RoundEnded) as ended:
        conclude(round, candidate, Decision(promoted=True, gates=[]))
    assert ended.value.outcome == "Promoted"
    assert project.ledger.champion() == candidate


def test_a_database_deleted_under_a_command_is_not_written_to(lone_project: Project) -> None:
    project = lone_project
    round_of(project, 1)
    (project.tracker.store.folder / "mlflow.db").unlink()
    with pytest.raises(TrackingUnavailable, match="deleted while it was in use"):
        project.teller.tell()
    assert not (project.tracker.store.folder / "mlflow.db").exists()


def test_a_stage_whose_process_was_killed_after_its_result_is_told_to_its_end(lone_project: Project) -> None:
    project = lone_project
    round = round_of(project, 1)
    pair(round, "a", "b", "c")
    (journal,) = (journal for journal in project.journals.all() if journal.opened.name == "pairing")
    facts = [fact for fact, _ in journal.facts()]
    # As after a kill between the stage's result and what MLflow is told of it.
    journal.path.write_bytes(b"".join(fact.model_dump_json().encode() + b"\n" for fact in facts[:1]))
    (project.ledger.root / "0001" / "pairing.json").unlink()
    assert project.begin_telling() == ["round-0001", "pairing"]
    pair(round, "a", "b", "c")
    assert journal.closed is not None and journal.closed.status == "FINISHED"
    assert [fact for fact, _ in journal.facts() if isinstance(fact, Measured)] == [
        fact for fact in facts if isinstance(fact, Measured)
    ]
