"""The door to rewards: a number for each completion, from a rule or from a learned model."""

from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import Field

from rlhf_core.records import Completion
from rlhf_core.rewards.scores import Scores
from rlhf_core.rewards.sentiment import Sentiment
from rlhf_core.rewards.verifier import ExactMatch, LengthWindow, RegexMatch

__all__ = ["ExactMatch", "LengthWindow", "RegexMatch", "RewardSource", "RuleReward", "Scores", "Sentiment"]


class RewardSource(Protocol):
    """Scores completions; the score of one does not depend on what else is in the batch."""

    def score(self, items: Sequence[Completion]) -> Scores:
        """One number for each completion; raises if one cannot be scored."""


RuleReward = Annotated[ExactMatch | RegexMatch | LengthWindow | Sentiment, Field(discriminator="type")]
"""Rewards that need nothing but the completion: settings whose `build()` gives a `RewardSource`."""
