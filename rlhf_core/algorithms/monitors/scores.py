"""Monitors of what the reward pays for: whether gold agrees, length, scores far from all others."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rlhf_core.algorithms.monitors.looking import MAX_EXAMPLES, Memory, Monitor, Reading, Seen, median, shown

FEWEST_STEPS = 6
"""Steps that a line needs: through fewer, chance alone draws a steep one too often."""
MAX_TREND = 99.0
"""What stands for a trend without any scatter."""
NORMAL_DEVIATION = 1.4826
"""Standard deviations in a median absolute deviation, where scores are normal."""


class GoldFalls(Monitor):
    """The proxy rises while an independent score falls."""

    trend: float = Field(default=3.0, gt=0)
    """Standard errors by which both must move, the proxy up and the gold down."""
    window: int = Field(default=8, ge=6)
    """Steps over which a line is laid; with fewer than six there is none."""

    why: ClassVar[str] = "The policy is learning what the reward model gets wrong (Gao et al., 2023)"
    advice: ClassVar[str] = (
        "raise `policy_update.algorithm.kl_coef`, or lower `num_steps` or `kl_budget` to end before gold "
        "bends; then label completions of this policy, so that the next reward model knows better"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """Once there are enough steps with both."""
        proxy, gold = seen.number("objective/scores"), seen.number("objective/gold")
        if proxy is None or gold is None:
            return []
        proxies, golds = memory.last("proxy", proxy, self.window), memory.last("gold", gold, self.window)
        if len(golds) < FEWEST_STEPS:
            return []
        rises = trend(proxies) > self.trend
        return [Reading("trend of gold in standard errors", trend(golds), -self.trend, "below", counts=rises)]


def trend(values: Sequence[float]) -> float:
    """The least-squares slope over the places of the values, in its own standard errors, within +-99.

    t = slope / se,   se^2 = sum of squared residuals / (n - 2) / Sxx;   n at least 3.
    """
    n, centre, mean = len(values), (len(values) - 1) / 2, sum(values) / len(values)
    sxx = sum((place - centre) ** 2 for place in range(n))
    slope = sum((place - centre) * (value - mean) for place, value in enumerate(values)) / sxx
    left = sum((value - mean - slope * (place - centre)) ** 2 for place, value in enumerate(values))
    if left <= 0 or slope == 0:
        return math.copysign(MAX_TREND, slope) if slope else 0.0
    return max(-MAX_TREND, min(MAX_TREND, slope / math.sqrt(left / (n - 2) / sxx)))


class ScoreLength(Monitor):
    """Scores follow length, and length follows scores."""

    correlation: float = Field(default=0.5, gt=0, lt=1)
    """Between score and length within a step, averaged over the window, in the direction length has moved."""
    drift: float = Field(default=1.25, gt=1)
    """How many times longer, or shorter, completions must have become."""
    window: int = Field(default=3, ge=1)
    """Steps averaged over."""

    why: ClassVar[str] = "The reward pays for length itself, and the policy has noticed"
    advice: ClassVar[str] = (
        "label pairs of like quality and unlike length, and compare `reward_model/length_accuracy` with "
        "`reward_model/accuracy`; raise `policy_update.algorithm.kl_coef` meanwhile"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """Nothing where all completions have one length or one score."""
        batch = seen.found.batch
        if batch.scores is None:
            return []
        lengths = batch.response_lengths.double()
        drift = float(lengths.mean()) / memory.first("length", float(lengths.mean()))
        found = correlation(batch.scores.double(), lengths)
        if found is None:
            return []
        recent = memory.last("correlation", found, self.window)
        paid = sum(recent) / len(recent) * (1 if drift >= 1 else -1)
        counts = len(recent) == self.window and max(drift, 1 / drift) >= self.drift
        what = "correlation of score and length in the direction length moved"
        return [Reading(what, paid, self.correlation, counts=counts)]


def correlation(x: Tensor, y: Tensor) -> float | None:
    """Pearson's correlation of two [B], none where one of them is constant or not finite."""
    if not bool(torch.isfinite(x).all()) or x.amin() == x.amax() or y.amin() == y.amax():
        return None
    a, b = x - x.mean(), y - y.mean()
    return float((a @ b) / (a @ a).sqrt() / (b @ b).sqrt())


class ScoreOutliers(Monitor):
    """A few completions score far beyond all others."""

    steps: int = Field(default=2, ge=1)
    """Steps in a row that must be beyond a limit before it says so."""
    deviations: float = Field(default=12.0, gt=1)
    """Robust standard deviations above the step's median that the highest score may lie."""

    why: ClassVar[str] = "A completion that pays far more than all others is more often a hole than good"
    advice: ClassVar[str] = (
        "read the examples; if they are not that good, label such completions, or lower "
        "`policy_update.algorithm.learning_rate` until the reward model knows them"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """By the median absolute deviation; by the standard one where half of the scores are equal."""
        scores = seen.found.batch.scores
        if scores is None or not bool(torch.isfinite(scores).all()):
            return []
        values = scores.tolist()
        middle = median(values)
        spread = NORMAL_DEVIATION * median([abs(value - middle) for value in values])
        spread = spread or float(scores.double().std(correction=0))
        if not spread > 0:
            return []
        highest = sorted(zip(values, range(len(values)), strict=True), reverse=True)
        examples = tuple(
            f"{score:.3g}: {shown(seen.found.completions[row].text)}"
            for score, row in highest[:MAX_EXAMPLES]
            if score - middle > self.deviations * spread
        )
        far = (highest[0][0] - middle) / spread
        return [
            Reading("highest score above the median in deviations", far, self.deviations, examples=examples)
        ]
