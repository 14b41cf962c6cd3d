"""From scores and KL to rewards, and from rewards and values to advantages: data, so no gradients."""

import torch
from torch import Tensor

from rlhf_core.tensors import last_true, zero_masked


@torch.no_grad()
def token_scores(scores: Tensor, per_token: Tensor | None, response_mask: Tensor) -> Tensor:
    """Gives where scores [B] are earned [B, T]: at each token what `per_token` says, at the last the rest.

    s_t = per_token_t + [t is the last response token] * (score - sum of per_token), so that they sum to the
    score. Without `per_token` [B, T] the whole score is earned at the last token, the last True place of
    `response_mask`: the EOS, or where the length cap fell.
    """
    earned = (
        zero_masked(per_token, response_mask)
        if per_token is not None
        else torch.zeros(response_mask.shape, device=response_mask.device)
    )
    rows = torch.arange(len(earned), device=earned.device)
    earned[rows, last_true(response_mask)] += scores.float() - earned.sum(-1)
    return earned


@torch.no_grad()
def token_rewards(earned: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """Gives the rewards [B, T]: what each token earned [B, T] less what its KL costs.

    r_t = s_t - kl_coef * kl_t
    """
    return zero_masked(earned - kl_coef * kl, response_mask)


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
