"""comparison: candidate against champion and against the initial policy, paired on the same items."""

import torch

from rlhf_core.artifacts import derive_seed
from rlhf_core.batch import collate_completions
from rlhf_core.evals.held_out import Sampled, means, paired_differences
from rlhf_core.evals.win_rate import WinRate
from rlhf_core.gates import Estimate
from rlhf_core.metrics import clustered_mean
from rlhf_core.records import Measurement
from rlhf_core.rewards.model import ModelReward
from rlhf_core.settings import Settings
from rlhf_core.sources import write_rows
from rlhf_core.stages.context import StageContext
from rlhf_core.stages.measurement import Measured
from rlhf_core.trunk import Trunk

NAME, VERSION = "comparison", 2
WITH_INTERVAL = ("eval/win_rate", "eval/gold_minus_champion", "eval/gold_minus_initial")
"""Numbers whose intervals are told with the result, not in the report alone."""


class Compare(Settings):
    """How the two are compared."""

    win_rate: WinRate = WinRate()
    """Who judges between them."""
    temperature: float = 1.0
    """Of the held-out samples; KL between the policies is taken at it."""


class ComparisonReport(Settings):
    """Everything a gate can ask of a candidate."""

    metrics: dict[str, Estimate]


def run(context: StageContext) -> None:
    """Measure what needs both policies, and write it beside what was measured of each."""
    settings = context.settings(Compare)
    candidate, champion = Measured(context, "candidate"), Measured(context, "champion")
    initial = Measured(context, "initial")
    seed = derive_seed(context.seed, "bootstrap")
    trunk = context.trunk()
    wins = settings.win_rate.judge(candidate.sampled, champion.sampled, context.seed)
    scores = _by_reward_model(context, trunk, candidate, champion)
    metrics = {
        "eval/win_rate": Estimate.of(
            clustered_mean([w.value for w in wins], [w.prompt_id for w in wins], seed=seed)
        ),
        **{f"eval/{name}": estimate for name, estimate in candidate.numbers.items()},
        **_against(candidate, champion, "champion", seed),
        **_against(candidate, initial, "initial", seed),
        **{f"eval/{name}": estimate for name, estimate in means(scores, seed).items()},
        "eval/kl_to_champion": _kl_to_champion(context, trunk, settings, candidate, seed),
    }
    if "gold" in candidate.numbers:
        metrics["eval/gold_after"] = candidate.numbers["gold"]
        metrics["eval/gold_before"] = champion.numbers["gold"]
        metrics["eval/gold_initial"] = initial.numbers["gold"]
    with context.output("comparison", "comparison") as folder:
        (folder / "comparison.json").write_text(ComparisonReport(metrics=metrics).model_dump_json(indent=1))
        write_rows(wins, folder / "wins.parquet")
        write_rows(scores, folder / "scores.parquet")
    ends = {
        f"{name}_{end}": value
        for name in WITH_INTERVAL
        if name in metrics
        for end, value in (("low", metrics[name].low), ("high", metrics[name].high))
    }
    context.summary({**{name: estimate.value for name, estimate in metrics.items()}, **ends})


def _against(candidate: Measured, other: Measured, who: str, seed: int) -> dict[str, Estimate]:
    """Paired differences of the means, and ratios of the numbers that are no means."""
    differences = paired_differences(candidate.rows, other.rows, seed)
    return {
        **{f"eval/{name}_minus_{who}": estimate for name, estimate in differences.items()},
        **{
            f"eval/{name}_over_{who}": Estimate.exactly(
                candidate.numbers[name].value / other.numbers[name].value
            )
            for name in ("perplexity", "distinct_2", "response_length")
            if other.numbers[name].value > 0
        },
    }


@torch.no_grad()
def _by_reward_model(
    context: StageContext, trunk: Trunk, candidate: Measured, champion: Measured
) -> list[Measurement]:
    """The proxy's score of every completion of both: for looking, never for a gate."""
    trunk.load_role("reward", context.input("reward_model"))
    reward = ModelReward(trunk)
    return [
        Measurement(metric=metric, item=c.id, prompt_id=c.prompt_id, value=value)
        for metric, completions in (
            ("proxy_after", candidate.sampled.completions),
            ("proxy_before", champion.sampled.completions),
        )
        for c, value in zip(completions, reward.score(completions).total.tolist(), strict=True)
    ]


@torch.no_grad()
def _kl_to_champion(
    context: StageContext, trunk: Trunk, settings: Compare, candidate: Measured, seed: int
) -> Estimate:
    """Of the candidate's samples; where the champion is the initial policy, that was measured already."""
    sampled = candidate.sampled
    clusters = [completion.prompt_id for completion in sampled.completions]
    if context.job.inputs["champion"] == context.job.inputs["initial"]:
        return Estimate.of(clustered_mean(sampled.kl_to_initial, clusters, seed=seed))
    trunk.load_role("start", context.input("champion_policy"))
    kl = kl_to(trunk, "start", sampled, settings.temperature)
    return Estimate.of(clustered_mean(kl, clusters, seed=seed))


def kl_to(trunk: Trunk, role: str, sampled: Sampled, temperature: float) -> list[float]:
    """Of each completion, in nats: sum of log pi(token) - log role(token), pi the policy that sampled."""
    batch = collate_completions(sampled.completions, trunk.codec.pad_id, trunk.device)
    with trunk.role(role):
        logprobs, _ = trunk.logprobs(batch, temperature)
    return [own - other for own, other in zip(sampled.logprob, logprobs.sum(-1).tolist(), strict=True)]
