"""The door to the monitors of a policy update: settings that build what looks at every step.

What must be true in every correct run is checked in `invariants.py` and stops it; here are numbers that a
correct run can have and a good one has not. Watching draws no random number and changes no tensor.
"""

from rlhf_core.algorithms.monitors.looking import Monitor
from rlhf_core.algorithms.monitors.scores import GoldFalls, ScoreLength, ScoreOutliers
from rlhf_core.algorithms.monitors.texts import LengthDrift, ModeCollapse, Phrases, Truncation
from rlhf_core.algorithms.monitors.updates import (
    AdvantageExplosion,
    ApproxKL,
    ClipFraction,
    CriticDead,
    CriticDiverging,
    EntropyCollapse,
    NegativeKL,
    NonFinite,
    RisingKL,
)
from rlhf_core.algorithms.monitors.watcher import Watcher
from rlhf_core.settings import Settings

__all__ = ["Monitors", "Watcher"]


class Monitors(Settings):
    """What is watched for at every step, and what follows: `warn`, `stop` or `off` for each."""

    kl: RisingKL = RisingKL()
    """KL a token rises without bound."""
    negative_kl: NegativeKL = NegativeKL()
    """Mean KL below zero: samples and log-probabilities belong to two policies."""
    clip_fraction: ClipFraction = ClipFraction()
    """Much of an update is held by the clip."""
    approx_kl: ApproxKL = ApproxKL()
    """One step's updates go too far."""
    critic_dead: CriticDead = CriticDead()
    """The critic explains nothing, and learns nothing."""
    critic_diverging: CriticDiverging = CriticDiverging()
    """The critic's error explodes."""
    advantages: AdvantageExplosion = AdvantageExplosion()
    """Advantages explode."""
    entropy: EntropyCollapse = EntropyCollapse()
    """The policy becomes sure of every token."""
    mode_collapse: ModeCollapse = ModeCollapse()
    """Completions become all the same."""
    length: LengthDrift = LengthDrift()
    """Completions become much longer or shorter."""
    truncation: Truncation = Truncation()
    """More and more completions are cut."""
    gold: GoldFalls = GoldFalls()
    """Reward hacking: the proxy rises while the gold score falls."""
    score_length: ScoreLength = ScoreLength()
    """Reward hacking: length is what pays."""
    score_outliers: ScoreOutliers = ScoreOutliers()
    """Reward hacking: a few completions score far beyond all others."""
    phrases: Phrases = Phrases()
    """Reward hacking: phrases that pay come from nowhere."""
    non_finite: NonFinite = NonFinite()
    """Numbers that are no numbers, and steps skipped for them."""

    def by_name(self) -> dict[str, Monitor]:
        """Every monitor under its name, in order."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: monitor for name, monitor in found.items() if isinstance(monitor, Monitor)}

    def build(self) -> Watcher:
        """What looks at the steps of one stage, and has seen none."""
        return Watcher(self.by_name())
