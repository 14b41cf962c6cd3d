"""The tiny project as a user plays it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_FILE = Path(__file__).parents[2] / "infra" / "runs" / "tiny-cpu.yaml"
ROUNDS = 2
STAGES = (
    "prompts", "rollouts", "pairing", "preferences", "reward_modeling", "reward_validation", "policy_update",
    "measurement.initial", "measurement.champion", "measurement.candidate", "comparison", "promotion",
)  # fmt: skip
"""Of every round, in their order."""


def command(home: Path, *more: str, rounds: int = ROUNDS) -> list[str]:
    """What a user types to play the tiny project."""
    run = ["run", str(RUN_FILE), "--rounds", str(rounds), "--home", str(home), "--json"]
    return [sys.executable, "-m", "flows.cli", *run, *more]


def play(home: Path, *more: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """The object that the command prints."""
    done = subprocess.run(command(home, *more, rounds=rounds), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def digests(found: dict[str, Any]) -> dict[tuple[int, str, str], str]:
    """Of every artifact, by round, stage and role."""
    return {
        (round["round"], stage["stage"], role): digest
        for round in found["rounds"]
        for stage in round["stages"]
        for role, digest in stage["artifacts"].items()
    }
