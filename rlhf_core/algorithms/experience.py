"""What an on-policy algorithm learns from: sample, score, log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.artifacts import derive_seed
from rlhf_core.batch import RolloutBatch, collate_completions
from rlhf_core.generation import Generator, Sampling, complete
from rlhf_core.metrics import timed
from rlhf_core.records import Completion, Prompt, StopReason
from rlhf_core.rewards import RewardSource
from rlhf_core.settings import exact_div
from rlhf_core.text_statistics import distinct, duplicates, repeated, self_bleu
from rlhf_core.trunk import Trunk


@dataclass(frozen=True)
class PromptStream:
    """The prompts of each step: a new order in every turn through the pool, a pure function of the step."""

    prompts: Sequence[Prompt]
    seed: int
    rollouts_per_step: int
    completions_per_prompt: int

    def step(self, step: int) -> list[Prompt]:
        """The prompts of one step."""
        size = exact_div(
            self.rollouts_per_step, self.completions_per_prompt, "rollouts over completions_per_prompt"
        )
        positions = range(step * size, (step + 1) * size)
        return [self._at(*divmod(position, len(self.prompts))) for position in positions]

    def _at(self, turn: int, place: int) -> Prompt:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "prompts", turn))
        return self.prompts[int(torch.randperm(len(self.prompts), generator=generator)[place])]


@dataclass(frozen=True)
class Experience:
    """One step's completions and their batch."""

    completions: list[Completion]
    batch: RolloutBatch
    entropy: Tensor
    """[B, T] of the policy's distribution at each token, at the sampling temperature."""
    per_token: Tensor | None = None
    """[B, T] of a reward source that tells tokens apart."""

    def stops(self) -> dict[str, float]:
        """Shares of the reasons why completions ended, and their mean length in tokens."""
        total = len(self.completions)
        shares = {f"rollout/stop.{r}": sum(c.stop is r for c in self.completions) / total for r in StopReason}
        return {**shares, "rollout/response_length": float(self.batch.response_mask.sum()) / total}

    def sameness(self) -> dict[str, float]:
        """How much the completions repeat each other and themselves, by token ids, the end token left out."""
        rows = [c.response_ids[:-1] if c.stop is StopReason.EOS else c.response_ids for c in self.completions]
        return {
            **{f"rollout/distinct_{n}": distinct(rows, n) for n in (1, 2, 3)},
            "rollout/self_bleu": self_bleu(rows),
            "rollout/duplicates": duplicates(rows),
            "rollout/repetition": sum(map(repeated, rows)) / len(rows),
        }


@torch.no_grad()
def collect_experience(
    trunk: Trunk,
    generator: Generator,
    prompts: Sequence[Prompt],
    completions_per_prompt: int,
    reward: RewardSource,
    sampling: Sampling,
    seed: int,
    times: dict[str, float],
    reference: str = "reference",
) -> Experience:
    """Sample from the policy, score, and take policy and reference log-probabilities by one forward path."""
    seeds = [
        [derive_seed(seed, "row", i, k) for k in range(completions_per_prompt)] for i in range(len(prompts))
    ]
    with timed(times, "time/sample_seconds"):
        completions = complete(generator, trunk, "policy", prompts, seeds, sampling)
    with timed(times, "time/score_seconds"):
        scored = reward.score(completions)
    scores = scored.total.to(trunk.device)
    text = collate_completions(completions, trunk.codec.pad_id, trunk.device)
    with timed(times, "time/logprobs_seconds"):
        with trunk.role("policy"):
            logprobs, entropy = trunk.logprobs(text, sampling.temperature, with_entropy=True)
        with trunk.role(reference):
            ref_logprobs, _ = trunk.logprobs(text, sampling.temperature)
    assert entropy is not None
    group_ids = torch.arange(len(prompts), device=trunk.device).repeat_interleave(completions_per_prompt)
    batch = RolloutBatch(
        text.query_ids,
        text.query_lengths,
        text.response_ids,
        text.response_mask,
        group_ids,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        scores=scores,
    )
    per_token = None if scored.per_token is None else scored.per_token.to(trunk.device)
    return Experience(completions, batch, entropy, per_token)
