"""What is added to a score before it is learned from; all of it judged on the completion alone."""

from collections.abc import Sequence
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlhf_core.records import Completion, StopReason
from rlhf_core.settings import Settings


class ShapingKnobs(Settings):
    """The knobs between the reward source's score and the reward; as shipped they change nothing."""

    score_clip: float | None = Field(default=None, gt=0)
    """Scores are held between minus and plus this, in units of the normalised reward; null does not clip."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Subtracted where a completion was cut off before an end token."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Subtracted for every response token."""
    length_window: tuple[int, int] | None = None
    """Fewest and most response tokens that `window_penalty` leaves alone."""
    window_penalty: float = Field(default=0.0, ge=0)
    """Subtracted for every token outside of `length_window`: too many or missing."""
    whiten_rewards: bool = False
    """Rewards, KL penalty included, are scaled to deviation 1 over the batch; their mean keeps its sign."""

    @model_validator(mode="after")
    def _window(self) -> Self:
        if (self.length_window is None) != (self.window_penalty == 0):
            raise ValueError(
                f"length_window {self.length_window} with window_penalty {self.window_penalty}: the one "
                "means nothing without the other. Set both, or neither."
            )
        if self.length_window and not 0 <= self.length_window[0] <= self.length_window[1]:
            raise ValueError(f"length_window {self.length_window}: give the fewest tokens, then the most")
        return self

    def shape(self, scores: Tensor, completions: Sequence[Completion]) -> Tensor:
        """[B] what each completion earns: its score, clipped, less its penalties."""
        lengths = torch.tensor([len(c.response_ids) for c in completions], device=scores.device)
        cut = torch.tensor([c.stop is not StopReason.EOS for c in completions], device=scores.device)
        shaped = scores if self.score_clip is None else scores.clamp(-self.score_clip, self.score_clip)
        shaped = shaped - self.missing_eos_penalty * cut - self.length_penalty * lengths
        if self.length_window:
            fewest, most = self.length_window
            outside = (fewest - lengths).clamp(min=0) + (lengths - most).clamp(min=0)
            shaped = shaped - self.window_penalty * outside
        return shaped
