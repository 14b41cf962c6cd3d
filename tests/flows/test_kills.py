"""Whatever is killed at whatever moment: the same command again gives the digests of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts import Store
from rlhf_core.ledger import Ledger
from tests.flows.tiny import STAGES, command, digests, play

pytestmark = pytest.mark.slow


def kill_when(home: Path, due: Callable[[], bool], rounds: int = 2) -> bool:
    """Run, and SIGKILL the command as soon as it is due; whether it was killed."""
    with subprocess.Popen(
        command(home, rounds=rounds),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        while process.poll() is None:
            if due():
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.002)
    return False


def kill_after(home: Path, line: str, seconds: float) -> bool:
    """Play a round, and SIGKILL the command so long after it has printed a line that begins so."""
    with subprocess.Popen(
        command(home, rounds=1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for printed in process.stderr:
            if printed.startswith(line):
                time.sleep(seconds)
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                return True
    return False


def assert_whole(home: Path, first: dict[str, Any], rounds: int) -> None:
    """The same command again: equal digests, every artifact as its hashes say, no MLflow run left open."""
    from tasks.tracking import Tracker

    wanted = {place: digest for place, digest in digests(first).items() if place[0] <= rounds}
    assert digests(play(home, rounds=rounds)) == wanted
    store, ledger = Store(home / "store"), Ledger(home / "projects", "tiny")
    for number in ledger.rounds():
        for record in ledger.stages(number):
            for ref in record.outputs.values():
                store.verify(ref)
        assert (home / "projects" / "tiny" / "reports" / f"round-{number:04d}" / "report.md").exists()
    tracker = Tracker(home, "tiny")
    assert not tracker.client.search_runs([tracker.experiment_id], "attributes.status = 'RUNNING'")


def test_a_kill_during_policy_update_changes_no_digest(first: dict[str, Any], tmp_path: Path) -> None:
    def stepping() -> bool:
        spools = (tmp_path / "work").glob("*/metrics.jsonl")
        return any("objective/scores" in spool.read_text() for spool in spools)

    assert kill_when(tmp_path, stepping, rounds=1)
    assert Ledger(tmp_path / "projects", "tiny").stage(1, "policy_update") is None
    assert_whole(tmp_path, first, rounds=1)


def test_a_kill_in_every_stage_and_after_it_changes_no_digest(first: dict[str, Any], tmp_path: Path) -> None:
    # In round 1: right after each stage's line, so between two stages, or some time into the next one.
    killed = [kill_after(tmp_path, f"✓ {stage} ", 0.25 * (n % 2)) for n, stage in enumerate(STAGES)]
    assert killed[:-1] == [True] * (len(STAGES) - 1)
    assert_whole(tmp_path, first, rounds=1)


def test_kills_at_random_moments_change_no_digest(first: dict[str, Any], tmp_path: Path) -> None:
    draws = random.Random(20)
    kills = 0
    for _ in range(10):
        end = time.monotonic() + draws.uniform(3.0, 18.0)

        def due(end: float = end) -> bool:
            return time.monotonic() > end

        kills += kill_when(tmp_path, due)
    assert kills >= 3
    assert_whole(tmp_path, first, rounds=2)


def test_a_kill_between_the_ledgers_decision_and_mlflow_is_repaired(
    first: dict[str, Any], tmp_path: Path
) -> None:
    from tasks.registry import Registry
    from tasks.tracking import Tracker

    decision = tmp_path / "projects" / "tiny" / "ledger" / "0001" / "decision.json"
    assert kill_when(tmp_path, decision.exists)
    assert not (tmp_path / "projects" / "tiny" / "reports" / "round-0001" / "finished").exists()
    again = play(tmp_path, rounds=1)
    assert digests(again).items() <= digests(first).items()
    assert again["champion"]["version"] == Registry(Tracker(tmp_path, "tiny")).alias("policy", "champion")
    assert (tmp_path / "projects" / "tiny" / "reports" / "round-0001" / "finished").exists()


def test_a_killed_prefect_server_loses_nothing(first: dict[str, Any], tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, rounds=1), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    drawn = tmp_path / "projects" / "tiny" / "ledger" / "0001" / "rollouts.json"
    while not drawn.exists():
        assert process.poll() is None
        time.sleep(0.01)
    server = json.loads((tmp_path / "prefect" / "server.json").read_text())
    os.killpg(server["pid"], signal.SIGKILL)
    said, _ = process.communicate()
    # The server is started again at its port, and the run goes on.
    assert process.returncode == 0
    assert digests(json.loads(said)).items() <= digests(first).items()
