"""Gates: a measurement, a bound, judged at the interval's bad end; what is missing or not finite fails."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, field_validator

from rlhf_core.ledger import GateResult
from rlhf_core.metrics import Interval
from rlhf_core.settings import Settings

NOT_INDEPENDENT = ("eval/proxy", "reward_model/", "objective/")


class Estimate(Settings):
    """A number with the ends of its 95 % interval; where there is no interval both are the number."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, interval: Interval) -> "Estimate":
        """From an interval."""
        return cls(value=interval.value, low=interval.low, high=interval.high)

    @classmethod
    def exactly(cls, value: float) -> "Estimate":
        """A number without an interval."""
        return cls(value=value, low=value, high=value)


class Gate(Settings):
    """One condition on one measured number."""

    metric: str = Field(min_length=1)
    """The number's name, such as `eval/win_rate`."""
    direction: Literal["above", "below"]
    """Whether the number must lie above or below the bound, strictly."""
    bound: float
    """The bound."""

    @property
    def name(self) -> str:
        """The condition as one reads it."""
        return f"{self.metric} {'>' if self.direction == 'above' else '<'} {self.bound:g}"


class PromotionGate(Gate):
    """A gate on a candidate: never on the reward model that the candidate was optimised against."""

    @field_validator("metric")
    @classmethod
    def _independent(cls, metric: str) -> str:
        if metric.startswith(NOT_INDEPENDENT):
            raise ValueError(
                f"a promotion gate on {metric!r} would ask the reward model that the candidate was trained "
                "to please: it rises whether the policy is better or not. Gate on what the annotator or the "
                "evals measure."
            )
        return metric


def judge(gates: Sequence[Gate], measured: Mapping[str, Estimate]) -> list[GateResult]:
    """Every gate's result, in order."""
    return [_judge(gate, measured.get(gate.metric)) for gate in gates]


def _judge(gate: Gate, estimate: Estimate | None) -> GateResult:
    if estimate is None or not all(math.isfinite(x) for x in (estimate.value, estimate.low, estimate.high)):
        why = "was not measured" if estimate is None else "is not finite"
        return GateResult(
            name=gate.name,
            value=None,
            bound=gate.bound,
            passed=False,
            sentence=f"{gate.metric} {why}: failed",
        )
    bad_end = estimate.low if gate.direction == "above" else estimate.high
    passed = bad_end > gate.bound if gate.direction == "above" else bad_end < gate.bound
    end = "lower" if gate.direction == "above" else "upper"
    return GateResult(
        name=gate.name,
        value=bad_end,
        bound=gate.bound,
        passed=passed,
        sentence=f"{gate.metric} is {estimate.value:.4g}, {end} end {bad_end:.4g}; must be {gate.direction} "
        f"{gate.bound:g}: {'passed' if passed else 'failed'}",
    )
