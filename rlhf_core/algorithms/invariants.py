"""Invariants that hold in every healthy run, checked while it runs: a broken one stops it with its reason."""

from typing import Protocol

import torch

from rlhf_core.algorithms.experience import Experience
from rlhf_core.tensors import last_true

FIRST_RATIO_TOLERANCE = {"cpu": 0.0}
"""Largest |log ratio| of a first minibatch; exact where kernels are, and rounding elsewhere."""


class BrokenInvariant(RuntimeError):
    """Something that is true in every correct run is not."""


class Start(Protocol):
    """What the checks need to know of the data."""

    @property
    def from_reference(self) -> bool:
        """The policy starts as the reference."""


class Watch:
    """The checks of one stage."""

    def __init__(self, device: str) -> None:
        self.tolerance = FIRST_RATIO_TOLERANCE.get(device, 1e-2)

    def experience(self, step: int, found: Experience, data: Start) -> None:
        """A batch of rollouts is what the method says."""
        batch = found.batch
        assert batch.logprobs is not None and batch.ref_logprobs is not None
        for i, completion in enumerate(found.completions):
            length = int(batch.query_lengths[i])
            if batch.query_ids[i, :length].tolist() != completion.prompt_ids:
                raise BrokenInvariant(
                    f"row {i} does not hold the prompt ids of {completion.id}: rows were mixed up"
                )
        if not torch.isfinite(batch.logprobs).all():
            raise BrokenInvariant(f"step {step}: log-probabilities are not finite; the policy is broken")
        if step == 0 and data.from_reference and not torch.equal(batch.logprobs, batch.ref_logprobs):
            worst = float((batch.logprobs - batch.ref_logprobs).abs().max())
            raise BrokenInvariant(
                "the policy starts as the reference, but its log-probabilities differ by up to "
                f"{worst:.2e} from the reference's: KL would be measured against something else. "
                "Check the reference and the role's weights."
            )
        self._score_position(found)

    def _score_position(self, found: Experience) -> None:
        """A source that scores whole completions is paid at the last response token alone."""
        batch = found.batch
        assert batch.token_scores is not None
        if found.per_token is not None:
            return
        elsewhere = batch.token_scores.clone()
        last = last_true(batch.response_mask)
        elsewhere[torch.arange(len(batch), device=elsewhere.device), last] = 0
        if elsewhere.any():
            row, token = divmod(int(elsewhere.abs().argmax()), elsewhere.shape[1])
            raise BrokenInvariant(
                f"row {row} earns {float(elsewhere[row, token]):.4f} at token {token}; its score belongs on "
                f"token {int(last[row])} alone"
            )

    def first_minibatch(self, step: int, found: dict[str, float]) -> None:
        """Before the first update of a batch, the policy is the one that sampled: every ratio is 1."""
        drift = found["policy/max_log_ratio"]
        if not drift <= self.tolerance:  # NaN too
            raise BrokenInvariant(
                f"step {step}: log ratios of the first minibatch reach {drift:.2e} where they must be 0: "
                "the update sees other log-probabilities than the rollout did (dtype, padding, dropout or "
                "weights differ)"
            )
