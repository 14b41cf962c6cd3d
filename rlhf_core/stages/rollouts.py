"""rollouts: completions of the labelling prompts by the policy in service."""

from pydantic import Field

from rlhf_core.artifacts import derive_seed
from rlhf_core.generation import Sampling, complete
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.records import Completion, Prompt, StopReason
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows, write_rows
from rlhf_core.stages.context import StageContext

NAME, VERSION = "rollouts", 1


class Rollouts(Settings):
    """How the policy in service is sampled for labels."""

    completions_per_prompt: int = Field(default=4, ge=2)
    """Completions of each prompt; all their pairs can be compared."""
    sampling: Sampling = Sampling()
    """How each is drawn."""


def run(context: StageContext) -> None:
    """Write the completions."""
    settings = context.settings(Rollouts)
    prompts = read_rows(context.input("labelling_prompts") / "prompts.parquet", Prompt)
    trunk = context.trunk()
    trunk.load_role("policy", context.input("policy"))
    seeds = [
        [derive_seed(context.seed, p.id, k) for k in range(settings.completions_per_prompt)] for p in prompts
    ]
    completions = complete(
        HFGenerator(),
        trunk,
        "policy",
        prompts,
        seeds,
        settings.sampling,
        lambda done, total: context.sink.progress(done, total, "completions"),
    )
    with context.output("completions", "completions") as folder:
        write_rows(completions, folder / "completions.parquet")
    context.summary(shape_of(completions))


def shape_of(completions: list[Completion]) -> dict[str, float]:
    """Count, mean length in tokens and shares of stop reasons."""
    total = len(completions)
    return {
        "rollout/completions": float(total),
        "rollout/response_length": sum(len(c.response_ids) for c in completions) / total,
        **{
            f"rollout/stop.{reason}": sum(c.stop is reason for c in completions) / total
            for reason in StopReason
        },
    }
