"""What the report is made from: scores of every completion, as far as the round's stages wrote them."""

from collections.abc import Callable, Mapping

import pytest

from rlhf_core.alarms import MonitorsReport
from rlhf_core.ledger import DecisionRecord, GateResult, StageRecord
from rlhf_core.records import Completion, Measurement, StopReason
from rlhf_core.report import Scores
from rlhf_core.selection import last_step
from rlhf_core.sources import write_rows
from rlhf_core.stages.comparison import ComparisonReport
from tasks.context import Round
from tasks.finishing import described, view
from tasks.project import Project

SAMPLE = Completion(
    id="p0/0",
    prompt_id="p0",
    prompt_text="?",
    prompt_ids=[1],
    response_ids=[2],
    text="!",
    stop=StopReason.EOS,
)


def _rows(values: Mapping[str, list[float]]) -> list[Measurement]:
    return [
        Measurement(metric=metric, item=f"p{i}/0", prompt_id=f"p{i}", value=value)
        for metric, those in values.items()
        for i, value in enumerate(those)
    ]


def _pin(project: Project, stage: str, role: str, file: str, values: Mapping[str, list[float]]) -> None:
    """A stage's record and its artifact; without values, the artifact of a version that kept no rows."""
    with project.store.writing() as folder:
        if values:
            write_rows(_rows(values), folder / f"{file}.parquet")
        write_rows([SAMPLE], folder / "completions.parquet")
        (folder / "comparison.json").write_text(ComparisonReport(metrics={}).model_dump_json())
        ref = project.store.commit(folder, role, f"{project.name} {stage}")
    project.ledger.pin(
        1,
        StageRecord(stage=stage, key="0", outputs={role: ref}, cached=False, seconds=1.0, mlflow_run_id="1"),
    )


@pytest.fixture
def decided(open_round: Callable[[int], Round]) -> Project:
    round = open_round(1)
    round.project.ledger.decide(
        DecisionRecord(
            round=1,
            outcome="rejected",
            candidate=None,
            parent=round.record.champion,
            gates=[],
            metrics={},
            alarms=[],
            decided_at="2026-01-01T00:00:00+00:00",
        )
    )
    return round.project


def _measure(project: Project) -> None:
    for who, gold in (("champion", [0.1, 0.2]), ("candidate", [0.3, 0.4])):
        values = {"gold": gold, "response_length": [5.0, 6.0]}
        _pin(project, f"measurement.{who}", "measurements", "measurements", values)


def test_proxy_and_gold_are_shown_before_and_after(decided: Project) -> None:
    _measure(decided)
    _pin(decided, "comparison", "comparison", "scores", {"proxy_after": [2.0], "proxy_before": [1.0]})
    assert view(decided, 1).scores == {
        "proxy": Scores([1.0], [2.0]),
        "gold": Scores([0.1, 0.2], [0.3, 0.4]),
    }


def test_a_comparison_that_kept_no_scores_leaves_gold_alone(decided: Project) -> None:
    _measure(decided)
    _pin(decided, "comparison", "comparison", "scores", {})
    assert set(view(decided, 1).scores) == {"gold"}


def test_what_the_monitors_saw_is_shown(decided: Project) -> None:
    seen = MonitorsReport(ended_by=None, steps=8, monitors=(), alarms=())
    with decided.store.writing() as folder:
        (folder / "monitors.json").write_text(seen.model_dump_json())
        ref = decided.store.commit(folder, "monitors", "by hand")
    record = StageRecord(
        stage="policy_update",
        key="0",
        outputs={"monitors": ref},
        cached=False,
        seconds=1.0,
        mlflow_run_id="1",
    )
    decided.ledger.pin(1, record)
    assert view(decided, 1).monitors == seen


def test_which_step_is_the_candidate_is_shown(decided: Project) -> None:
    found = last_step(8)
    with decided.store.writing() as folder:
        (folder / "selection.json").write_text(found.model_dump_json())
        ref = decided.store.commit(folder, "selection", "by hand")
    record = StageRecord(
        stage="policy_update",
        key="0",
        outputs={"selection": ref},
        cached=False,
        seconds=1.0,
        mlflow_run_id="1",
    )
    decided.ledger.pin(1, record)
    assert view(decided, 1).selection == found


def test_an_update_of_an_earlier_version_shows_no_monitors(decided: Project) -> None:
    decided.ledger.pin(
        1,
        StageRecord(stage="policy_update", key="0", outputs={}, cached=False, seconds=1.0, mlflow_run_id="1"),
    )
    assert view(decided, 1).monitors is None and view(decided, 1).selection is None


def test_a_round_that_ended_before_its_policy_has_no_scores(decided: Project) -> None:
    assert view(decided, 1).scores == {}


def test_a_round_is_described_by_its_outcome_its_gates_and_how_much_alarmed(decided: Project) -> None:
    decision = decided.ledger.decision(1)
    assert decision is not None
    gate = GateResult(
        name="g", value=0.4, bound=0.5, passed=False, sentence="g is 0.4, not above 0.5: failed"
    )
    told = described(decision.model_copy(update={"gates": [gate], "alarms": ["what a model may have said"]}))
    assert told.startswith("**Rejected**\n\n- g is 0.4, not above 0.5: failed\n")
    assert "Alarms: 1." in told and "what a model" not in told
    assert "Alarms" not in described(decision)
