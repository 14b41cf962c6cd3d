"""policy_update: the champion learns from the reward model and becomes the candidate."""

from typing import Literal

from rlhf_core.alarms import ENDED_BY_MONITOR
from rlhf_core.algorithms import AlgorithmSettings
from rlhf_core.algorithms.monitors import Monitors
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.ppo import PPO
from rlhf_core.generation import Sampling
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.records import Prompt
from rlhf_core.rewards import RuleReward
from rlhf_core.rewards.model import ModelReward
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows
from rlhf_core.stages.context import StageContext

NAME, VERSION = "policy_update", 3


class PolicyUpdate(Settings):
    """How the policy is changed."""

    algorithm: AlgorithmSettings = PPO()
    """The algorithm and its knobs."""
    sampling: Sampling = Sampling()
    """How rollouts are drawn; its temperature is that of every log-probability."""
    start_from: Literal["champion", "initial"] = "champion"
    """The policy that is changed: the one in service, or the initial one: the first on its trunk."""
    watched: RuleReward | None = None
    """A gold score to draw beside the proxy over the steps; looked at by people, seen by no loss."""
    monitors: Monitors = Monitors()
    """What is watched for at every step, and what follows."""


def run(context: StageContext) -> None:
    """Train, and write candidate, critic, what the monitors saw and why that step is the candidate."""
    settings = context.settings(PolicyUpdate)
    trunk = context.trunk()
    trunk.load_role("policy", context.input("policy"))
    algorithm = settings.algorithm
    starts_as_initial = trunk.is_initial("policy")
    algorithm.start_reference(trunk, context.input("initial_policy"), starts_as_initial)
    trunk.load_role("reward", context.input("reward_model"))
    algorithm.start_critic(trunk)
    monitors = settings.monitors.build()
    data = PolicyData(
        prompts=read_rows(context.input("policy_prompts") / "prompts.parquet", Prompt),
        reward=ModelReward(trunk),
        generator=HFGenerator(),
        seed=context.seed,
        from_reference=algorithm.reference == "champion" or starts_as_initial,
        watched=settings.watched.build() if settings.watched else None,
        texts=texts(context),
        monitors=monitors,
    )
    trained = algorithm.build(settings.sampling).train(trunk, data, context.sink, context.checkpoints)
    with context.output("critic", "critic") as folder:
        trunk.save_role(algorithm.critic_role, folder)
    trunk.heads.pop("policy", None)  # a shared critic's head is the critic's, not the candidate's
    with context.output("policy", "policy") as folder:
        trunk.save_role("policy", folder)
    context.write_json("monitors", "monitors", monitors.report())
    context.write_json("selection", "selection", trained.selection)
    context.summary(
        {
            "policy/ended_by_budget": float(trained.ended == "kl_budget"),
            "policy/ended_by_monitor": float(trained.ended.startswith(ENDED_BY_MONITOR)),
            "policy/candidate_step": float(trained.selection.step),
            **trained.metrics,
        }
    )


def texts(context: StageContext) -> list[Prompt]:
    """What the policy goes on predicting beside its updates, if there is such an input."""
    if "texts" not in context.job.inputs:
        return []
    return read_rows(context.input("texts") / "prompts.parquet", Prompt)
