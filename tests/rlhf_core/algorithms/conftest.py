"""What the tests of algorithms share: a trunk with all roles, prompts, a reward that counts, and a sink."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.algorithms.demonstrations import TokenRows
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.batch import PreferenceBatch, RolloutBatch, TextBatch
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.metrics import Spool
from rlhf_core.records import Prompt
from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.trunk import Lora, Trunk

# Rows of three length buckets, in no order.
LENGTHS = [(5, 15), (30, 44), (60, 5), (3, 2), (100, 30), (10, 10), (1, 1), (64, 20)]


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
        trunk.add_role("reward", Lora(rank=4, alpha=8.0), seed=2, head="last")
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
        return PolicyData(**{**given, "from_reference": True, **other})

    return make


@pytest.fixture
def make(make_trunk: Callable[..., Trunk], stir: Callable[..., None]) -> Callable[..., Trunk]:
    """Makes a trunk with a policy, a value and a bystander, all trained."""

    def build(dtype: torch.dtype = torch.float32, **how: int) -> Trunk:
        trunk = make_trunk(dtype=dtype, **how)
        for seed, role in enumerate(("policy", "value", "bystander")):
            trunk.add_role(role, Lora(rank=4, alpha=8.0), seed, head=None if role == "policy" else "last")
            stir(trunk, role, seed)
        return trunk

    return build


@pytest.fixture
def rollouts(make_batch: Callable[..., TextBatch]) -> RolloutBatch:
    """Rows numbered by their group, with random returns."""
    text = make_batch(LENGTHS)
    returns = torch.randn(text.response_ids.shape, generator=torch.Generator().manual_seed(1))
    return RolloutBatch(**vars(text), group_ids=torch.arange(len(text)), returns=returns)


@pytest.fixture
def pairs(make_batch: Callable[..., TextBatch]) -> PreferenceBatch:
    """Four groups of two completions each, of unlike lengths."""
    rows = torch.arange(8)
    return PreferenceBatch(make_batch(LENGTHS), rows // 2, chosen=rows[::2], rejected=rows[1::2])


@pytest.fixture
def make_rows() -> Callable[..., TokenRows]:
    """Makes random demonstrations of unlike lengths as ids; packed into rows of a width, if it is not 0."""

    def make(width: int = 0, lengths: Sequence[tuple[int, int]] = LENGTHS, seed: int = 0) -> TokenRows:
        generator = torch.Generator().manual_seed(seed)
        rows = TokenRows(pad_id=256, row_width=width)
        for prompt, response in lengths:
            ids = torch.randint(256, (prompt + response,), generator=generator).tolist()
            rows.add(ids[:prompt], ids[prompt:])
        return rows

    return make
