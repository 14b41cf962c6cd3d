"""The contract of `rlhf run`: the whole loop on the tiny model, as a user runs it."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.flows.tiny import STAGES, digests, play

pytestmark = pytest.mark.slow


def test_two_rounds_give_what_the_contract_says(first: dict[str, Any], home: Path) -> None:
    assert set(first) == {"project", "home", "champion", "rebases", "rounds"}
    assert [round["round"] for round in first["rounds"]] == [1, 2]
    for round in first["rounds"]:
        assert round["outcome"] in ("promoted", "rejected")
        assert {stage["stage"] for stage in round["stages"]} == set(STAGES)
        assert {"reward_model/accuracy", "eval/gold_before", "eval/gold_after", "eval/win_rate"} <= set(
            round["metrics"]
        )
        assert round["gates"] and all(gate["passed"] for gate in round["gates"]) == (
            round["outcome"] == "promoted"
        )
        assert len(round["mlflow_run_id"]) == 32 and len(round["prefect_flow_run_id"]) == 36
    # Version 1 is the initial policy; each candidate has the next number, promoted or not.
    promoted = [round["round"] for round in first["rounds"] if round["outcome"] == "promoted"]
    assert first["champion"]["version"] == (promoted[-1] + 1 if promoted else 1)
    assert first["home"] == str(home)


def test_the_champion_and_every_candidate_are_in_the_registry(first: dict[str, Any], home: Path) -> None:
    from tasks.registry import Registry
    from tasks.tracking import Tracker

    registry = Registry(Tracker(home, "tiny"))
    assert registry.alias("policy", "champion") == first["champion"]["version"]
    for round in first["rounds"]:
        update = next(s for s in round["stages"] if s["stage"] == "policy_update")
        assert registry.version_of("policy", update["artifacts"]["policy"]) == round["round"] + 1


def test_a_second_time_does_nothing_more(first: dict[str, Any], home: Path) -> None:
    again = play(home)
    assert digests(again) == digests(first)
    assert all(stage["cached"] for round in again["rounds"] for stage in round["stages"])


def test_two_homes_with_one_seed_give_the_same_digests(first: dict[str, Any], tmp_path: Path) -> None:
    assert digests(play(tmp_path)) == digests(first)


def test_a_process_for_each_stage_gives_the_same_digests(first: dict[str, Any], tmp_path: Path) -> None:
    found = play(tmp_path, "--set", "execution.launcher=process", rounds=1)
    assert digests(found).items() <= digests(first).items()


def test_no_mlflow_run_is_left_running(first: dict[str, Any], home: Path) -> None:
    from tasks.tracking import Tracker

    tracker = Tracker(home, "tiny")
    running = tracker.client.search_runs([tracker.experiment_id], "attributes.status = 'RUNNING'")
    assert not running


def test_experiment_and_rounds_are_described(first: dict[str, Any], home: Path) -> None:
    from tasks.tracking import NOTE, Tracker

    tracker = Tracker(home, "tiny")
    assert "run a round" in tracker.client.get_experiment(tracker.experiment_id).tags[NOTE]
    for round in first["rounds"]:
        told = tracker.client.get_run(round["mlflow_run_id"]).data.tags[NOTE]
        assert told.startswith(f"**{round['outcome'].capitalize()}**")
        assert round["gates"] and all(gate["sentence"] in told for gate in round["gates"])


def test_each_round_has_its_page_whole(first: dict[str, Any], home: Path) -> None:
    for round in first["rounds"]:
        folder = home / "projects" / "tiny" / "reports" / f"round-{round['round']:04d}"
        page = (folder / "report.html").read_text()
        assert {"Promoted", "Rejected"} & set(page.split("<strong>")[1].split("</strong>")[:1])
        for title in ("Proxy reward and gold over √KL", "Scores before and after", "Entropy and length"):
            assert title in page
        assert "Proxy, number of completions" in page and "<figcaption>" in page


def test_status_tells_the_same_as_the_run(first: dict[str, Any], home: Path) -> None:
    asked = [sys.executable, "-m", "flows.cli", "status", "tiny", "--home", str(home)]
    told = json.loads(subprocess.run([*asked, "--json"], capture_output=True, text=True, check=True).stdout)
    assert told == first
    shown = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert f"version {first['champion']['version']}" in shown
    for round in first["rounds"]:
        assert round["outcome"] in shown


def test_prefect_shows_named_ends_and_cached_stages(first: dict[str, Any], home: Path) -> None:
    ends = {"promoted": "Promoted", "rejected": "GateRejected"}
    with closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database:
        flows = database.execute("select name, state_name, state_type from flow_run").fetchall()
        tasks = database.execute("select name, state_name from task_run").fetchall()
    for round in first["rounds"]:
        assert (f"tiny round {round['round']}", ends[round["outcome"]], "COMPLETED") in flows
    # In round 1 the champion is the initial policy, whose measurement was just made.
    assert ("measurement.champion", "Cached") in tasks
    assert ("policy_update", "Completed") in tasks
