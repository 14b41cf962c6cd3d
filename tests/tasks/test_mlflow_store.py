"""The home's MLflow database among processes that open it at once, and processes that are killed."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.mlflow_store import MlflowStore
from tasks.tracking import Tracker

ROOT = Path(__file__).parents[2]

OPEN = """
import sys
from pathlib import Path
from tasks.tracking import Tracker
Tracker(Path(sys.argv[1]), "demo").open()
"""
OPEN_AND_DIE = """
import os, signal, sys
from pathlib import Path
from tasks.tracking import Tracker
tracker = Tracker(Path(sys.argv[1]), sys.argv[2])
parent = tracker.open_round(1, settings_yaml="", parameters={}, tags={})
tracker.open_stage(parent, "rollouts", key="k", tags={})
os.kill(os.getpid(), signal.SIGKILL)
"""


def python(script: str, *arguments: str, folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_processes_that_open_a_new_home_at_once_find_one_whole_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    # What a process leaves that was killed while it made the database.
    (tmp_path / "mlflow" / "mlflow.unfinished.db").write_bytes(b"half a database")
    processes = [python(OPEN, str(tmp_path), folder=tmp_path) for _ in range(2)]
    for process in processes:
        out, err = process.communicate()
        assert (process.returncode, out) == (0, b""), err.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow"]
    with sqlite3.connect(tmp_path / "mlflow" / "mlflow.db") as database:
        assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
        assert database.execute("select name from experiments").fetchall() == [("Default",), ("demo",)]
    database.close()
    # Nobody has written there yet, so nobody can have left anything.
    assert Tracker(tmp_path, "demo").repair() == []


def test_runs_of_a_killed_process_are_closed_and_its_round_goes_on(tracker: Tracker, tmp_path: Path) -> None:
    tracker.open()
    process = python(OPEN_AND_DIE, str(tracker.store.folder.parent), tracker.project, folder=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (-9, b"", b"")
    assert list(tmp_path.iterdir()) == []
    left = tracker.client.search_runs([tracker.experiment_id])
    assert {run.info.status for run in left} == {"RUNNING"}
    parent = next(run.info.run_id for run in left if run.data.tags["rlhf.kind"] == "round")
    own = tracker.open_round(2, settings_yaml="", parameters={}, tags={})

    assert set(tracker.repair()) == {run.info.run_id for run in left}

    assert {tracker.client.get_run(run.info.run_id).info.status for run in left} == {"KILLED"}
    assert tracker.client.get_run(own).info.status == "RUNNING"
    assert tracker.repair() == []
    assert [path.name for path in (tracker.store.folder / "owners").iterdir()].count(tracker.store.owner) == 1
    assert tracker.open_round(1, settings_yaml="", parameters={}, tags={}) == parent
    assert tracker.client.get_run(parent).info.status == "RUNNING"
    assert tracker.repair() == []


def test_a_home_whose_path_no_database_address_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose another"):
        MlflowStore(tmp_path / "100%")
