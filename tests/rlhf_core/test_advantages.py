import pytest
import torch
from torch import tensor

from rlhf_core.advantages import gae, token_rewards, token_scores
from tests.reference import gae_by_definition

NAN = float("nan")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_token_rewards_by_hand() -> None:
    # -0.5 * kl everywhere, and the score on the last token: -0.5 * 4 + 10 = 8, -0.5 * 2 - 3 = -4.
    mask = tensor([[True, True, False], [True, False, False]])
    earned = token_scores(tensor([10.0, -3.0]), None, mask)
    assert earned.tolist() == [[0, 10, 0], [-3, 0, 0]]
    rewards = token_rewards(earned, tensor([[2.0, 4.0, NAN], [2.0, NAN, NAN]]), mask, 0.5)
    assert rewards.tolist() == [[-1, 8, 0], [-4, 0, 0]]


def test_scores_a_token_stay_where_they_are_earned_and_the_rest_falls_on_the_last_one() -> None:
    # 1 + 2 of 10 are earned before, so 10 - 3 = 7 at the last token; the second row's tokens earn all of it.
    mask = tensor([[True, True, True], [True, True, False]])
    per_token = tensor([[1.0, 2.0, 0.0], [-1.0, 4.0, NAN]])
    earned = token_scores(tensor([10.0, 3.0]), per_token, mask)
    assert earned.tolist() == [[1, 2, 7], [-1, 4, 0]]
    # GAE with gamma = lam = 1 and no critic: what is still to be earned.
    _, returns = gae(earned, torch.zeros(2, 3), mask, 1.0, 1.0)
    assert returns.tolist() == [[10, 9, 7], [3, 4, 0]]


def test_without_kl_only_the_last_token_is_rewarded(generator: torch.Generator) -> None:
    lengths = tensor([1, 4, 7, 3])
    mask = torch.arange(7) < lengths[:, None]
    earned = token_scores(tensor([1.0, 2.0, 3.0, 4.0]), None, mask)
    rewards = token_rewards(earned, torch.randn(4, 7, generator=generator), mask, kl_coef=0.0)
    assert rewards.nonzero().tolist() == [[0, 0], [1, 3], [2, 6], [3, 2]]
    assert rewards.sum(-1).tolist() == [1, 2, 3, 4]


def test_a_completion_without_tokens_has_nowhere_to_put_its_score() -> None:
    mask = tensor([[True, True], [False, False]])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        token_scores(torch.ones(2), None, mask)


def test_gae_by_hand() -> None:
    # gamma = lam = 1/2, rewards 1 and 2, values 4 and 8:
    # delta_1 = 2 - 8 = -6, A_1 = -6; delta_0 = 1 + 4 - 4 = 1, A_0 = 1 + (-6) / 4 = -0.5.
    mask = tensor([[True, True, False]])
    advantages, returns = gae(tensor([[1.0, 2.0, NAN]]), tensor([[4.0, 8.0, NAN]]), mask, 0.5, 0.5)
    assert advantages.tolist() == [[-0.5, -6, 0]]
    assert returns.tolist() == [[3.5, 2, 0]]


def test_with_gamma_and_lam_1_the_return_is_the_sum_of_rewards_to_come() -> None:
    rewards = tensor([[1.0, 2.0, 3.0, 4.0]])
    _, returns = gae(rewards, tensor([[9.0, -5.0, 2.0, 7.0]]), torch.ones(1, 4, dtype=torch.bool), 1.0, 1.0)
    assert returns.tolist() == [[10, 9, 7, 4]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0), (0.99, 1.0)])
def test_gae_equals_its_definition_on_masks_with_gaps(
    gamma: float, lam: float, generator: torch.Generator
) -> None:
    rewards = torch.randn(12, 9, generator=generator)
    values = torch.randn(12, 9, generator=generator)
    mask = torch.rand(12, 9, generator=generator) < 0.6
    mask[0], mask[1] = True, False
    expected = gae_by_definition(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam)
    computed = gae(rewards, values, mask, gamma, lam)
    for ours, definition in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, tensor(definition), rtol=1e-5, atol=1e-6)
        assert (ours[~mask] == 0).all()


def test_gae_ignores_padding_to_the_bit(generator: torch.Generator) -> None:
    rewards = torch.randn(4, 6, generator=generator)
    values = torch.randn(4, 6, generator=generator)
    mask = torch.arange(6) < tensor([6, 4, 1, 3])[:, None]
    junk, off = torch.full((4, 100), NAN), torch.zeros(4, 100, dtype=torch.bool)
    left = gae(
        torch.cat([junk, rewards], 1), torch.cat([junk, values], 1), torch.cat([off, mask], 1), 1, 0.95
    )
    right = gae(
        torch.cat([rewards, junk], 1), torch.cat([values, junk], 1), torch.cat([mask, off], 1), 1, 0.95
    )
    for plain, on_left, on_right in zip(gae(rewards, values, mask, 1, 0.95), left, right, strict=True):
        assert torch.equal(on_left[:, 100:], plain) and (on_left[:, :100] == 0).all()
        assert torch.equal(on_right[:, :6], plain) and (on_right[:, 6:] == 0).all()


def test_returns_are_advantages_plus_values_before_whitening(generator: torch.Generator) -> None:
    rewards = 5 + torch.randn(4, 6, generator=generator)
    values = torch.randn(4, 6, generator=generator)
    mask = torch.ones(4, 6, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(returns - values, advantages, rtol=1e-5, atol=1e-5)
    # Rewards of 5 a token, 6 tokens: raw advantages are nowhere near mean 0.
    assert advantages.mean() > 5


def test_advantages_and_rewards_carry_no_gradient() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    earned = token_scores(torch.ones(1, requires_grad=True), values, mask)
    rewards = token_rewards(earned, values, mask, 0.1)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    assert not (rewards.requires_grad or advantages.requires_grad or returns.requires_grad)
