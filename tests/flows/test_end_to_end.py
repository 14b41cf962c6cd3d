"""The contract of `rlhf run`: the whole loop on the tiny model, as a user runs it."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts import Store
from rlhf_core.ledger import Ledger
from tests.flows.tiny import command, play

pytestmark = pytest.mark.slow

STAGES = {
    "prompts", "rollouts", "pairing", "preferences", "reward_modeling", "reward_validation", "policy_update",
    "measurement.initial", "measurement.champion", "measurement.candidate", "comparison", "promotion",
}  # fmt: skip


def digests(found: dict[str, Any]) -> dict[tuple[int, str, str], str]:
    return {
        (round["round"], stage["stage"], role): digest
        for round in found["rounds"]
        for stage in round["stages"]
        for role, digest in stage["artifacts"].items()
    }


def test_two_rounds_give_what_the_contract_says(first: dict[str, Any], home: Path) -> None:
    assert set(first) == {"project", "home", "champion", "rounds"}
    assert [round["round"] for round in first["rounds"]] == [1, 2]
    for round in first["rounds"]:
        assert round["outcome"] in ("promoted", "rejected")
        assert {stage["stage"] for stage in round["stages"]} == STAGES
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


def kill_when(home: Path, moments: Iterator[bool]) -> bool:
    """Run, and SIGKILL the command at the first true moment; whether it was killed."""
    with subprocess.Popen(
        command(home), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        while process.poll() is None:
            if next(moments):
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.02)
    return False


def test_a_kill_during_policy_update_changes_no_digest(first: dict[str, Any], tmp_path: Path) -> None:
    def stepping() -> Iterator[bool]:
        while True:
            spools = list((tmp_path / "work").glob("*/metrics.jsonl"))
            yield any("objective/scores" in spool.read_text() for spool in spools)

    assert kill_when(tmp_path, stepping())
    assert Ledger(tmp_path / "projects", "tiny").stage(1, "policy_update") is None
    assert digests(play(tmp_path)) == digests(first)


def test_ten_kills_at_random_moments_change_no_digest(first: dict[str, Any], tmp_path: Path) -> None:
    draws = random.Random(20)
    kills = 0
    for _ in range(10):
        end = time.monotonic() + draws.uniform(3.0, 25.0)

        def due(end: float = end) -> Iterator[bool]:
            while True:
                yield time.monotonic() > end

        kills += kill_when(tmp_path, due())
    assert kills >= 3
    found = play(tmp_path)
    assert digests(found) == digests(first)
    store, ledger = Store(tmp_path / "store"), Ledger(tmp_path / "projects", "tiny")
    for number in ledger.rounds():
        for record in ledger.stages(number):
            for ref in record.outputs.values():
                store.verify(ref)


def test_no_mlflow_run_is_left_running(first: dict[str, Any], home: Path) -> None:
    from tasks.tracking import Tracker

    tracker = Tracker(home, "tiny")
    running = tracker.client.search_runs([tracker.experiment_id], "attributes.status = 'RUNNING'")
    assert not running


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
