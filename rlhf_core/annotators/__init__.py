"""The door to labels: who says which of two completions is better."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

from pydantic import Field

from rlhf_core.annotators.simulated import SimulatedAnnotator
from rlhf_core.records import Comparison, Completion, Preference

__all__ = ["Annotator", "AnnotatorSettings", "SimulatedAnnotator"]


class Annotator(Protocol):
    """Labels comparisons; the label does not depend on which completion is shown first."""

    def label(
        self, comparisons: Sequence[Comparison], completions: Mapping[str, Completion], round: int
    ) -> list[Preference]:
        """One preference for each comparison, in the same order; `completions` by id."""


AnnotatorSettings = Annotated[SimulatedAnnotator, Field()]
"""Settings whose `build(seed)` gives an `Annotator`."""
