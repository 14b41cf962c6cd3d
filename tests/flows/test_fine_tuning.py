"""A project whose base is fine-tuned first, as a user plays it: plain texts, and chats by the template."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.ledger import Ledger
from rlhf_core.metrics import read_lines
from tests.flows.tiny import digests, play

pytestmark = pytest.mark.slow

SMALLER = (
    "prompts={labelling: 16, policy: 16, held_out: 8}",
    "reward_model.prompts_per_minibatch=2",
    "reward_gates=[]",
    "rollouts.sampling.max_new_tokens=8",
    "policy_update.sampling.max_new_tokens=8",
    "policy_update.algorithm={num_steps: 1, rollouts_per_step: 16}",
    "evals.held_out.sampling.max_new_tokens=8",
    "bootstrap.base.context_length=512",
)
SFT = (
    "{num_epochs: 1, demonstrations_per_minibatch: 8, held_out_share: 0.2, packing: true, "
    "optimizer: {learning_rate: 1e-2}"
)


def tuned(home: Path, file: Path, prompts: str, **source: str) -> dict[str, Any]:
    """The object that the command prints."""
    given = {"type": "file", "path": str(file), **source}
    overrides = (
        *SMALLER,
        f"bootstrap.sft={SFT}, demonstrations: {json.dumps(given)}}}",
        f"prompt_source={{type: packaged, name: {prompts}}}",
    )
    return play(home, *(part for one in overrides for part in ("--set", one)), rounds=1)


@pytest.mark.parametrize(
    ("prompts", "plain_text"), [("openings", "opening"), ("chats", "message")], ids=["plain", "chat"]
)
def test_a_project_is_fine_tuned_and_played(tmp_path: Path, prompts: str, plain_text: str) -> None:
    file, home = tmp_path / "answers.jsonl", tmp_path / "home"
    rows = [{"prompt": f"{letter}{n}:", "response": letter * 4} for letter in "abcdefgh" for n in range(10)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = tuned(home, file, prompts, plain_text=plain_text)
    assert [round["outcome"] for round in found["rounds"]] in (["promoted"], ["rejected"])
    record = Ledger(home / "projects", "tiny").project()
    assert set(record.inputs) == {"demonstrations", "trunk", "policy"}
    (spool,) = [s for s in (home / "work").glob("*/metrics.jsonl") if "sft/loss" in s.read_text()]
    told = {name: value for line in read_lines(spool) for name, value in line["metrics"].items()}
    assert told["sft/held_out_loss_merged"] < 0.8 * told["sft/held_out_loss_before"]
    assert (home / "projects" / "tiny" / "tracking" / "0000" / "bootstrap.1.run").read_text()
    # The same command again has nothing to do.
    again = tuned(home, file, prompts, plain_text=plain_text)
    assert digests(again) == digests(found)
    assert all(stage["cached"] for round in again["rounds"] for stage in round["stages"])
