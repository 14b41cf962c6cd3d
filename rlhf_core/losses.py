"""What an update minimises: policy, value and pairwise losses, each with its diagnostics beside it.

A loss is a sum over the micro-batch divided by `denom`, the token or pair count of the whole *minibatch*: the
gradients of micro-batches add up to that of the minibatch, however it was cut. Diagnostics are sums over the
micro-batch, with their `count`: add them up, then divide.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.kl import KLEstimator, kl_per_token
from rlhf_core.tensors import masked_sum, zero_masked


def ppo_policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_range: float,
    denom: float | Tensor,
    dual_clip: float | None = None,
    max_log_ratio: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gives PPO's clipped surrogate, to be minimised (Schulman et al., 2017).

    sum of max(-A * ratio, -A * clip(ratio, 1 - clip_range, 1 + clip_range)) / denom over the response tokens,
    ratio = exp(new_logprobs - logprobs). Beyond `max_log_ratio` the ratio is held and gives no gradient, so
    that one absurd token cannot overflow the batch. All tensors [B, T].

    `dual_clip` c > 1 bounds what a token of negative advantage can cost by -c * A: without it the loss of a
    token that became far likelier has no bound (Ye et al., 2020, eq. 5).

    Diagnostics: `clipfrac`, tokens whose clipped term is the larger; `approxkl` of the update; `ratio`; with
    `dual_clip`, `dual_clipfrac`, tokens that it bounds.
    """
    log_ratio = zero_masked(new_logprobs - logprobs, response_mask).clamp(-max_log_ratio, max_log_ratio)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    losses = torch.maximum(unclipped, clipped)
    diagnostics = {"clipfrac": masked_sum(clipped > unclipped, response_mask)}
    if dual_clip is not None:
        bound = -dual_clip * advantages
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
        diagnostics["dual_clipfrac"] = masked_sum(bounded, response_mask)
    approxkl = kl_per_token(logprobs, new_logprobs, response_mask, KLEstimator.K3)
    return masked_sum(losses, response_mask) / denom, {
        **diagnostics,
        "approxkl": approxkl.sum().detach(),
        "ratio": masked_sum(ratio, response_mask).detach(),
        "count": response_mask.sum(),
    }


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    clip_range: float | None,
    denom: float | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gives half the squared error of the values, the worse of plain and clipped.

    sum of 0.5 * max((V_new - R)^2, (V_clipped - R)^2) / denom over the response tokens, where V_clipped is
    V_new held within `clip_range` of the values at sampling time; None switches clipping off. All [B, T].

    Diagnostics: `clipfrac`, tokens whose clipped term is the larger; `error`, the plain squared error.
    """
    new_values, values = zero_masked(new_values, response_mask), zero_masked(values, response_mask)
    returns = zero_masked(returns, response_mask)
    unclipped = (new_values - returns).square()
    if clip_range is None:
        clipped = unclipped
    else:
        clipped = (values + (new_values - values).clamp(-clip_range, clip_range) - returns).square()
    loss = 0.5 * masked_sum(torch.maximum(unclipped, clipped), response_mask) / denom
    return loss, {
        "clipfrac": masked_sum(clipped > unclipped, response_mask),
        "error": unclipped.sum().detach(),
        "count": response_mask.sum(),
    }


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    denom: float | Tensor,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    center_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gives the negative log-likelihood of the preferences under the Bradley-Terry model.

    sum of w * (-log sigmoid(chosen - rejected) + center_coef * (chosen + rejected)^2) / denom, scores [P].
    `label_smoothing` is the believed share of flipped labels, whose likelihood is mixed in. The last term
    keeps the scores, of which only differences are learned, around 0 (Eisenstein et al., 2023). `weights` [P]
    default to 1; with weights, `denom` is their sum over the minibatch.

    Diagnostics, all unweighted: `accuracy`, pairs in the right order, ties counting half; `margin`.
    """
    chosen_scores, rejected_scores = chosen_scores.float(), rejected_scores.float()
    margin = chosen_scores - rejected_scores
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    losses = losses + center_coef * (chosen_scores + rejected_scores).square()
    if weights is not None:
        losses = losses * weights
    return losses.sum() / denom, {
        "accuracy": ((margin > 0).float() + 0.5 * (margin == 0).float()).sum(),
        "margin": margin.sum().detach(),
        "count": torch.tensor(len(margin), device=margin.device),
    }
