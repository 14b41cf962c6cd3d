"""Tasks that make and label data."""

from rlhf_core.artifacts import ArtifactRef
from rlhf_core.stages.pairing import Pairing
from rlhf_core.stages.preferences import Preferences, PreferencesJob
from rlhf_core.stages.prompts import PromptDraw
from rlhf_core.stages.rollouts import Rollouts
from tasks.context import Round


def draw_prompts(round: Round, settings: PromptDraw) -> dict[str, ArtifactRef]:
    """The round's prompts of each pool: labelling_prompts, policy_prompts, held_out_prompts."""
    return round.run("prompts", settings, {"source": round.record.source})


def collect_completions(
    round: Round, policy: ArtifactRef, prompts: dict[str, ArtifactRef], settings: Rollouts
) -> ArtifactRef:
    """Completions of the labelling prompts by a policy."""
    inputs = {
        "trunk": round.artifact("trunk"),
        "policy": policy,
        "labelling_prompts": prompts["labelling_prompts"],
    }
    return round.run("rollouts", settings, inputs)["completions"]


def pair_completions(round: Round, completions: ArtifactRef, settings: Pairing) -> ArtifactRef:
    """The comparisons to be labelled."""
    return round.run("pairing", settings, {"completions": completions})["comparisons"]


def collect_preferences(round: Round, comparisons: ArtifactRef, settings: Preferences) -> ArtifactRef:
    """The labels of this round."""
    job = PreferencesJob(**settings.model_dump(), round=round.number)
    return round.run("preferences", job, {"comparisons": comparisons})["preferences"]


def label_pool(round: Round, preferences: ArtifactRef) -> list[ArtifactRef]:
    """All labels of the project up to this round, whatever became of the rounds that gave them."""
    earlier = [
        record.outputs["preferences"]
        for number in round.project.ledger.rounds()
        if number < round.number and (record := round.project.ledger.stage(number, "preferences"))
    ]
    return [*earlier, preferences]


def initial_labels(round: Round) -> dict[str, ArtifactRef]:
    """The labels on samples of the initial policy, where those are not the project's first ones.

    The first round after a rebase samples the new trunk's first policy.
    """
    ledger = round.project.ledger
    rebased = ledger.rebase_before(round.number)
    given = ledger.stage(rebased.round + 1, "preferences") if rebased else None
    return {"initial_preferences": given.outputs["preferences"]} if given else {}
