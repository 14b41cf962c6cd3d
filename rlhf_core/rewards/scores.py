"""What a reward source answers with, and the source that scores each completion on its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhf_core.records import Completion


@dataclass(frozen=True)
class Scores:
    """The numbers a reward source gives to B completions, checked to be there and finite for each of them."""

    total: torch.Tensor
    """[B] float32: the score of each whole completion, before any shaping."""
    per_token: torch.Tensor | None = None
    """[B, T] float32: what each response token adds, from a source that tells tokens apart."""

    def __post_init__(self) -> None:
        if self.total.dim() != 1:
            raise ValueError(
                f"scores have shape {list(self.total.shape)}: one number a completion is needed, [B]."
            )
        _check("scores", self.total)
        if self.per_token is None:
            return
        if self.per_token.dim() != 2 or len(self.per_token) != len(self.total):
            raise ValueError(
                f"per-token scores have shape {list(self.per_token.shape)} beside {len(self.total)} "
                f"completions: [{len(self.total)}, T] is needed, a row for each completion."
            )
        _check("per-token scores", self.per_token)


class PerCompletion:
    """A reward source that scores each completion by one rule, which sees nothing else of the batch."""

    def __init__(self, rule: Callable[[Completion], float]) -> None:
        self._rule = rule

    def score(self, items: Sequence[Completion]) -> Scores:
        """The rule's number for each completion, in the order given."""
        return Scores(torch.tensor([self._rule(item) for item in items], dtype=torch.float32))


def _check(what: str, numbers: torch.Tensor) -> None:
    if numbers.dtype != torch.float32:
        raise ValueError(
            f"{what} are {numbers.dtype}: they are kept in float32, whatever the trunk computes in."
        )
    rows = sorted(set((~numbers.isfinite()).nonzero()[:, 0].tolist()))
    if rows:
        raise ValueError(
            f"{what} are not finite in rows {rows} of {len(numbers)}: one such row would spoil the whole "
            "update. Look at these completions, and at the source that scored them."
        )
