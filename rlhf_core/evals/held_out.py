"""held_out: what a policy does on prompts that nothing was ever trained on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field

from rlhf_core.batch import collate_completions
from rlhf_core.gates import Estimate
from rlhf_core.generation import Generator, Sampling, complete
from rlhf_core.metrics import clustered_mean
from rlhf_core.records import Completion, Measurement, Prompt, StopReason
from rlhf_core.rewards import RuleReward, Sentiment
from rlhf_core.settings import Settings
from rlhf_core.text_statistics import distinct_n
from rlhf_core.trunk import Trunk


@dataclass(frozen=True)
class Sampled:
    """A policy's completions of the held-out prompts, with their log-probabilities."""

    completions: list[Completion]
    logprob: list[float]
    """Of each completion, in nats: sum of log pi(token), at the sampling temperature."""
    kl_to_initial: list[float]
    """Of each completion, in nats: sum of log pi(token) - log initial(token)."""
    base_nll: list[float]
    """Of each completion, in nats: minus its log-probability under the initial policy, at temperature 1."""


class HeldOut(Settings):
    """Sampling on held-out prompts, and what is measured on the samples."""

    completions_per_prompt: int = Field(default=1, ge=1)
    """Samples of each prompt; the same random numbers for every policy."""
    sampling: Sampling = Sampling()
    """How they are drawn."""
    gold: RuleReward | None = Sentiment()
    """The score that the annotator wants, where it is known; never a reward. null where people label."""

    def sample(
        self,
        trunk: Trunk,
        generator: Generator,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        progress: Callable[[int, int], None],
    ) -> Sampled:
        """Completions by the role policy, and what the two policies say of them."""
        completions = complete(generator, trunk, "policy", prompts, seeds, self.sampling, progress)
        batch = collate_completions(completions, trunk.codec.pad_id, trunk.device)
        temperature = self.sampling.temperature
        with torch.no_grad():
            with trunk.role("policy"):
                logprobs, _ = trunk.logprobs(batch, temperature)
            with trunk.role("reference"):
                initial, _ = trunk.logprobs(batch, temperature)
                plain = initial if temperature == 1.0 else trunk.logprobs(batch, 1.0)[0]
        return Sampled(
            completions,
            logprob=logprobs.sum(-1).tolist(),
            kl_to_initial=(logprobs - initial).sum(-1).tolist(),
            base_nll=(-plain).sum(-1).tolist(),
        )

    def measure(self, sampled: Sampled) -> list[Measurement]:
        """One row for each metric and completion."""
        completions = sampled.completions
        numbers: dict[str, list[float]] = {
            "kl_to_initial": sampled.kl_to_initial,
            "base_nll": sampled.base_nll,
            "response_length": [float(len(c.response_ids)) for c in completions],
            "stop_eos": [float(c.stop is StopReason.EOS) for c in completions],
        }
        if self.gold is not None:
            numbers["gold"] = self.gold.build().score(completions).total.tolist()
        return [
            Measurement(metric=metric, item=c.id, prompt_id=c.prompt_id, value=value)
            for metric, values in sorted(numbers.items())
            for c, value in zip(completions, values, strict=True)
        ]


def means(rows: Sequence[Measurement], seed: int) -> dict[str, Estimate]:
    """The mean of every metric with its interval, prompts being the clusters."""
    return {
        metric: Estimate.of(clustered_mean([r.value for r in found], [r.prompt_id for r in found], seed=seed))
        for metric, found in by_metric(rows).items()
    }


def paired_differences(
    rows: Sequence[Measurement], others: Sequence[Measurement], seed: int
) -> dict[str, Estimate]:
    """The mean of `rows` minus `others`, item by item, of every metric that both have."""
    before = {(row.metric, row.item): row.value for row in others}
    return {
        metric: Estimate.of(
            clustered_mean(
                [r.value - before[metric, r.item] for r in found], [r.prompt_id for r in found], seed=seed
            )
        )
        for metric, found in by_metric(rows).items()
        if all((metric, r.item) in before for r in found)
    }


def text_numbers(completions: Sequence[Completion], rows: Sequence[Measurement]) -> dict[str, float]:
    """Numbers that are not means over items: perplexity under the initial policy, and distinct-2."""
    nll = sum(row.value for row in rows if row.metric == "base_nll")
    tokens = sum(len(completion.response_ids) for completion in completions)
    return {
        "perplexity": math.exp(nll / tokens),
        "distinct_2": distinct_n([completion.text for completion in completions], 2),
    }


def by_metric(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """The rows of each metric, in their order."""
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        found.setdefault(row.metric, []).append(row)
    return found
