"""`rlhf replay`: a project's MLflow, deleted, is as it was; told again, it stays so."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flows.console import ConsoleDisplay
from flows.replay import replay
from tasks.registry import Registry
from tasks.tracking import Tracker

pytestmark = pytest.mark.slow

RUN_FILE = Path(__file__).parents[2] / "infra" / "runs" / "tiny-cpu.yaml"


def points(home: Path) -> dict[str, list[tuple[str, int, int, float]]]:
    """Every point of every run by the run's name."""
    tracker = Tracker(home, "tiny")
    return {
        str(run.info.run_name): sorted(
            (name, point.timestamp, point.step, point.value)
            for name in run.data.metrics
            for point in tracker.client.get_metric_history(run.info.run_id, name)
        )
        for run in tracker.client.search_runs([tracker.experiment_id])
    }


def test_a_deleted_mlflow_is_made_again_from_the_journals(tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "flows.cli", "run", str(RUN_FILE), "--home", str(home), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    before = points(home)
    assert replay(home, "tiny", ConsoleDisplay()) == {
        "project": "tiny",
        "rounds": 1,
        "runs_made": 0,
        "facts_sent": 0,
        "champion_version": found["champion"]["version"],
    }
    # In a place of its own, as this process keeps the first database open.
    fresh = tmp_path / "fresh"
    shutil.copytree(home, fresh, ignore=shutil.ignore_patterns("mlflow", "prefect"))
    again = replay(fresh, "tiny", ConsoleDisplay())
    assert again["runs_made"] == len(before)
    assert again["champion_version"] == found["champion"]["version"]
    assert points(fresh) == before
    assert replay(fresh, "tiny", ConsoleDisplay())["facts_sent"] == 0
    assert Registry(Tracker(fresh, "tiny")).alias("policy", "champion") == found["champion"]["version"]
