"""policy_update: the champion learns from the reward model and becomes the candidate."""

from rlhf_core.alarms import ENDED_BY_MONITOR
from rlhf_core.algorithms import AlgorithmSettings
from rlhf_core.algorithms.monitors import Monitors
from rlhf_core.algorithms.ppo import PPO, PolicyData
from rlhf_core.generation import Sampling
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.records import Prompt
from rlhf_core.rewards import RuleReward
from rlhf_core.rewards.model import ModelReward
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows
from rlhf_core.stages.context import StageContext
from rlhf_core.trunk import Trunk

NAME, VERSION = "policy_update", 3


class PolicyUpdate(Settings):
    """How the policy is changed."""

    algorithm: AlgorithmSettings = PPO()
    """The algorithm and its knobs."""
    sampling: Sampling = Sampling()
    """How rollouts are drawn; its temperature is that of every log-probability."""
    watched: RuleReward | None = None
    """A gold score to draw beside the proxy over the steps; looked at by people, seen by no loss."""
    monitors: Monitors = Monitors()
    """What is watched for at every step, and what follows."""


def run(context: StageContext) -> None:
    """Train, and write candidate, critic and what the monitors saw."""
    settings = context.settings(PolicyUpdate)
    trunk = context.trunk()
    trunk.load_role("policy", context.input("policy"))
    from_initial = is_initial(trunk, "policy")
    if not from_initial:
        trunk.copy_role("policy", "start")
    trunk.load_role("reward", context.input("reward_model"))
    trunk.copy_role("reward", "value")  # the critic starts as the reward model
    monitors = settings.monitors.build()
    data = PolicyData(
        prompts=read_rows(context.input("policy_prompts") / "prompts.parquet", Prompt),
        reward=ModelReward(trunk),
        generator=HFGenerator(),
        seed=context.seed,
        from_initial=from_initial,
        watched=settings.watched.build() if settings.watched else None,
        monitors=monitors,
    )
    ended = settings.algorithm.build(settings.sampling).train(trunk, data, context.sink)
    for role, output in (("policy", "policy"), ("value", "critic")):
        with context.output(output, output) as folder:
            trunk.save_role(role, folder)
    context.write_json("monitors", "monitors", monitors.report())
    context.summary(
        {
            "policy/ended_by_budget": float(ended == "kl_budget"),
            "policy/ended_by_monitor": float(ended.startswith(ENDED_BY_MONITOR)),
        }
    )


def is_initial(trunk: Trunk, role: str) -> bool:
    """Whether an adapter changes nothing: every B is zero, so the role is the bare trunk."""
    return all(not p.any() for name, p in trunk.parameters(role).items() if ".lora_B." in name)
