"""Masked statistics, response masks and log-probabilities; knows shapes, but no model and no algorithm.

B completions, T response tokens, V vocabulary. Masks are bool and True counts: what is masked out is exactly
zero in a result, never enters a mean, and may hold anything (NaN too). All results are float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MIN_WHITENED = 8


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Gives x in float32 where the mask is True, and exactly zero elsewhere."""
    # Selected, not multiplied by the mask: 0 * NaN is NaN.
    return x.float().masked_fill(~mask, 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Gives the sum of x where the mask is True, over everything or along one dimension."""
    return zero_masked(x, mask).sum(dim)


def masked_mean(
    x: Tensor, mask: Tensor, dim: int | None = None, denom: float | Tensor | None = None
) -> Tensor:
    """Gives the mean of x where the mask is True, over everything or along one dimension.

    `denom` replaces the count of True places: a micro-batch divides by the count of its whole minibatch.
    Without it, a mean over nothing is refused.
    """
    if denom is None:
        denom = mask.sum(dim)
        if (denom == 0).any():
            raise ValueError(
                f"a mask of shape {tuple(mask.shape)} leaves nothing to average (dim={dim}): "
                "the mean of no values is not 0. Drop empty rows first, or pass denom."
            )
    return masked_sum(x, mask, dim) / denom


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Gives the variance of x where the mask is True, dividing by the count (no Bessel correction)."""
    return masked_mean((zero_masked(x, mask) - masked_mean(x, mask)).square(), mask)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Scales x to variance 1 and, unless `shift_mean` is False, to mean 0, over all True places.

    The statistics are those of the whole tensor, so hand in the global batch. Without the shift the mean
    stays what it was, and so keeps its sign, which is what rewards need.
    """
    count = int(mask.sum())
    if count < MIN_WHITENED:
        raise ValueError(
            f"cannot whiten {count} values, fewer than {MIN_WHITENED}: the mean and variance of so few are "
            "noise, and every value is scaled by it. Use a larger batch or switch whitening off."
        )
    mean = masked_mean(x, mask)
    white = (zero_masked(x, mask) - mean) * (masked_var(x, mask) + eps).rsqrt()
    return zero_masked(white if shift_mean else white + mean, mask)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Gives the share of the returns' variance that the values explain.

    1 - Var(returns - values) / Var(returns) over the True places:
    1 is a perfect critic, 0 one no better than a constant, below 0 one that is worse. Where all returns are
    equal the share is undefined and 0 is given: there was nothing to explain, and a NaN or -inf among the
    metrics would read as a broken critic.
    """
    residual = masked_var(zero_masked(returns, mask) - zero_masked(values, mask), mask)
    # Compared, not var == 0: rounding of the mean leaves equal returns a variance of about 1e-15.
    counted = returns[mask]
    if counted.amin() == counted.amax():
        return torch.zeros_like(residual)
    return 1.0 - residual / masked_var(returns, mask)


def mask_from_lengths(lengths: Tensor, width: int) -> Tensor:
    """Gives the bool mask [B, width] that is True on the first `lengths` [B] places of each row."""
    if ((lengths < 0) | (lengths > width)).any():
        raise ValueError(
            f"lengths {lengths.tolist()} do not fit a width of {width}: tokens would be cut off in silence. "
            "Pad the rows to the longest of them."
        )
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def mask_to_first_eos(response_ids: Tensor, eos_ids: Sequence[int], lengths: Tensor) -> Tensor:
    """Gives the response mask [B, T]: True up to and including the first end token, within `lengths` [B].

    `eos_ids` are all end ids of the model. A row without one counts in its whole length: it was cut off, not
    finished. The pad id plays no part, so it may be an end id as well.
    """
    within = mask_from_lengths(lengths, response_ids.shape[1])
    ends = torch.isin(response_ids, torch.tensor(list(eos_ids), device=response_ids.device)) & within
    ended_before = ends.cumsum(-1) - ends.long() > 0
    return within & ~ended_before


def last_true(mask: Tensor) -> Tensor:
    """Gives the index [B] of the last True place in each row of the mask [B, T]."""
    if not (filled := mask.any(-1)).all():
        raise ValueError(
            f"rows {(~filled).nonzero().flatten().tolist()} of the mask have no True place: a completion "
            "without a token has nowhere to put its score. Drop these rows, or sample at least one token."
        )
    return (mask * torch.arange(mask.shape[-1], device=mask.device)).amax(-1)


def unmasked(found: Tensor, mask: Tensor) -> Tensor:
    """Gives [B, T, k] with the numbers [N, k] at the True places of the mask [B, T], and zero elsewhere."""
    whole = found.new_zeros((*mask.shape, found.shape[-1]))
    whole[mask] = found
    return whole


def logprobs_from_logits(
    logits: Tensor, ids: Tensor, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Gives log p(ids) [...] and, if asked, the entropy [...] of p = softmax(logits [..., V] / temperature).

    The only place where logits become log-probabilities, so that sampling, reference, update and entropy
    share one temperature. Differentiable. Works on float32 copies of all logits it is handed: bring chunks.
    """
    # log_softmax goes row by row. logsumexp splits a lone row of a large vocabulary over the threads and sums
    # it in another order than the same row among others; a row must not depend on its neighbours.
    all_logprobs = (logits.float() / temperature).log_softmax(-1)
    logprobs = all_logprobs.gather(-1, ids[..., None]).squeeze(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1) if with_entropy else None
    return logprobs, entropy
