"""Gates fail whatever cannot be shown."""

import math

import pytest
from pydantic import ValidationError

from rlhf_core.gates import Estimate, Gate, PromotionGate, judge
from rlhf_core.metrics import Interval

ABOVE = Gate(metric="eval/win_rate", direction="above", bound=0.5)
BELOW = Gate(metric="eval/kl", direction="below", bound=0.5)


def unchecked(value: float, low: float, high: float) -> Estimate:
    """An estimate past the check that its numbers are finite, as arithmetic could make one."""
    return Estimate.model_construct(value=value, low=low, high=high)


@pytest.mark.parametrize(
    ("gate", "low", "high", "bad_end", "passed"),
    [
        (ABOVE, 0.51, 0.9, 0.51, True),
        (ABOVE, 0.49, 0.9, 0.49, False),  # 0.6 is above the bound, its lower end is not
        (ABOVE, 0.5, 0.9, 0.5, False),  # strictly
        (BELOW, 0.1, 0.49, 0.49, True),
        (BELOW, 0.1, 0.51, 0.51, False),
        (BELOW, 0.1, 0.5, 0.5, False),
    ],
)
def test_a_gate_judges_the_bad_end_strictly(
    gate: Gate, low: float, high: float, bad_end: float, passed: bool
) -> None:
    value = 0.6 if gate is ABOVE else 0.4
    (result,) = judge([gate], {gate.metric: Estimate(value=value, low=low, high=high)})
    assert (result.passed, result.value, result.bound) == (passed, bad_end, 0.5)
    assert result.sentence.endswith("passed" if passed else "failed")
    assert ("lower end" if gate is ABOVE else "upper end") in result.sentence


@pytest.mark.parametrize("gate", [ABOVE, BELOW])
def test_what_was_not_measured_fails(gate: Gate) -> None:
    (result,) = judge([gate], {"eval/other": Estimate.exactly(0.5)})
    assert not result.passed
    assert result.value is None
    assert "was not measured" in result.sentence


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("gate", [ABOVE, BELOW])
def test_what_is_not_finite_fails_wherever_it_stands(gate: Gate, place: int, odd: float) -> None:
    good = [0.9, 0.9, 0.9] if gate is ABOVE else [0.1, 0.1, 0.1]
    good[place] = odd
    (result,) = judge([gate], {gate.metric: unchecked(*good)})
    assert not result.passed
    assert "is not finite" in result.sentence


def test_results_come_in_the_order_of_the_gates_each_with_its_name() -> None:
    results = judge(
        [BELOW, ABOVE], {"eval/win_rate": Estimate.exactly(0.7), "eval/kl": Estimate.exactly(0.2)}
    )
    assert [(r.name, r.passed) for r in results] == [("eval/kl < 0.5", True), ("eval/win_rate > 0.5", True)]


def test_an_estimate_keeps_the_ends_of_its_interval() -> None:
    assert Estimate.of(Interval(0.6, 0.5, 0.8)) == Estimate(value=0.6, low=0.5, high=0.8)
    assert Estimate.exactly(2.0) == Estimate(value=2.0, low=2.0, high=2.0)


@pytest.mark.parametrize(
    "metric", ["eval/proxy", "eval/proxy_after", "reward_model/accuracy", "objective/scores"]
)
def test_a_candidate_is_never_gated_on_the_reward_model_it_was_trained_to_please(metric: str) -> None:
    with pytest.raises(ValidationError, match=r"trained to please.*Gate on what the annotator or the evals"):
        PromotionGate(metric=metric, direction="above", bound=0.0)
    Gate(metric=metric, direction="above", bound=0.0)  # a reward model's own gate may ask for it


@pytest.mark.parametrize("bound", [math.nan, math.inf])
def test_a_bound_is_a_number(bound: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Gate(metric="eval/kl", direction="below", bound=bound)
