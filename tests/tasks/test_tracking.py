"""What reaches MLflow, what does not, and that telling it twice changes nothing."""

import hashlib
import itertools
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tasks.journal import Closed, Fact, Measured, Opened, Parameters, Read, Stored, Wrote
from tasks.mlflow_store import TrackingUnavailable
from tasks.tracking import Tracker

START = 1_700_000_000_000


def open_run(tracker: Tracker, name: str = "round-0007", parent: str | None = None) -> str:
    return tracker.make_run(Opened(t=START, id=f"journal of {name}", name=name, tags={"a": "b"}), parent)


def send(tracker: Tracker, run_id: str, *facts: Fact) -> tuple[int, int]:
    """Facts as if each were ten bytes of a journal."""
    return tracker.send(run_id, zip(facts, itertools.count(10, 10)), 0)


def measured(milliseconds: int, step: int, **metrics: float) -> Measured:
    return Measured(t=milliseconds, step=step, metrics=metrics)


def points(tracker: Tracker, run_id: str, name: str) -> list[tuple[int, int, float]]:
    return sorted((p.timestamp, p.step, p.value) for p in tracker.client.get_metric_history(run_id, name))


def test_numbers_told_twice_are_stored_once(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    facts = measured(1000, 0, loss=2.0, kl=0.0), measured(1500, 1, loss=2.0), measured(1500, 1, loss=1.0)
    for _ in range(2):
        assert send(tracker, run_id, *facts) == (3, 30)
        assert points(tracker, run_id, "loss") == [(1000, 0, 2.0), (1500, 1, 1.0), (1500, 1, 2.0)]
        assert points(tracker, run_id, "kl") == [(1000, 0, 0.0)]


def test_more_points_than_mlflow_takes_at_once_all_arrive(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    # 2 lines of 600 make one group of 1200; MLflow refuses more than 1000.
    many = {f"m/{number}": float(number) for number in range(600)}
    send(tracker, run_id, measured(1000, 0, **many), measured(2000, 1, **many))
    assert tracker.client.get_run(run_id).data.metrics == many
    assert points(tracker, run_id, "m/599") == [(1000, 0, 599.0), (2000, 1, 599.0)]


def test_numbers_that_are_not_finite_are_told_but_never_sent(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    facts = measured(1000, 0, kl=float("nan"), loss=1.0), measured(2000, 1, kl=float("inf"), loss=0.5)
    for _ in range(2):
        send(tracker, run_id, *facts)
    assert tracker.client.get_run(run_id).data.metrics.keys() == {"kl_nonfinite", "loss"}
    assert points(tracker, run_id, "kl_nonfinite") == [(1000, 0, 1.0), (2000, 1, 1.0)]


def test_a_database_that_fails_is_told_and_loses_nothing(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    with sqlite3.connect(tracker.store.folder / "mlflow.db") as database:
        database.execute("alter table metrics rename to metrics_away")
    try:
        with pytest.raises(TrackingUnavailable, match="no such table: metrics"):
            send(tracker, run_id, measured(1000, 0, loss=2.0))
    finally:
        with database:
            database.execute("alter table metrics_away rename to metrics")
        database.close()
    send(tracker, run_id, measured(1000, 0, loss=2.0))
    assert points(tracker, run_id, "loss") == [(1000, 0, 2.0)]


def test_a_run_begins_and_ends_when_its_journal_says(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    send(tracker, run_id, Closed(t=START + 5000, status="FAILED"))
    info = tracker.client.get_run(run_id).info
    assert (info.start_time, info.end_time, info.status) == (START, START + 5000, "FAILED")


def test_mlflow_itself_says_how_far_each_run_was_told(tracker: Tracker) -> None:
    parent = open_run(tracker)
    stage = open_run(tracker, "rollouts", parent)
    send(tracker, stage, measured(1000, 0, loss=2.0), measured(2000, 0, loss=2.0))
    assert tracker.runs() == {"journal of round-0007": (parent, 0), "journal of rollouts": (stage, 20)}


def test_a_stage_is_a_child_of_its_round_whatever_run_the_environment_names(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = open_run(tracker)
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    stage = open_run(tracker, "rollouts", parent)
    (child,) = tracker.client.search_runs([tracker.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert (child.info.run_id, child.info.run_name, child.data.tags["a"]) == (stage, "rollouts", "b")
    assert stage != parent


def test_a_value_too_long_for_a_parameter_says_where_all_of_it_is(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    send(tracker, run_id, Parameters(t=START, parameters={"prompt": "x" * 6001, "fits": "y" * 6000}))
    stored = tracker.client.get_run(run_id).data.params
    assert len(stored["prompt"]) == 6000
    assert stored["prompt"].endswith("x... (6001 characters, all of them in settings.yaml)")
    assert stored["fits"] == "y" * 6000


def test_a_dataset_keeps_its_whole_digest(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    digest = hashlib.sha256(b"rows").hexdigest()
    for _ in range(2):
        send(tracker, run_id, Read(t=START, role="labels", kind="preferences", digest=digest, rows=12))
    (given,) = tracker.client.get_run(run_id).inputs.dataset_inputs
    assert digest.startswith(given.dataset.digest)
    assert {tag.key: tag.value for tag in given.tags} == {
        "mlflow.data.context": "labels",
        "rlhf.dataset.sha256": digest,
    }
    assert json.loads(given.dataset.profile) == {"num_rows": 12}


def test_folders_and_texts_become_artifacts(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    plots = tracker.store.folder.parent / tracker.project / "plots"
    plots.mkdir(parents=True)
    (plots / "kl.svg").write_text("<svg/>")
    stored = Stored(t=START, path=f"{tracker.project}/plots", folder="report/plots")
    send(tracker, run_id, stored, Wrote(t=START, name="settings.yaml", text="a: 1\n"))
    (kl,) = tracker.client.list_artifacts(run_id, "report/plots")
    assert kl.path == "report/plots/kl.svg"
    assert Path(tracker.client.download_artifacts(run_id, "settings.yaml")).read_text() == "a: 1\n"
    # A report that was cleared away holds nothing up.
    shutil.rmtree(plots)
    assert send(tracker, run_id, stored) == (1, 10)


def test_an_experiment_deleted_in_the_ui_comes_back(tracker: Tracker) -> None:
    run_id = open_run(tracker)
    tracker.client.delete_experiment(tracker.experiment_id)
    again = Tracker(tracker.store.folder.parent, tracker.project)
    assert again.runs() == {"journal of round-0007": (run_id, 0)}


def test_a_home_that_was_moved_is_refused(tracker: Tracker, tmp_path: Path) -> None:
    tracker.open()
    shutil.copytree(tracker.store.folder, tmp_path / "moved" / "mlflow")
    with pytest.raises(ValueError, match="the home was moved"):
        Tracker(tmp_path / "moved", tracker.project).open()


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "it's", "-a"])
def test_a_project_name_that_cannot_name_a_model_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot name a model"):
        Tracker(tmp_path, name)
