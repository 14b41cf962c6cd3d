"""What a report shows of a round, gathered from artifacts and metrics; knows nothing of who gathers it."""

from dataclasses import dataclass, field

from rlhf_core.alarms import MonitorsReport
from rlhf_core.gates import Estimate
from rlhf_core.ledger import GateResult, StageRecord
from rlhf_core.records import LookedAt
from rlhf_core.selection import Selection

NOT_MEASURED = "not measured"

Steps = list[tuple[int, dict[str, float]]]
"""The metrics of each step of the policy update, in order."""


@dataclass(frozen=True)
class CalibrationPoint:
    """Held-out pairs on which the reward model was about equally sure."""

    confidence: float
    """Mean probability it gave to its own choice."""
    accuracy: float
    """Share of them in which that choice was right."""
    pairs: int


@dataclass(frozen=True)
class Sample:
    """One held-out prompt, continued by both policies."""

    prompt: str
    before: str
    """By the champion the round started with."""
    after: str
    """By the candidate."""


@dataclass(frozen=True)
class Scores:
    """One score of every held-out completion of both policies."""

    before: list[float]
    """Of the champion's."""
    after: list[float]
    """Of the candidate's."""


@dataclass(frozen=True)
class RoundView:
    """All that is known of a round; what it never came to measure is simply not there."""

    project: str
    round: int
    outcome: str
    """As the ledger's decision says it."""
    stages: list[StageRecord]
    gates: list[GateResult]
    alarms: list[str]
    update_steps: Steps
    reward_model_metrics: dict[str, Estimate]
    calibration: list[CalibrationPoint]
    accuracy_by_round: dict[int, Estimate]
    """The reward model's accuracy on the held-out labels of each round."""
    comparison: dict[str, Estimate]
    scores: dict[str, Scores]
    """By their name, proxy or gold."""
    samples: list[Sample]
    links: dict[str, str]
    """Name to address, or to the command that shows it."""
    settings_yaml: str
    monitors: MonitorsReport | None = None
    """What watched the policy update, where it came to one."""
    selection: Selection | None = None
    """Which step of it is the candidate, and why."""
    looked_at: list[LookedAt] = field(default_factory=list)
    """Completions of the policy update, from its first step to its last."""
    rebased_after: int | None = None
    """The round whose champion the initial policy is; None where it is the project's first policy."""
