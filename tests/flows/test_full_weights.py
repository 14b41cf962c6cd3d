"""The tiny project with weights of each role's own, as a user plays it: two rounds, and nothing twice."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.flows.tiny import STAGES, command, digests, play

pytestmark = pytest.mark.slow

FULL = [
    argument
    for setting in (
        "bootstrap.weights=full",
        "reward_model.optimizer.learning_rate=1.0e-3",
        "policy_update.algorithm.learning_rate=1.0e-3",
        "policy_update.algorithm.value_learning_rate=1.0e-3",
    )
    for argument in ("--set", setting)
]


def test_two_rounds_of_full_weights_are_played_and_a_second_time_does_nothing_more(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, *FULL), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # Said, and played all the same: the model is tiny.
    told = " ".join(done.stderr.split())
    assert "note: bootstrap.weights is full, and " in told
    assert "policy_update.algorithm.learning_rate 0.001" in told
    assert [round["round"] for round in found["rounds"]] == [1, 2]
    for round in found["rounds"]:
        assert round["outcome"] in ("promoted", "rejected")
        assert {stage["stage"] for stage in round["stages"]} == set(STAGES)
        assert round["metrics"]["reward_model/accuracy"] > 0.6
    # The rule is easy, and so is a tiny model's way to it: round 1 earns more of it.
    assert (
        found["rounds"][0]["metrics"]["eval/gold_after"] > found["rounds"][0]["metrics"]["eval/gold_before"]
    )
    made = digests(found)
    candidate = tmp_path / "store" / "objects" / made[(1, "policy_update", "policy")]
    assert json.loads((candidate / "role.json").read_text())["weights"]
    again = play(tmp_path, *FULL)
    assert digests(again) == made
    assert all(stage["cached"] for round in again["rounds"] for stage in round["stages"])
