"""The home's MLflow database among processes that open it at once, and processes that are killed."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.mlflow_store import MlflowStore
from tasks.project import Project

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
from rlhf_core.settings import Execution
from tasks.project import Project
project = Project(Path(sys.argv[1]), sys.argv[2], Execution(), None)
project.journals.begin_round(1)
project.journals.attempt(1, "rollouts", {})
project.teller.tell()
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


def test_runs_of_a_killed_process_are_closed_and_its_round_goes_on(project: Project, tmp_path: Path) -> None:
    tracker = project.tracker
    process = python(OPEN_AND_DIE, str(project.home), project.name, folder=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (-9, b"", b"")
    assert list(tmp_path.iterdir()) == []
    left = tracker.client.search_runs([tracker.experiment_id])
    assert {run.info.status for run in left} == {"RUNNING"}

    assert project.begin_telling() == ["round-0001", "rollouts"]

    ended = [tracker.client.get_run(run.info.run_id).info for run in left]
    assert {run.status for run in ended} == {"KILLED"}
    # The last sign of life of either is its beginning.
    assert all(run.end_time == run.start_time for run in ended)
    assert project.begin_telling() == []
    journal = project.journals.begin_round(1)
    assert project.teller.settle()
    assert tracker.client.get_run(journal.run_id).info.status == "RUNNING"


def test_a_home_whose_path_no_database_address_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose another"):
        MlflowStore(tmp_path / "100%")
