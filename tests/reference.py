"""The maths once more, slow and plain: definitions in Python floats, token by token, to test against.

Rows are lists, masks are lists of bool; nothing here uses torch or shares code with what it checks.
"""

from collections.abc import Callable, Sequence
from math import exp, log

Rows = Sequence[Sequence[float]]
Mask = Sequence[Sequence[bool]]


def gae_by_definition(
    rewards: Rows, values: Rows, mask: Mask, gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Gives (advantages, returns) as the double sum A_i = sum over j >= i of (gamma lam)^(j-i) delta_j."""
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        steps = [t for t, counts in enumerate(row) if counts]
        r, v = [rewards[b][t] for t in steps], [values[b][t] for t in steps] + [0.0]
        for i, t in enumerate(steps):
            advantages[b][t] = sum(
                (gamma * lam) ** (j - i) * (r[j] + gamma * v[j + 1] - v[j]) for j in range(i, len(steps))
            )
            returns[b][t] = advantages[b][t] + values[b][t]
    return advantages, returns


def categorical(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Gives the probabilities of softmax(logits / temperature)."""
    weights = [exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def categorical_entropy(p: Sequence[float]) -> float:
    """Gives the entropy of a categorical distribution, in nats."""
    return -sum(x * log(x) for x in p if x > 0)


def categorical_kl(p: Sequence[float], q: Sequence[float]) -> float:
    """Gives KL(p || q) of two categorical distributions, in nats."""
    return sum(x * log(x / y) for x, y in zip(p, q, strict=True) if x > 0)


def ppo_policy_loss(
    new_logprobs: Rows, logprobs: Rows, advantages: Rows, mask: Mask, clip_range: float, denom: float
) -> float:
    """Gives the clipped surrogate by cases: a gain stops counting where the ratio has moved far enough."""
    total = 0.0
    for new_row, row, advantage_row, mask_row in zip(new_logprobs, logprobs, advantages, mask, strict=True):
        for new, old, advantage, counts in zip(new_row, row, advantage_row, mask_row, strict=True):
            if not counts:
                continue
            ratio = exp(new - old)
            held = min(ratio, 1 + clip_range) if advantage > 0 else max(ratio, 1 - clip_range)
            total -= advantage * held
    return total / denom


def value_loss(
    new_values: Rows, values: Rows, returns: Rows, mask: Mask, clip_range: float | None, denom: float
) -> float:
    """Gives the clipped squared error by cases: the old value plus at most `clip_range` of the move."""
    total = 0.0
    for new_row, row, return_row, mask_row in zip(new_values, values, returns, mask, strict=True):
        for new, old, target, counts in zip(new_row, row, return_row, mask_row, strict=True):
            if not counts:
                continue
            error = (new - target) ** 2
            if clip_range is not None and abs(new - old) > clip_range:
                held = old + clip_range if new > old else old - clip_range
                error = max(error, (held - target) ** 2)
            total += error / 2
    return total / denom


def bradley_terry_loss(
    chosen: Sequence[float],
    rejected: Sequence[float],
    denom: float,
    weights: Sequence[float],
    label_smoothing: float,
    center_coef: float,
) -> float:
    """Gives the mean negative log-likelihood, pair by pair, from the probability that the chosen one wins."""
    total = 0.0
    for c, r, weight in zip(chosen, rejected, weights, strict=True):
        wins = exp(c) / (exp(c) + exp(r))
        likelihood = (1 - label_smoothing) * log(wins) + label_smoothing * log(1 - wins)
        total += weight * (center_coef * (c + r) ** 2 - likelihood)
    return total / denom


def gradient(f: Callable[[list[list[float]]], float], x: Rows, step: float = 1e-5) -> list[list[float]]:
    """Gives the central-difference gradient of f at x, one coordinate at a time."""

    def moved(b: int, t: int, by: float) -> float:
        rows = [list(row) for row in x]
        rows[b][t] += by
        return f(rows)

    return [
        [(moved(b, t, step) - moved(b, t, -step)) / (2 * step) for t in range(len(row))]
        for b, row in enumerate(x)
    ]
