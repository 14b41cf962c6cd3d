"""win_rate: an annotator compares candidate and champion, prompt by prompt, in both orders."""

from typing import TYPE_CHECKING

from rlhf_core.annotators import AnnotatorSettings, SimulatedAnnotator
from rlhf_core.artifacts import sha256
from rlhf_core.records import Choice, Completion, Measurement, compare
from rlhf_core.settings import Settings

if TYPE_CHECKING:
    from rlhf_core.evals.held_out import Sampled


class WinRate(Settings):
    """Who judges; never the reward model that the candidate was optimised against."""

    annotator: AnnotatorSettings = SimulatedAnnotator()
    """The judge."""

    def judge(self, candidate: "Sampled", champion: "Sampled", seed: int) -> list[Measurement]:
        """For each item 1, a half or 0: the mean of two judgements, one in each order.

        Equal texts are a tie without being shown.
        """
        ours, theirs = _named(candidate), _named(champion)
        both = {c.id: c for c in (*ours, *theirs)}
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.text.strip() != b.text.strip()]
        shown = [compare(a.prompt_id, a.id, b.id) for a, b in pairs]
        annotator = self.annotator.build(seed)
        orders = [annotator.label(shown, both, 1), annotator.label([c.swap() for c in shown], both, 1)]
        wins: dict[str, float] = {}
        for forward, backward in zip(*orders, strict=True):
            for preference in (forward, backward.swap()):
                credit = {Choice.A: 1.0, Choice.B: 0.0, Choice.TIE: 0.5}[preference.choice]
                wins[preference.completion_a] = wins.get(preference.completion_a, 0.0) + credit / 2
        return [
            Measurement(metric="win_rate", item=c.id, prompt_id=c.prompt_id, value=wins.get(our.id, 0.5))
            for c, our in zip(candidate.completions, ours, strict=True)
        ]


def _named(sampled: "Sampled") -> list[Completion]:
    """The completions under names that tell two texts apart, and nothing of who is candidate."""
    return [
        c.model_copy(update={"id": f"{c.id}:{sha256(c.text.encode())[:16]}"}) for c in sampled.completions
    ]
