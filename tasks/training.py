"""Tasks that train and measure models."""

from collections.abc import Sequence

from rlhf_core.artifacts import ArtifactRef, derive_seed
from rlhf_core.evals import Evals
from rlhf_core.stages.comparison import Compare
from rlhf_core.stages.policy_update import PolicyUpdate
from rlhf_core.stages.reward_modeling import RewardModeling
from rlhf_core.stages.reward_validation import RewardValidation, RewardValidationJob
from tasks.context import Round
from tasks.data import initial_labels


def _pool(labels: Sequence[ArtifactRef]) -> dict[str, ArtifactRef]:
    return {f"preferences.{number:04d}": ref for number, ref in enumerate(labels, 1)}


def train_reward_model(round: Round, labels: Sequence[ArtifactRef], settings: RewardModeling) -> ArtifactRef:
    """A fresh reward model on all labels; 0 is the mean of its scores on the initial policy's samples."""
    inputs = {"trunk": round.artifact("trunk"), **_pool(labels), **initial_labels(round)}
    return round.run("reward_modeling", settings, inputs)["reward_model"]


def validate_reward_model(
    round: Round,
    reward_model: ArtifactRef,
    labels: Sequence[ArtifactRef],
    settings: RewardValidation,
    held_out_share: float,
) -> ArtifactRef:
    """What the reward model is worth on held-out labels of every round."""
    job = RewardValidationJob(**settings.model_dump(), held_out_share=held_out_share)
    inputs = {"trunk": round.artifact("trunk"), "reward_model": reward_model, **_pool(labels)}
    return round.run("reward_validation", job, inputs)["reward_report"]


def update_policy(
    round: Round,
    policy: ArtifactRef,
    prompts: dict[str, ArtifactRef],
    reward_model: ArtifactRef,
    settings: PolicyUpdate,
) -> ArtifactRef:
    """The candidate."""
    initial = round.artifact("policy")
    inputs = {
        "trunk": round.artifact("trunk"),
        "policy": initial if settings.start_from == "initial" else policy,
        "initial_policy": initial,
        "reward_model": reward_model,
        "policy_prompts": prompts["policy_prompts"],
    }
    if round.record.texts is not None:
        inputs["texts"] = round.record.texts
    return round.run("policy_update", settings, inputs)["policy"]


def measure(
    round: Round, policy: ArtifactRef, prompts: dict[str, ArtifactRef], settings: Evals, subject: str
) -> ArtifactRef:
    """The numbers of one policy; the same random numbers for every policy of the project, in every round."""
    inputs = {
        "trunk": round.artifact("trunk"),
        "policy": policy,
        "held_out_prompts": prompts["held_out_prompts"],
    }
    seed = derive_seed(round.record.seed, "measurement")
    return round.run("measurement", settings.held_out, inputs, subject=subject, seed=seed)["measurements"]


def compare(
    round: Round, measured: dict[str, ArtifactRef], reward_model: ArtifactRef, settings: Evals
) -> ArtifactRef:
    """Candidate against champion and against the initial policy."""
    job = Compare(win_rate=settings.win_rate, temperature=settings.held_out.sampling.temperature)
    inputs = {
        "trunk": round.artifact("trunk"),
        "champion_policy": round.record.champion,
        "reward_model": reward_model,
        **measured,
    }
    return round.run("comparison", job, inputs)["comparison"]
