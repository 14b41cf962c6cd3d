"""From scores and KL to rewards, and from rewards and values to advantages: data, so no gradients."""

import torch
from torch import Tensor

from rlhf_core.tensors import last_true, zero_masked


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """Gives the rewards [B, T]: the KL penalty at every token, plus the score [B] at the last one.

    r_t = -kl_coef * kl_t + [t is the last response token] * score
    The last token is the last True place of `response_mask`: the EOS, or where the length cap fell.
    """
    rewards = zero_masked(-kl_coef * kl, response_mask)
    rows = torch.arange(len(rewards), device=rewards.device)
    rewards[rows, last_true(response_mask)] += scores.float()
    return rewards


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016).

    A_t = delta_t + gamma * lam * A_{t+1},   delta_t = r_t + gamma * V_{t+1} - V_t,
    with V and A zero after the last response token. All tensors [B, T]; returns (advantages, returns), where
    returns = advantages + values. Masked tokens are no steps: t + 1 is the next True place, across any gap.
    """
    rewards, values = zero_masked(rewards, response_mask), zero_masked(values, response_mask)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        counts, value = response_mask[:, t], values[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(counts, value, next_value)
        next_advantage = torch.where(counts, advantage, next_advantage)
        advantages[:, t] = zero_masked(advantage, counts)
    return advantages, advantages + values
