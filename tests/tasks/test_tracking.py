"""What reaches MLflow, what does not, and that telling it twice changes nothing."""

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tasks.mlflow_store import TrackingUnavailable
from tasks.tracking import Tracker


def open_round(tracker: Tracker, round: int = 7, settings: str = "a: 1\n", **parameters: str) -> str:
    return tracker.open_round(
        round, settings_yaml=settings, parameters=parameters, tags={"prefect.flow_run_id": "f"}
    )


def spool_line(milliseconds: int, step: int, **metrics: float) -> str:
    return json.dumps({"t": milliseconds, "step": step, "metrics": metrics}) + "\n"


def points(tracker: Tracker, run_id: str, name: str) -> list[tuple[int, int, float]]:
    return [(p.timestamp, p.step, p.value) for p in tracker.client.get_metric_history(run_id, name)]


def test_forwarding_a_spool_twice_stores_each_point_once(tracker: Tracker, tmp_path: Path) -> None:
    run_id = open_round(tracker)
    spool = tmp_path / "metrics.jsonl"
    spool.write_text(
        spool_line(1000, 0, loss=2.0, kl=0.0) + spool_line(1500, 1, loss=2.0) + spool_line(1500, 1, loss=1.0)
    )
    expected = [(1000, 0, 2.0), (1500, 1, 1.0), (1500, 1, 2.0)]

    assert tracker.forward(run_id, spool) == spool.stat().st_size
    assert sorted(points(tracker, run_id, "loss")) == expected
    assert tracker.forward(run_id, spool) == spool.stat().st_size
    assert sorted(points(tracker, run_id, "loss")) == expected
    assert points(tracker, run_id, "kl") == [(1000, 0, 0.0)]


def test_a_torn_last_line_waits_until_it_is_whole(tracker: Tracker, tmp_path: Path) -> None:
    run_id = open_round(tracker)
    spool = tmp_path / "metrics.jsonl"
    first, second = spool_line(1000, 0, loss=2.0), spool_line(2000, 1, loss=1.0)
    spool.write_text(first + second[:-1])

    offset = tracker.forward(run_id, spool)
    assert offset == len(first)
    assert points(tracker, run_id, "loss") == [(1000, 0, 2.0)]
    spool.write_text(first + second)
    assert tracker.forward(run_id, spool, offset) == len(first + second)
    assert points(tracker, run_id, "loss") == [(1000, 0, 2.0), (2000, 1, 1.0)]


def test_a_spool_that_is_not_there_yet_is_an_empty_one(tracker: Tracker, tmp_path: Path) -> None:
    assert tracker.forward(open_round(tracker), tmp_path / "metrics.jsonl") == 0


def test_more_points_than_mlflow_takes_at_once_all_arrive(tracker: Tracker, tmp_path: Path) -> None:
    run_id = open_round(tracker)
    spool = tmp_path / "metrics.jsonl"
    # 2 lines of 600 make one group of 1200; MLflow refuses more than 1000.
    many = {f"m/{number}": float(number) for number in range(600)}
    spool.write_text(spool_line(1000, 0, **many) + spool_line(2000, 1, **many))

    tracker.forward(run_id, spool)
    assert tracker.client.get_run(run_id).data.metrics == many
    assert points(tracker, run_id, "m/599") == [(1000, 0, 599.0), (2000, 1, 599.0)]


def test_numbers_that_are_not_finite_are_told_but_never_sent(tracker: Tracker, tmp_path: Path) -> None:
    run_id = open_round(tracker)
    spool = tmp_path / "metrics.jsonl"
    spool.write_text(
        spool_line(1000, 0, kl=float("nan"), loss=1.0) + spool_line(2000, 1, kl=float("inf"), loss=0.5)
    )
    tracker.forward(run_id, spool)
    tracker.forward(run_id, spool)
    tracker.log_summary(run_id, {"eval/gold": float("-inf")}, step=7)

    assert tracker.client.get_run(run_id).data.metrics.keys() == {
        "kl_nonfinite",
        "loss",
        "eval/gold_nonfinite",
    }
    assert points(tracker, run_id, "kl_nonfinite") == [(1000, 0, 1.0), (2000, 1, 1.0)]


def test_a_summary_told_again_is_stored_once(tracker: Tracker) -> None:
    run_id = open_round(tracker)
    for value in (0.5, 0.5, 0.75):
        tracker.log_summary(run_id, {"eval/win_rate": value}, step=7)
    assert [point[1:] for point in points(tracker, run_id, "eval/win_rate")] == [(7, 0.5), (7, 0.75)]


