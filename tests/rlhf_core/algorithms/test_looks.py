"""What is kept of a step to be looked at is what was learned from."""

from collections.abc import Callable

import pytest

from rlhf_core.algorithms.looks import NUM_DRAWN, is_looked_at, looks
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.generation import Sampling
from rlhf_core.trunk import Trunk


def test_the_first_step_the_last_and_every_fourth_are_looked_at() -> None:
    assert [step for step in range(11) if is_looked_at(step, 11)] == [0, 4, 8, 10]


def test_the_first_rows_and_the_extremes_are_kept_with_their_tokens_numbers(
    make_roles: Callable[..., Trunk], make_data: Callable[..., PolicyData]
) -> None:
    trunk = make_roles(policy_moved=True)
    settings = PPO(rollouts_per_step=30, num_minibatches=1)
    found = PPOAlgorithm(settings, Sampling(max_new_tokens=10)).experience(
        0, trunk, make_data(from_reference=False), {}
    )
    batch = found.batch
    assert batch.scores is not None and batch.kl is not None
    assert batch.advantages is not None and batch.values is not None
    kept = looks(3, found, trunk.codec)
    drawn = [completion.text for completion in found.completions[:NUM_DRAWN]]
    assert [one.text for one in kept][:NUM_DRAWN] == drawn
    assert max(one.score for one in kept) == pytest.approx(float(batch.scores.max()))
    assert min(one.score for one in kept) == pytest.approx(float(batch.scores.min()))
    assert max(one.kl for one in kept) == pytest.approx(float(batch.kl.sum(-1).max()))
    detailed = [one for one in kept if one.tokens]
    assert 1 <= len(detailed) <= 4 and kept[0].tokens
    for one in detailed:
        assert one.step == 3 and len(one.tokens) == one.length
        assert sum(token.kl for token in one.tokens) == pytest.approx(one.kl, abs=1e-5)
    first = kept[0].tokens
    assert [token.advantage for token in first] == pytest.approx(batch.advantages[0, : len(first)].tolist())
    assert [token.value for token in first] == pytest.approx(batch.values[0, : len(first)].tolist())
