"""`rlhf rebase` as a user types it: what it refuses, and a project that goes on on its new trunk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from flows.cli import app
from flows.rebase import to_merge
from rlhf_core.ledger import Ledger, RebaseRecord
from tasks.reports import rebase_told
from tests.flows.test_loop import REF, SETTINGS, with_rounds
from tests.flows.tiny import digests, play


def refused(home: Path) -> str:
    before = sorted(home.rglob("*"))
    done = CliRunner().invoke(app, ["rebase", SETTINGS.project, "--home", str(home), "--json"])
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert [path for path in home.rglob("*") if path not in before and path.suffix != ".lock"] == []
    return done.stderr


def test_a_project_that_was_never_opened_is_refused(tmp_path: Path) -> None:
    assert "there is no project 'tiny'" in refused(tmp_path)


def test_a_champion_that_is_still_the_initial_policy_is_refused(tmp_path: Path) -> None:
    with_rounds(tmp_path, 2)
    said = refused(tmp_path)
    assert "its initial policy: no round of its rounds so far was promoted" in said


def test_a_rebase_while_a_round_is_open_is_refused(tmp_path: Path) -> None:
    with_rounds(tmp_path, 2)
    (tmp_path / "projects" / "tiny" / "ledger" / "0002" / "decision.json").unlink()
    assert "round 2 of project 'tiny' is open" in (said := refused(tmp_path))
    assert "Finish it with `rlhf run`" in said


def test_a_rebase_that_mlflow_was_not_told_of_is_finished_and_one_it_knows_is_refused(
    tmp_path: Path,
) -> None:
    with_rounds(tmp_path, 2)
    ledger = Ledger(tmp_path / "projects", "tiny")
    record = ledger.rebase(
        RebaseRecord(
            round=2,
            key="k",
            trunk=REF,
            policy=REF,
            champion=REF,
            old_trunk=REF,
            metrics={},
            mlflow_run_id="",
            rebased_at="now",
        )
    )
    assert to_merge(tmp_path, ledger) is None
    told = rebase_told(tmp_path, "tiny", record)
    told.parent.mkdir(parents=True)
    told.write_text("")
    assert "no round since the rebase after round 2 was promoted" in refused(tmp_path)


def test_a_rebase_while_another_command_plays_is_refused(tmp_path: Path) -> None:
    with_rounds(tmp_path, 2)
    with FileLock(tmp_path / "projects" / ".tiny.lock"):
        assert "another command is playing project 'tiny'" in refused(tmp_path)


QUICK = (
    "prompts={labelling: 60, policy: 32, held_out: 40}",
    "policy_update.algorithm={num_steps: 3, rollouts_per_step: 32}",
    "promotion.gates=[{metric: eval/kl_to_initial, direction: below, bound: 1000}]",
    "reward_gates=[{metric: reward_model/accuracy, direction: above, bound: 0}]",
)
"""Every round is short, and promotes."""
SHORT = [argument for one in QUICK for argument in ("--set", one)]


def rlhf(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_rebased_project_goes_on_and_its_old_versions_still_answer(tmp_path: Path) -> None:
    first = play(tmp_path, *SHORT, rounds=1)
    assert first["rounds"][0]["outcome"] == "promoted" and first["rebases"] == []
    asked = ("rebase", "tiny", "--home", str(tmp_path), "--json")
    done = rlhf(*asked)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["rebase"]["merged_champion"] == first["champion"]["policy"]
    assert made["champion"] == {"policy": made["rebase"]["policy"], "version": 3}
    assert made["rebase"]["metrics"]["rebase/max_log_ratio"] < 1e-3

    # As if killed between the store and the ledger: the same command again, and the same digests.
    record = tmp_path / "projects" / "tiny" / "ledger" / "rebase-0001.json"
    for file in (record, tmp_path / "projects" / "tiny" / "reports" / "rebase-0001" / "finished"):
        file.unlink()
    again = rlhf(*asked)
    assert again.returncode == 0 and json.loads(again.stdout) == made
    assert rlhf(*asked).returncode == 2

    second = play(tmp_path, *SHORT, rounds=2)
    found = digests(second)
    assert second["rebases"] == [made["rebase"]] and digests(first).items() <= found.items()
    initial, champion = (found[(2, f"measurement.{who}", "measurements")] for who in ("initial", "champion"))
    # One policy, measured anew: KL to the old initial policy is none to this one.
    assert initial == champion != found[(1, "measurement.candidate", "measurements")]
    numbers = second["rounds"][1]["metrics"]
    assert numbers["eval/kl_to_initial"] == numbers["eval/kl_to_champion"]
    assert numbers["eval/kl_to_initial_minus_champion"] == numbers["eval/kl_to_initial"]
    # Version 2 says on the old trunk what version 3, that was merged from it, says on the new one.
    told = rlhf("sample", "tiny:2", "So", "--against", "tiny:3", "-n", "1", "--home", str(tmp_path), "--json")
    (answer,) = json.loads(told.stdout)["samples"]
    assert answer["tiny:2"] == answer["tiny:3"] != ""
    assert digests(play(tmp_path, *SHORT, rounds=2)) == found
