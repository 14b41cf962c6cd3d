"""policy_update: the champion learns from the reward model and becomes the candidate."""

from rlhf_core.algorithms import AlgorithmSettings
from rlhf_core.algorithms.ppo import PPO, PolicyData
from rlhf_core.generation import Sampling
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.records import Prompt
from rlhf_core.rewards import RuleReward
from rlhf_core.rewards.model import ModelReward
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows
from rlhf_core.stages.context import StageContext

NAME, VERSION = "policy_update", 2


class PolicyUpdate(Settings):
    """How the policy is changed."""

    algorithm: AlgorithmSettings = PPO()
    """The algorithm and its knobs."""
    sampling: Sampling = Sampling()
    """How rollouts are drawn; its temperature is that of every log-probability."""
    watched: RuleReward | None = None
    """A gold score to draw beside the proxy over the steps; looked at by people, seen by no loss."""


def run(context: StageContext) -> None:
    """Train, and write candidate and critic."""
    settings = context.settings(PolicyUpdate)
    trunk = context.trunk()
    trunk.load_role("policy", context.input("policy"))
    from_initial = trunk.is_initial("policy")
    if not from_initial:
        trunk.copy_role("policy", "start")
    trunk.load_role("reward", context.input("reward_model"))
    trunk.copy_role("reward", "value")  # the critic starts as the reward model
    data = PolicyData(
        prompts=read_rows(context.input("policy_prompts") / "prompts.parquet", Prompt),
        reward=ModelReward(trunk),
        generator=HFGenerator(),
        seed=context.seed,
        from_initial=from_initial,
        watched=settings.watched.build() if settings.watched else None,
    )
    ended = settings.algorithm.build(settings.sampling).train(trunk, data, context.sink)
    for role, output in (("policy", "policy"), ("value", "critic")):
        with context.output(output, output) as folder:
            trunk.save_role(role, folder)
    context.summary({"policy/ended_by_budget": float(ended == "kl_budget")})
