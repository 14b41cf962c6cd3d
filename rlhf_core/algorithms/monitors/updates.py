"""Monitors of the update itself: distance from the reference, size of the steps, critic, entropy."""

from typing import ClassVar

from pydantic import Field

from rlhf_core.algorithms.monitors.looking import Memory, Monitor, Reading, Seen, median

ENOUGH_STEPS = 3
"""Earlier steps that a median is taken of at least."""
MANY_STEPS = 20
"""Earlier steps that a median is taken of at most."""
CHANCE = 2.5
"""Standard errors below zero that chance does not reach."""


class RisingKL(Monitor):
    """KL to the reference goes up and does not level off."""

    per_token: float = Field(default=0.5, gt=0)
    """Nats a token that it may reach before its rise is an alarm."""
    window: int = Field(default=3, ge=1)
    """Steps over which it must have risen."""

    why: ClassVar[str] = (
        "The policy is leaving the text that reward model and reference know, where scores mean little, and "
        "the penalty does not hold it"
    )
    advice: ClassVar[str] = (
        "raise `policy_update.algorithm.kl_coef`, or lower `policy_update.algorithm.learning_rate`; a lower "
        "`policy_update.algorithm.kl_budget` ends a stage before it goes this far"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """KL a token by the plain log ratio, whatever estimates the penalty."""
        ratio = _log_ratio(seen)
        if ratio is None:
            return []
        recent = memory.last("kl", ratio[0], self.window + 1)
        rises = recent[-1] > recent[0]
        return [Reading("KL to the reference in nats a token", recent[-1], self.per_token, counts=rises)]


class NegativeKL(Monitor):
    """The mean KL of the samples is below zero by more than chance."""

    per_token: float = Field(default=0.05, gt=0)
    """Nats a token below zero that it may reach."""

    why: ClassVar[str] = (
        "KL is never negative, so the samples do not come from the policy whose log-probabilities are taken, "
        "and the penalty has become a bonus. Likely causes: a sampler that filters (top-k, top-p, a minimum "
        "length, a repetition penalty) or draws at another temperature; a sampler with older weights; "
        "padding or positions that differ between sampling and training; another reference than was meant"
    )
    advice: ClassVar[str] = (
        "sample from the whole distribution (no top-k, no top-p), at `policy_update.sampling.temperature`, "
        "with the policy's own weights; training on such samples makes it worse, so set "
        "`policy_update.monitors.negative_kl.action` to `stop` until it is found"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """KL a token by the plain log ratio: k2 and k3 are never negative and would hide this."""
        ratio = _log_ratio(seen)
        if ratio is None:
            return []
        per_token, highest_by_chance = ratio
        return [
            Reading(
                "mean KL to the reference in nats a token",
                per_token,
                -self.per_token,
                "below",
                counts=highest_by_chance < 0,
            )
        ]


def _log_ratio(seen: Seen) -> tuple[float, float] | None:
    """Mean log ratio a token, and the mean a completion with what chance could have taken from it."""
    batch = seen.found.batch
    if batch.logprobs is None or batch.ref_logprobs is None:
        return None
    tokens = seen.tokens(batch.logprobs - batch.ref_logprobs)
    if tokens is None:
        return None
    sums = (batch.logprobs - batch.ref_logprobs).float().sum(-1)
    error = float(sums.std()) / len(sums) ** 0.5 if len(sums) > 1 else 0.0
    return float(tokens.mean()), float(sums.mean()) + CHANCE * error


class ClipFraction(Monitor):
    """Much of an update is held by the clip."""

    share: float = Field(default=0.35, gt=0, lt=1)
    """Share of tokens whose clipped term is the larger that is too much."""

    why: ClassVar[str] = "Steps are so large that much of the batch gives no gradient any more"
    advice: ClassVar[str] = (
        "lower `policy_update.algorithm.learning_rate`, `num_epochs` or `num_minibatches`, or take more "
        "`rollouts_per_step`"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """The share of the step's minibatches together."""
        found = seen.number("policy/clipfrac")
        return [] if found is None else [Reading("clipped share of tokens", found, self.share)]


class ApproxKL(Monitor):
    """One step's updates carry the policy far from the one that sampled."""

    per_token: float = Field(default=0.2, gt=0)
    """Nats a token between the policy that sampled and the updated one."""

    why: ClassVar[str] = (
        "A single optimiser step moves the policy so far that the rollouts say nothing of where it lands; "
        "`target_kl` ends the epochs only after it has happened"
    )
    advice: ClassVar[str] = (
        "lower `policy_update.algorithm.learning_rate`, or let it warm up (`warmup_steps`); more "
        "`rollouts_per_step` make steps less noisy"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """The largest of the step's minibatches."""
        found = seen.number("policy/approxkl_max")
        return (
            []
            if found is None
            else [Reading("approximate KL of an update in nats a token", found, self.per_token)]
        )


class CriticDead(Monitor):
    """The critic stays worse than a constant and gets no better."""

    explained_variance: float = Field(default=-0.1, lt=1)
    """What it must explain at least once in the window."""
    window: int = Field(default=6, ge=2)
    """Steps looked back."""
    gain: float = Field(default=0.1, ge=0)
    """What the window's later half must gain on its earlier half for the critic to count as learning."""

    why: ClassVar[str] = "The critic adds noise to every advantage instead of taking it away"
    advice: ClassVar[str] = (
        "raise `policy_update.algorithm.value_learning_rate`, widen `value_clip_range` or set it to null, "
        "and look whether `optim/value_grad_norm` is 0"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """The best of the window, once there is a whole one."""
        found = seen.number("value/explained_variance")
        if found is None:
            return []
        recent, half = memory.last("explained", found, self.window), self.window // 2
        if len(recent) < self.window:
            return []
        gained = sum(recent[-half:]) / half - sum(recent[:half]) / half
        what = f"highest explained variance of {self.window} steps"
        return [
            Reading(what, max(recent), self.explained_variance, "below", counts=gained < self.gain),
        ]


class CriticDiverging(Monitor):
    """The critic's error grows far beyond what it was."""

    factor: float = Field(default=8.0, gt=1)
    """Times the median squared error of earlier steps."""

    why: ClassVar[str] = "Values run away from the returns, and the advantages with them"
    advice: ClassVar[str] = (
        "lower `policy_update.algorithm.value_learning_rate` or `max_grad_norm`, or narrow `value_clip_range`"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """This step's squared error against earlier steps', once there are some."""
        error, explained = seen.number("value/error"), seen.number("value/explained_variance")
        if error is None or explained is None:
            return []
        *earlier, now = memory.last("error", error, MANY_STEPS)
        if len(earlier) < ENOUGH_STEPS or not (usual := median(earlier)) > 0:
            return []
        return [Reading("value error over its median", now / usual, self.factor, counts=explained < 0)]


class AdvantageExplosion(Monitor):
    """Advantages grow far beyond what they were, or a few tokens have most of them."""

    factor: float = Field(default=5.0, gt=1)
    """Times the median deviation of earlier steps' raw advantages."""
    largest: float = Field(default=15.0, gt=1)
    """Standard deviations that the largest whitened advantage may have."""

    why: ClassVar[str] = "A few tokens, or a reward on a new scale, decide the whole update"
    advice: ClassVar[str] = (
        "look at the scores of this step for one that is far from all others and mend the reward; then lower "
        "`policy_update.algorithm.value_learning_rate` or `lam`, or take more `rollouts_per_step`"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """Returns minus values are the raw advantages; the batch's own are whitened."""
        batch, readings = seen.found.batch, []
        whitened = seen.tokens(batch.advantages)
        if whitened is not None:
            readings.append(Reading("largest whitened advantage", float(whitened.abs().max()), self.largest))
        if batch.returns is not None and batch.values is not None:
            raw = seen.tokens(batch.returns - batch.values)
            if raw is not None and len(raw) > 1:
                *earlier, now = memory.last("deviation", float(raw.std()), MANY_STEPS)
                if len(earlier) >= ENOUGH_STEPS and (usual := median(earlier)) > 0:
                    readings.append(
                        Reading("deviation of raw advantages over its median", now / usual, self.factor)
                    )
        return readings


class EntropyCollapse(Monitor):
    """The policy becomes sure of every token."""

    steps: int = Field(default=2, ge=1)
    """Steps in a row that must be beyond the limit before it says so."""
    share: float = Field(default=0.4, gt=0, lt=1)
    """Of the first step's entropy, what must be left."""

    why: ClassVar[str] = "A policy that is sure of every token samples nothing new, and cannot learn further"
    advice: ClassVar[str] = (
        "raise `policy_update.algorithm.kl_coef`, lower `policy_update.algorithm.learning_rate` or "
        "`num_steps`, and look at what the reward pays for"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """Against the policy that the stage began with."""
        found = seen.number("objective/entropy")
        if found is None or not (first := memory.first("entropy", found)) > 0:
            return []
        return [Reading("entropy over the first step's", found / first, self.share, "below")]


class NonFinite(Monitor):
    """Numbers that are no numbers."""

    why: ClassVar[str] = (
        "Optimiser steps whose gradients are not finite are skipped and counted; more than a few end the "
        "stage as failed, and nothing is promoted"
    )
    advice: ClassVar[str] = (
        "lower `policy_update.algorithm.learning_rate`, or look at the scores of this step; in bfloat16, try "
        "`bootstrap.dtype` float32 in a new project"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """Steps that were skipped, and metrics that are not finite, by name."""
        skipped = max(
            (value for name, value in seen.metrics.items() if name.endswith("_skipped")), default=0.0
        )
        broken = tuple(sorted(name for name in seen.metrics if seen.number(name) is None))
        return [
            Reading("share of optimiser steps skipped", skipped, 0.0),
            Reading("number of metrics that are not finite", float(len(broken)), 0.0, examples=broken[:8]),
        ]
