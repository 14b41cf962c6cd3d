"""The door to evaluations: numbers about one policy, item by item, and judgements between two."""

from typing import Protocol

from rlhf_core.evals.held_out import HeldOut, Sampled
from rlhf_core.evals.win_rate import WinRate
from rlhf_core.records import Measurement
from rlhf_core.settings import Settings


class PolicyEval(Protocol):
    """Measures one policy; what it gives is kept and compared item by item."""

    def measure(self, sampled: Sampled) -> list[Measurement]:
        """One row for each metric and item."""


class PairEval(Protocol):
    """Judges two policies on the same items; symmetric, and undecided between a policy and itself."""

    def judge(self, candidate: Sampled, champion: Sampled, seed: int) -> list[Measurement]:
        """One row for each item, 1 where the candidate is better, 0 where the champion is."""


class Evals(Settings):
    """What policies are measured by."""

    held_out: HeldOut = HeldOut()
    """Measured once for each policy, and kept."""
    win_rate: WinRate = WinRate()
    """Candidate against champion."""
