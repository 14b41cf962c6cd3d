"""A simulated person: judges by a gold score that no reward model ever sees, and errs as people do."""

from collections.abc import Mapping, Sequence
from math import exp
from random import Random
from typing import Literal

from pydantic import Field

from rlhf_core.artifacts import derive_seed
from rlhf_core.records import Choice, Comparison, Completion, Preference
from rlhf_core.rewards import RuleReward, Sentiment
from rlhf_core.settings import Settings


class SimulatedAnnotator(Settings):
    """Chooses by the Bradley-Terry model on a gold score, with ties and slips."""

    type: Literal["simulated"] = "simulated"
    """The name of this annotator."""
    gold: RuleReward = Sentiment()
    """What this person really wants. It reaches the round through labels and evaluations only."""
    temperature: float = Field(default=0.15, gt=0)
    """P(a over b) = sigmoid((gold_a - gold_b) / temperature): lower is more consistent."""
    flip_rate: float = Field(default=0.05, ge=0, lt=0.5)
    """Share of judgements that are turned round by a slip, whatever the difference."""
    tie_band: float = Field(default=0.1, ge=0)
    """Differences of gold up to this are called a tie."""

    def build(self, seed: int) -> "Simulated":
        """The annotator; one seed gives one set of judgements."""
        return Simulated(self, seed)


class Simulated:
    """An `Annotator` whose every judgement is a function of the pair, its golds and the seed."""

    def __init__(self, settings: SimulatedAnnotator, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.gold = settings.gold.build()

    def label(
        self, comparisons: Sequence[Comparison], completions: Mapping[str, Completion], round: int
    ) -> list[Preference]:
        """One preference for each comparison, in the same order; `completions` by id."""
        ids = sorted({name for c in comparisons for name in (c.completion_a, c.completion_b)})
        scores = self.gold.score([completions[name] for name in ids]).total.tolist() if ids else []
        gold = dict(zip(ids, scores, strict=True))
        return [
            Preference(
                comparison_id=c.id,
                prompt_id=c.prompt_id,
                completion_a=c.completion_a,
                completion_b=c.completion_b,
                choice=self._choose(c, gold[c.completion_a], gold[c.completion_b]),
                annotator=self.settings.type,
                round=round,
            )
            for c in comparisons
        ]

    def _choose(self, comparison: Comparison, gold_a: float, gold_b: float) -> Choice:
        # Drawn for the pair in one fixed order, so that the order shown changes nothing.
        if comparison.completion_a > comparison.completion_b:
            return self._choose(comparison.swap(), gold_b, gold_a).swap()
        if abs(gold_a - gold_b) <= self.settings.tie_band:
            return Choice.TIE
        draws = Random(derive_seed(self.seed, comparison.id))
        logit = max(-50.0, min(50.0, (gold_a - gold_b) / self.settings.temperature))
        choice = Choice.A if draws.random() < 1 / (1 + exp(-logit)) else Choice.B
        return choice.swap() if draws.random() < self.settings.flip_rate else choice
