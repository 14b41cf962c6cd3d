"""preferences: an annotator judges the comparisons."""

from rlhf_core.annotators import AnnotatorSettings
from rlhf_core.annotators.simulated import SimulatedAnnotator
from rlhf_core.records import Choice, Comparison, Completion
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows, write_rows
from rlhf_core.stages.context import StageContext

NAME, VERSION = "preferences", 1


class Preferences(Settings):
    """Who labels."""

    annotator: AnnotatorSettings = SimulatedAnnotator()
    """The annotator."""


class PreferencesJob(Preferences):
    """With the round that the labels are given in."""

    round: int = 1
    """Its number."""


def run(context: StageContext) -> None:
    """Write the labels, and beside them the completions they are of: so the set stands alone for ever."""
    settings = context.settings(PreferencesJob)
    comparisons = read_rows(context.input("comparisons") / "comparisons.parquet", Comparison)
    completions = read_rows(context.input("comparisons") / "completions.parquet", Completion)
    annotator = settings.annotator.build(context.seed)
    by_id = {completion.id: completion for completion in completions}
    preferences = annotator.label(comparisons, by_id, settings.round)
    with context.output("preferences", "preferences") as folder:
        write_rows(preferences, folder / "preferences.parquet")
        write_rows(completions, folder / "completions.parquet")
    ties = sum(preference.choice is Choice.TIE for preference in preferences)
    firsts = sum(preference.choice is Choice.A for preference in preferences)
    decided = max(1, len(preferences) - ties)
    context.summary(
        {
            "preference/labels": float(len(preferences)),
            "preference/tie_rate": ties / len(preferences),
            "preference/first_chosen_rate": firsts / decided,
        }
    )
