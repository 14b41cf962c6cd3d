"""What the tests of algorithms share: a trunk with all roles, prompts, a reward that counts, and a sink."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.algorithms.ppo import PolicyData
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.metrics import Spool
from rlhf_core.records import Prompt
from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.trunk import Lora, Trunk


@pytest.fixture
def sink(tmp_path: Path) -> Spool:
    """Where a stage tells its numbers."""
    return Spool(tmp_path / "spool")


@pytest.fixture
def prompts() -> list[Prompt]:
    """Ten prompts of 1 to 28 bytes."""
    return [Prompt(id=f"p{i}", text=chr(65 + i) * (1 + 3 * i)) for i in range(10)]


@pytest.fixture
def make_roles(make_trunk: Callable[..., Trunk], stir: Callable[..., None]) -> Callable[..., Trunk]:
    """Makes a trunk with a fresh policy, a trained reward, and a critic that starts as the reward."""

    def make(policy_moved: bool = False, **how: Any) -> Trunk:
        trunk = make_trunk(**how)
        trunk.add_role("policy", Lora(rank=4, alpha=8.0), seed=1)
        if policy_moved:
            stir(trunk, "policy", 1)
        trunk.add_role("reward", Lora(rank=4, alpha=8.0), seed=2, head=True)
        stir(trunk, "reward", 2)
        trunk.copy_role("reward", "value")
        return trunk

    return make


@pytest.fixture
def counting() -> PerCompletion:
    """A reward that anyone can check: the number of response ids below 64, in tens."""
    return PerCompletion(lambda item: sum(token < 64 for token in item.response_ids) / 10)


@pytest.fixture
def make_data(prompts: list[Prompt], counting: PerCompletion) -> Callable[..., PolicyData]:
    """Makes what an algorithm is given."""

    def make(**other: Any) -> PolicyData:
        given = {"prompts": prompts, "reward": counting, "generator": HFGenerator(), "seed": 0}
        return PolicyData(**{**given, "from_initial": True, **other})

    return make
