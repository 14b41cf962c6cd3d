"""A checkpoint is whole or not there, belongs to one piece of work, and a damaged one is not believed."""

import json
from pathlib import Path

import pytest
import torch

from rlhf_core.checkpoints import Checkpoints
from rlhf_core.metrics import Spool

WORK = {"key": "k", "reward_model": "r"}


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "work")


def opened(tmp_path: Path, **other: str) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", {**WORK, **other}, every=2)


def save(checkpoints: Checkpoints, spool: Spool, step: int) -> None:
    tensors = {"a.master": torch.full((3,), float(step)), "steps": torch.tensor(step)}
    checkpoints.save(step, {"policy": tensors}, {"kl_coef": 0.1 * step}, spool)


def test_what_was_saved_comes_back(tmp_path: Path, spool: Spool) -> None:
    assert opened(tmp_path).last is None
    spool.log(0, {"a": 1.0})
    save(opened(tmp_path), spool, 2)
    found = opened(tmp_path)
    assert found.last is not None
    assert (found.last.step, found.last.state) == (2, {"kl_coef": 0.2})
    assert found.last.spool == spool.ends()
    assert found.tensors("policy")["a.master"].tolist() == [2, 2, 2]


def test_it_is_due_every_so_many_steps_or_never(tmp_path: Path) -> None:
    assert [opened(tmp_path).due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert not Checkpoints(tmp_path, WORK, every=0).due(4)


def test_the_last_two_are_kept(tmp_path: Path, spool: Spool) -> None:
    checkpoints = opened(tmp_path)
    for step in (2, 4, 6):
        save(checkpoints, spool, step)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["000004", "000006"]


@pytest.mark.parametrize("how", ["a changed tensor", "a lost file", "half a state", "a newer form"])
def test_a_damaged_one_is_said_and_the_one_before_is_used(tmp_path: Path, spool: Spool, how: str) -> None:
    for step in (2, 4):
        save(opened(tmp_path), spool, step)
    last = tmp_path / "checkpoints" / "000004"
    if how == "a changed tensor":
        data = bytearray((last / "policy.safetensors").read_bytes())
        data[-1] ^= 1
        (last / "policy.safetensors").write_bytes(data)
    if how == "a lost file":
        (last / "policy.safetensors").unlink()
    if how == "half a state":
        (last / "state.json").write_text((last / "state.json").read_text()[:40])
    if how == "a newer form":
        said = json.loads((last / "state.json").read_bytes())
        (last / "state.json").write_text(json.dumps({**said, "version": 99}))
    found = opened(tmp_path)
    assert found.last is not None and found.last.step == 2
    (sentence,) = found.unusable
    assert sentence.startswith("the checkpoint of step 4 is not used: ")


def test_one_of_another_piece_of_work_is_not_used(tmp_path: Path, spool: Spool) -> None:
    save(opened(tmp_path), spool, 2)
    other = opened(tmp_path, reward_model="another")
    assert other.last is None
    assert other.unusable == ["the checkpoint of step 2 is not used: it belongs to another piece of work"]


def test_what_a_killed_writer_left_is_no_checkpoint(tmp_path: Path, spool: Spool) -> None:
    save(opened(tmp_path), spool, 2)
    (tmp_path / "checkpoints" / "000002").rename(tmp_path / "checkpoints" / ".writing")
    found = opened(tmp_path)
    assert found.last is None
    save(found, spool, 4)
    assert sorted(path.name for path in found.folder.iterdir()) == ["000004"]
