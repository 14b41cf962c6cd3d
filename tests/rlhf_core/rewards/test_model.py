"""The learned reward: each completion's own number, in deviations of the reference samples."""

from collections.abc import Callable

import pytest
import torch

from rlhf_core.rewards.model import ModelReward
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.stages.chain import completion

ITEMS = [
    completion("p", k, text) for k, text in enumerate(["a", "quite another", "a third, and the longest"])
]


@pytest.fixture
def trunk(make_trunk: Callable[..., Trunk], stir: Callable[..., None]) -> Trunk:
    trunk = make_trunk()
    for seed, role in enumerate(("reward", "second")):
        trunk.add_role(role, Lora(rank=2), 0, head="last")
        stir(trunk, role, seed)
    trunk.add_role("policy", Lora(rank=2), 0)
    return trunk


def test_the_score_of_a_completion_does_not_depend_on_the_others(trunk: Trunk) -> None:
    together = ModelReward(trunk).score(ITEMS).total
    assert together.shape == (3,) and together.dtype == torch.float32
    alone = torch.cat([ModelReward(trunk).score([item]).total for item in ITEMS])
    assert torch.equal(together, alone)
    assert torch.equal(ModelReward(trunk).score(ITEMS[::-1]).total, together.flip(0))


def test_scores_are_shifted_and_scaled_by_the_head(trunk: Trunk) -> None:
    normalised = ModelReward(trunk).score(ITEMS).total
    shift, scale = float(trunk.heads["reward"].shift), float(trunk.heads["reward"].scale)
    assert (shift, scale) == pytest.approx((0.3, 1.7))
    trunk.heads["reward"].shift.zero_()
    trunk.heads["reward"].scale.fill_(1)
    raw = ModelReward(trunk).score(ITEMS).total
    torch.testing.assert_close(normalised, (raw - shift) / scale, rtol=1e-5, atol=1e-6)


def test_the_score_reads_the_ids_and_not_the_text(trunk: Trunk) -> None:
    other = [item.model_copy(update={"text": "something else"}) for item in ITEMS]
    assert torch.equal(ModelReward(trunk).score(other).total, ModelReward(trunk).score(ITEMS).total)
    cut = [item.model_copy(update={"response_ids": [*item.response_ids, 65]}) for item in ITEMS]
    assert not torch.equal(ModelReward(trunk).score(cut).total, ModelReward(trunk).score(ITEMS).total)


def test_completions_that_differ_by_their_end_token_alone_have_different_scores(trunk: Trunk) -> None:
    for end in (*trunk.codec.eos_ids, trunk.codec.pad_id):  # the pad too is a token where it was sampled
        ended = [item.model_copy(update={"response_ids": [*item.response_ids, end]}) for item in ITEMS]
        assert not (ModelReward(trunk).score(ended).total == ModelReward(trunk).score(ITEMS).total).any()


def test_scoring_asks_for_no_gradient_and_leaves_none(trunk: Trunk) -> None:
    assert not ModelReward(trunk).score(ITEMS).total.requires_grad
    assert all(p.grad is None for role in trunk.roles for p in trunk.parameters(role).values())


def test_a_role_answers_for_itself_and_one_without_a_head_not_at_all(trunk: Trunk) -> None:
    first, second = (ModelReward(trunk, role).score(ITEMS).total for role in ("reward", "second"))
    assert not torch.equal(first, second)
    with pytest.raises(RuntimeError, match="'policy' has no head"):
        ModelReward(trunk, "policy").score(ITEMS)


def test_a_reward_that_is_not_finite_raises(trunk: Trunk) -> None:
    trunk.heads["reward"].shift.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        ModelReward(trunk).score(ITEMS)
