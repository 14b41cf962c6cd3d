"""`rlhf rebase` as a user types it: what it refuses, and a project that goes on on its new trunk."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from flows.cli import app
from flows.rebase import to_merge
from rlhf_core.ledger import Ledger, RebaseRecord
from tasks.reports import rebase_told
from tests.flows.test_loop import REF, SETTINGS, with_rounds
from tests.flows.tiny import RUN_FILE, digests


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


SHORT = (
    "prompts={labelling: 60, policy: 32, held_out: 40}",
    "policy_update.algorithm={num_steps: 3, rollouts_per_step: 32}",
    "promotion.gates=[{metric: eval/kl_to_initial, direction: below, bound: 1000}]",
    "reward_gates=[{metric: reward_model/accuracy, direction: above, bound: 0}]",
)
"""Every round is short, and promotes."""
TYPED = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
from flows.cli import app
from flows.server import prefect_server
with prefect_server(Path(sys.argv[1])):
    for line in sys.stdin:
        done = CliRunner().invoke(app, json.loads(line))
        print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""
"""Commands one after the other in one process, with one Prefect server: each alone takes twice as long."""


@contextmanager
def typing(home: Path) -> Iterator[Callable[..., Any]]:
    """Types commands: what each prints as JSON, or what it says where it ends with another code than 0."""
    asked = [sys.executable, "-c", TYPED, str(home)]
    with subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdin is not None and shell.stdout is not None

        def typed(*arguments: str, code: int = 0) -> Any:
            print(json.dumps([*arguments, "--home", str(home), "--json"]), file=shell.stdin, flush=True)
            ended, printed, said = json.loads(shell.stdout.readline())
            assert ended == code, said
            return json.loads(printed) if code == 0 else said

        yield typed


@pytest.mark.slow
def test_a_rebased_project_goes_on_and_its_old_versions_still_answer(tmp_path: Path) -> None:
    run = ("run", str(RUN_FILE), *(argument for one in SHORT for argument in ("--set", one)), "--rounds")
    with typing(tmp_path) as typed:
        first = typed(*run, "1")
        assert first["rounds"][0]["outcome"] == "promoted" and first["rebases"] == []
        made = typed("rebase", "tiny")
        assert made["rebase"]["merged_champion"] == first["champion"]["policy"]
        assert made["champion"] == {"policy": made["rebase"]["policy"], "version": 3}
        assert made["rebase"]["metrics"]["rebase/max_log_ratio"] < 1e-3

        # As if killed between the store and the ledger: the same command again, and the same digests.
        project = tmp_path / "projects" / "tiny"
        (project / "ledger" / "rebase-0001.json").unlink()
        (project / "reports" / "rebase-0001" / "finished").unlink()
        assert typed("rebase", "tiny") == made
        assert "since the rebase after round 1 was promoted" in typed("rebase", "tiny", code=2)

        second = typed(*run, "2")
        found = digests(second)
        assert second["rebases"] == [made["rebase"]] and digests(first).items() <= found.items()
        initial, champion = (
            found[(2, f"measurement.{who}", "measurements")] for who in ("initial", "champion")
        )
        # One policy, measured anew: KL to the old initial policy is none to this one.
        assert initial == champion != found[(1, "measurement.candidate", "measurements")]
        numbers = second["rounds"][1]["metrics"]
        assert numbers["eval/kl_to_initial_minus_champion"] == numbers["eval/kl_to_initial"]
        # Version 2 says on the old trunk what version 3, that was merged from it, says on the new one.
        (answer,) = typed("sample", "tiny:2", "So", "--against", "tiny:3", "-n", "1")["samples"]
        assert answer["tiny:2"] == answer["tiny:3"] != ""
        assert digests(typed(*run, "2")) == found
        # And a policy of the new trunk can be merged in turn.
        assert typed("rebase", "tiny")["rebase"]["old_trunk"] == made["rebase"]["trunk"]
