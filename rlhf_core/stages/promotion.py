"""promotion: the gates judge the comparison; what a monitor ended is refused."""

from pydantic import Field

from rlhf_core.alarms import MonitorsReport
from rlhf_core.gates import PromotionGate, judge
from rlhf_core.ledger import GateResult
from rlhf_core.settings import Settings
from rlhf_core.stages.comparison import ComparisonReport
from rlhf_core.stages.context import StageContext

NAME, VERSION = "promotion", 2

DEFAULT_GATES = (
    PromotionGate(metric="eval/win_rate", direction="above", bound=0.5),
    PromotionGate(metric="eval/kl_to_initial", direction="below", bound=40.0),
    PromotionGate(metric="eval/response_length_over_initial", direction="above", bound=0.5),
    PromotionGate(metric="eval/response_length_over_initial", direction="below", bound=1.5),
    PromotionGate(metric="eval/perplexity_over_initial", direction="below", bound=1.5),
    PromotionGate(metric="eval/distinct_2_over_initial", direction="above", bound=0.8),
)


class Promotion(Settings):
    """What a candidate must show to be put in service."""

    gates: tuple[PromotionGate, ...] = Field(default=DEFAULT_GATES, min_length=1)
    """All of them must pass, each judged at the bad end of its interval."""


class Decision(Settings):
    """Whether the candidate is promoted, and why."""

    promoted: bool
    gates: list[GateResult]


def run(context: StageContext) -> None:
    """Judge and write the decision."""
    settings = context.settings(Promotion)
    text = (context.input("comparison") / "comparison.json").read_bytes()
    results = [*_ended(context), *judge(settings.gates, ComparisonReport.model_validate_json(text).metrics)]
    decision = Decision(promoted=all(result.passed for result in results), gates=results)
    context.write_json("decision", "decision", decision)
    context.summary({"gate/passed": float(sum(r.passed for r in results)), "gate/all": float(len(results))})


def _ended(context: StageContext) -> list[GateResult]:
    """The gate that nobody sets: failed where a monitor ended the policy update, and not there otherwise."""
    if "monitors" not in context.job.inputs:  # of a round whose policy an earlier version updated
        return []
    report = MonitorsReport.model_validate_json((context.input("monitors") / "monitors.json").read_bytes())
    if report.ended_by is None:
        return []
    steps = [one.step for one in report.alarms if one.monitor == report.ended_by and one.severity == "stop"]
    return [
        GateResult(
            name="policy/ended_by_monitor < 1",
            value=1.0,
            bound=1.0,
            passed=False,
            sentence=f"policy/ended_by_monitor is 1: the monitor {report.ended_by} ended the policy update "
            f"at step {steps[0]}, and what was stopped for going wrong is not promoted: failed",
        )
    ]
