"""The learned reward: a role of the trunk that reads a completion's last token."""

from collections.abc import Sequence

import torch

from rlhf_core.batch import collate_completions
from rlhf_core.records import Completion
from rlhf_core.rewards.scores import Scores
from rlhf_core.trunk import Trunk


class ModelReward:
    """A `RewardSource` that scores token ids as they were sampled; nothing is tokenised again."""

    def __init__(self, trunk: Trunk, role: str = "reward") -> None:
        self.trunk = trunk
        self.role = role

    @torch.no_grad()
    def score(self, items: Sequence[Completion]) -> Scores:
        """The normalised score of each completion, read at its last token."""
        batch = collate_completions(items, self.trunk.codec.pad_id, self.trunk.device)
        with self.trunk.role(self.role):
            return Scores(self.trunk.scores(batch).cpu())
