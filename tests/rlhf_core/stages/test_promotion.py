"""Promotion: all gates must pass, and what was not measured does not."""

from pathlib import Path

import pytest

from rlhf_core.alarms import Alarm, MonitorsReport
from rlhf_core.gates import Estimate, PromotionGate
from rlhf_core.stages.comparison import ComparisonReport
from rlhf_core.stages.promotion import DEFAULT_GATES, Decision, Promotion
from tests.rlhf_core.stages.chain import Chain

WINS = PromotionGate(metric="eval/win_rate", direction="above", bound=0.5)
KL = PromotionGate(metric="eval/kl_to_initial", direction="below", bound=40.0)
MEASURED = {
    "eval/win_rate": Estimate(value=0.6, low=0.55, high=0.65),
    "eval/kl_to_initial": Estimate(value=10.0, low=8.0, high=12.0),
}


def decided(
    tmp_path: Path,
    metrics: dict[str, Estimate],
    *gates: PromotionGate,
    seen: MonitorsReport | None = None,
) -> Decision:
    chain, inputs = Chain(tmp_path), {}
    for kind, value in (("comparison", ComparisonReport(metrics=metrics)), ("monitors", seen)):
        if value is not None:
            with chain.store.writing() as folder:
                (folder / f"{kind}.json").write_text(value.model_dump_json())
                inputs[kind] = chain.store.commit(folder, kind, "by hand")
    made = chain.run("promotion", Promotion(gates=gates), inputs)
    return Decision.model_validate_json((chain.open(made["decision"]) / "decision.json").read_bytes())


def test_a_candidate_that_passes_every_gate_is_promoted(tmp_path: Path) -> None:
    decision = decided(tmp_path, MEASURED, WINS, KL)
    assert decision.promoted
    # The bad ends: the lower one where more is better, the upper one where less is.
    assert [(gate.value, gate.passed) for gate in decision.gates] == [(0.55, True), (12.0, True)]


def test_one_failed_gate_rejects(tmp_path: Path) -> None:
    worse = {**MEASURED, "eval/win_rate": Estimate(value=0.6, low=0.5, high=0.7)}
    decision = decided(tmp_path, worse, WINS, KL)
    assert not decision.promoted
    assert [gate.passed for gate in decision.gates] == [False, True]


@pytest.mark.parametrize("missing", MEASURED)
def test_what_was_not_measured_fails(tmp_path: Path, missing: str) -> None:
    decision = decided(tmp_path, {k: v for k, v in MEASURED.items() if k != missing}, WINS, KL)
    assert not decision.promoted
    (failed,) = [gate for gate in decision.gates if not gate.passed]
    assert (failed.value, failed.sentence) == (None, f"{missing} was not measured: failed")


def test_a_candidate_whose_training_a_monitor_stopped_is_refused_whatever_it_measures(tmp_path: Path) -> None:
    warned = Alarm(monitor="entropy", step=2, severity="warn", sentence="low")
    stopped = Alarm(monitor="kl", step=5, severity="stop", sentence="too far")
    alarms = MonitorsReport(ended_by=None, steps=6, monitors=(), alarms=(warned,))
    assert decided(tmp_path / "warned", MEASURED, WINS, KL, seen=alarms).promoted
    ended = alarms.model_copy(update={"ended_by": "kl", "alarms": (warned, stopped)})
    decision = decided(tmp_path / "stopped", MEASURED, WINS, KL, seen=ended)
    assert not decision.promoted
    (failed,) = [gate for gate in decision.gates if not gate.passed]
    assert failed.sentence == (
        "policy/ended_by_monitor is 1: the monitor kl ended the policy update at step 5, and what was "
        "stopped for going wrong is not promoted: failed"
    )


def test_the_default_gates_ask_for_what_a_comparison_measures(played: Chain) -> None:
    folder = played.open(played.made["comparison"]["comparison"])
    found = ComparisonReport.model_validate_json((folder / "comparison.json").read_bytes())
    assert {gate.metric for gate in DEFAULT_GATES} <= found.metrics.keys()
