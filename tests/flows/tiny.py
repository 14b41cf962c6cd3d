"""The tiny project as a user plays it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_FILE = Path(__file__).parents[2] / "infra" / "runs" / "tiny-cpu.yaml"
ROUNDS = 2


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
