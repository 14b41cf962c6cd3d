"""Estimates of KL divergence from the log-probabilities of sampled tokens; the sign is fixed here."""

from enum import StrEnum

from torch import Tensor

from rlhf_core.tensors import masked_mean, masked_sum, zero_masked


class KLEstimator(StrEnum):
    """How one sampled token estimates KL(policy || reference)."""

    K1 = "k1"
    """Unbiased and additive over a sequence, of either sign: log_ratio."""
    K2 = "k2"
    """Biased but never negative, with the gradient of the KL itself when used as a loss: log_ratio^2 / 2."""
    K3 = "k3"
    """Unbiased and never negative, but heavy-tailed: exp(-log_ratio) - 1 + log_ratio."""


def kl_per_token(
    logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor, estimator: KLEstimator
) -> Tensor:
    """Gives the KL estimate [B, T] of tokens sampled from the policy, positive on average as it moves away.

    log_ratio = logprobs - ref_logprobs. As a penalty inside the reward each estimator serves; as a loss, the
    gradient of k1 is zero on average and that of k3 is not the gradient of the KL.
    Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html
    """
    # Masked before the exponential, so that no inf from a masked token reaches a gradient.
    log_ratio = zero_masked(logprobs - ref_logprobs, response_mask)
    match estimator:
        case KLEstimator.K1:
            return log_ratio
        case KLEstimator.K2:
            return log_ratio.square() / 2
        case KLEstimator.K3:
            # expm1: near 0 both terms are far larger than their sum of about log_ratio^2 / 2.
            return (-log_ratio).expm1() + log_ratio


def approx_kl(new_logprobs: Tensor, logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Gives the mean per-token KL(old || new) of an update, from the tokens that the old policy sampled.

    mean of (ratio - 1) - log ratio with ratio = exp(new_logprobs - logprobs), which is k3 with the updated
    policy in the reference's place. Zero before the first step, and never negative.
    """
    return masked_mean(kl_per_token(logprobs, new_logprobs, response_mask, KLEstimator.K3), response_mask)


def sequence_kl(kl: Tensor, response_mask: Tensor) -> Tensor:
    """Gives the KL [B] of whole completions, which is what controllers and budgets are fed."""
    return masked_sum(kl, response_mask, dim=-1)