def test_a_database_that_fails_is_told_and_loses_nothing(tracker: Tracker, tmp_path: Path) -> None:
    run_id = open_round(tracker)
    spool = tmp_path / "metrics.jsonl"
    spool.write_text(spool_line(1000, 0, loss=2.0))
    with sqlite3.connect(tracker.store.folder / "mlflow.db") as database:
        database.execute("alter table metrics rename to metrics_away")
    try:
        with pytest.raises(TrackingUnavailable, match="no such table: metrics"):
            tracker.forward(run_id, spool)
    finally:
        with database:
            database.execute("alter table metrics_away rename to metrics")
        database.close()
    tracker.forward(run_id, spool)
    assert points(tracker, run_id, "loss") == [(1000, 0, 2.0)]


def test_an_interrupted_round_is_one_run_that_keeps_its_first_parameters(tracker: Tracker) -> None:
    run_id = open_round(tracker, learning_rate="1e-4")
    tracker.close(run_id, "FAILED")
    changed = "a: 2\n"

    assert open_round(tracker, settings=changed, learning_rate="2e-4", device="cpu") == run_id

    run = tracker.client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("RUNNING", "round-0007")
    assert run.data.params == {"learning_rate": "1e-4", "device": "cpu"}
    assert run.data.tags["rlhf.settings_sha256"] == hashlib.sha256(changed.encode()).hexdigest()
    assert run.data.tags["prefect.flow_run_id"] == "f"
    assert Path(tracker.client.download_artifacts(run_id, "settings.yaml")).read_text() == changed
    assert open_round(tracker, round=8) != run_id


def test_a_stage_is_a_child_of_its_round_whatever_run_the_environment_names(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = open_round(tracker)
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    stage = tracker.open_stage(parent, "rollouts", key="k" * 64, tags={"rlhf.seed": "3"})
    tracker.close(stage, "FINISHED")

    (child,) = tracker.client.search_runs([tracker.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert (child.info.run_id, child.info.run_name, child.info.status) == (stage, "rollouts", "FINISHED")
    assert stage != parent
    assert {
        "rlhf.round": "7",
        "rlhf.stage_key": "k" * 64,
        "rlhf.seed": "3",
    }.items() <= child.data.tags.items()


def test_a_value_too_long_for_a_parameter_says_where_all_of_it_is(tracker: Tracker) -> None:
    run_id = open_round(tracker, prompt="x" * 6001, fits="y" * 6000)
    stored = tracker.client.get_run(run_id).data.params
    assert len(stored["prompt"]) == 6000
    assert stored["prompt"].endswith("x... (6001 characters, all of them in settings.yaml)")
    assert stored["fits"] == "y" * 6000


def test_a_dataset_keeps_its_whole_digest(tracker: Tracker) -> None:
    run_id = open_round(tracker)
    digest = hashlib.sha256(b"rows").hexdigest()
    for _ in range(2):
        tracker.dataset(
            run_id, name="preferences", digest64=digest, role="train", source="objects/x", rows=12
        )
    (given,) = tracker.client.get_run(run_id).inputs.dataset_inputs
    assert digest.startswith(given.dataset.digest)
    assert {tag.key: tag.value for tag in given.tags} == {
        "mlflow.data.context": "train",
        "rlhf.dataset.sha256": digest,
    }
    assert json.loads(given.dataset.profile) == {"num_rows": 12}


def test_files_folders_and_texts_become_artifacts(tracker: Tracker, tmp_path: Path) -> None:
    run_id = open_round(tracker)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "kl.svg").write_text("<svg/>")
    tracker.artifact(run_id, tmp_path / "plots", "report/plots")
    tracker.artifact(run_id, tmp_path / "plots" / "kl.svg")
    tracker.text(run_id, "report/report.md", "# Round 7")
    assert [file.path for file in tracker.client.list_artifacts(run_id)] == [
        "kl.svg",
        "report",
        "settings.yaml",
    ]
    assert [file.path for file in tracker.client.list_artifacts(run_id, "report/plots")] == [
        "report/plots/kl.svg"
    ]


def test_an_experiment_deleted_in_the_ui_comes_back(tracker: Tracker) -> None:
    run_id = open_round(tracker)
    tracker.client.delete_experiment(tracker.experiment_id)
    again = Tracker(tracker.store.folder.parent, tracker.project)
    assert open_round(again) == run_id


def test_a_home_that_was_moved_is_refused(tracker: Tracker, tmp_path: Path) -> None:
    tracker.open()
    shutil.copytree(tracker.store.folder, tmp_path / "moved" / "mlflow")
    with pytest.raises(ValueError, match="the home was moved"):
        Tracker(tmp_path / "moved", tracker.project).open()


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "it's", "-a"])
def test_a_project_name_that_cannot_name_a_model_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot name a model"):
        Tracker(tmp_path, name)
