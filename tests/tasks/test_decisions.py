"""The ledger decides; the registry and its alias follow, however often they are asked to."""

from collections.abc import Callable

import pytest

from rlhf_core.alarms import Alarm, MonitorsReport
from rlhf_core.artifacts import ArtifactRef
from rlhf_core.gates import Estimate, Gate, PromotionGate
from rlhf_core.ledger import DecisionRecord, RebaseRecord, StageRecord
from rlhf_core.stages.comparison import ComparisonReport
from rlhf_core.stages.promotion import Decision, Promotion
from rlhf_core.stages.reward_validation import RewardReport
from tasks.context import Round, RoundEnded, _do
from tasks.data import initial_labels, label_pool
from tasks.decisions import accept, evidence, follow_ledger
from tasks.project import Project
from tests.tasks.conftest import files

ACCURATE = Gate(metric="reward_model/accuracy", direction="above", bound=0.5)


def pin(round: Round, stage: str, **outputs: ArtifactRef) -> None:
    round.project.ledger.pin(
        round.number,
        StageRecord(stage=stage, key="k", outputs=outputs, cached=False, seconds=0, mlflow_run_id=""),
    )


def decide(round: Round, outcome: str, candidate: ArtifactRef | None) -> None:
    """A round with labels, a reward model, perhaps a candidate, and its decision."""
    project, number = round.project, round.number
    pin(round, "preferences", preferences=files(project, "preferences", f"labels {number}"))
    pin(round, "reward_modeling", reward_model=files(project, "reward_model", f"reward {number}"))
    if candidate is not None:
        pin(round, "policy_update", policy=candidate)
    project.ledger.decide(
        DecisionRecord(
            round=number,
            outcome=outcome,
            candidate=candidate,
            parent=round.record.champion,
            gates=[],
            metrics={},
            alarms=[],
            decided_at="now",
        )
    )


def versions(project: Project, model: str) -> dict[int, tuple[str, str]]:
    """(outcome, digest) of every version."""
    found = project.tracker.client.search_model_versions(f"name = '{project.name}.{model}'")
    return {int(v.version): (v.tags["rlhf.outcome"], v.tags["rlhf.digest"]) for v in found}


def test_the_registry_follows_the_ledger(project: Project, open_round: Callable[[int], Round]) -> None:
    assert follow_ledger(project) is None  # no round, no version
    initial = project.ledger.champion()
    better, worse = (files(project, "policy", name) for name in ("better", "worse"))
    decide(open_round(1), "promoted", better)
    decide(open_round(2), "rejected", worse)
    decide(open_round(3), "reward_model_rejected", None)

    assert [follow_ledger(project), follow_ledger(project)] == [2, 2]
    assert versions(project, "policy") == {
        1: ("initial", initial.digest),
        2: ("promoted", better.digest),
        3: ("rejected", worse.digest),
    }
    outcomes = {number: outcome for number, (outcome, _) in versions(project, "reward-model").items()}
    assert outcomes == {1: "promoted", 2: "rejected", 3: "reward_model_rejected"}
    assert project.registry.alias("policy", "champion") == 2

    project.registry.set_alias("policy", "champion", 3)  # by hand
    assert follow_ledger(project) == 2
    assert project.registry.alias("policy", "champion") == 2

    third = project.tracker.client.get_model_version(f"{project.name}.policy", "3").tags
    assert third["rlhf.parent_version"] == "2"
    assert third["rlhf.parent_digest"] == better.digest
    assert third["rlhf.reward_model_version"] == "2"


def rebase(project: Project, number: int) -> RebaseRecord:
    """After a round: a new trunk and a first policy on it."""
    return project.ledger.rebase(
        RebaseRecord(
            round=number,
            key="no journal has it",
            trunk=files(project, "trunk", f"after {number}"),
            policy=files(project, "policy", f"after {number}"),
            champion=project.ledger.champion(),
            old_trunk=project.ledger.anchor()["trunk"],
            metrics={},
            mlflow_run_id="",
            rebased_at="now",
        )
    )


def test_the_registry_follows_a_rebase(project: Project, open_round: Callable[[int], Round]) -> None:
    better, next_ = (files(project, "policy", name) for name in ("better", "next"))
    decide(open_round(1), "promoted", better)
    decide(open_round(2), "rejected", files(project, "policy", "worse"))
    record = rebase(project, 2)
    assert [follow_ledger(project), follow_ledger(project)] == [4, 4]
    assert project.registry.alias("policy", "champion") == 4
    tags = project.tracker.client.get_model_version(f"{project.name}.policy", "4").tags
    assert tags["rlhf.outcome"] == "rebased" and tags["rlhf.digest"] == record.policy.digest
    assert (tags["rlhf.parent_version"], tags["rlhf.parent_digest"]) == ("2", better.digest)
    first = project.ledger.project().inputs["trunk"].digest
    assert (tags["rlhf.rebased_from_trunk"], tags["rlhf.trunk"]) == (first, record.trunk.digest)

    decide(open_round(3), "promoted", next_)
    assert follow_ledger(project) == 5
    tags = project.tracker.client.get_model_version(f"{project.name}.policy", "5").tags
    assert tags["rlhf.parent_version"] == "4"


def test_the_versions_of_a_registry_that_is_made_anew_have_the_same_numbers(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    # Told to MLflow for the first time when all of it has happened, as `rlhf replay` does.
    decide(open_round(1), "promoted", files(project, "policy", "better"))
    rebase(project, 1)
    decide(open_round(2), "promoted", files(project, "policy", "next"))
    assert follow_ledger(project) == 4
    outcomes = {number: outcome for number, (outcome, _) in versions(project, "policy").items()}
    assert outcomes == {1: "initial", 2: "promoted", 3: "rebased", 4: "promoted"}


def test_a_reward_model_on_a_new_trunk_is_normalised_on_samples_of_its_initial_policy(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    before = open_round(1)
    decide(before, "promoted", files(project, "policy", "better"))
    rebase(project, 1)
    first = open_round(2)
    decide(first, "rejected", files(project, "policy", "worse"))
    later = open_round(3)
    of_second = {"initial_preferences": files(project, "preferences", "labels 2")}
    assert [initial_labels(round) for round in (before, first, later)] == [{}, of_second, of_second]
    # All labels train it, those on the old trunk's completions too.
    newest = files(project, "preferences", "labels 3")
    assert label_pool(later, newest) == [
        *(files(project, "preferences", f"labels {number}") for number in (1, 2)),
        newest,
    ]


def test_an_undecided_round_registers_the_initial_policy_alone(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    pin(open_round(1), "reward_modeling", reward_model=files(project, "reward_model", "reward"))
    assert follow_ledger(project) == 1
    assert versions(project, "policy") == {1: ("initial", project.ledger.champion().digest)}
    assert versions(project, "reward-model") == {}


def reported(project: Project, low: float) -> ArtifactRef:
    report = RewardReport(
        metrics={"reward_model/accuracy": Estimate(value=0.7, low=low, high=0.8)},
        calibration=[],
        accuracy_by_round={},
        held_out_pairs=10,
    )
    with project.store.writing() as folder:
        (folder / "reward_report.json").write_text(report.model_dump_json())
        return project.store.commit(folder, "reward_report", "by hand")


def test_a_reward_model_that_passes_lets_the_round_go_on(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    accept(open_round(1), reported(project, low=0.6), [ACCURATE])
    assert project.ledger.decision(1) is None


def test_a_reward_model_that_fails_ends_the_round(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    round = open_round(1)
    with pytest.raises(RoundEnded, match="round 1: the reward model may not serve") as ended:
        accept(round, reported(project, low=0.45), [ACCURATE])
    assert ended.value.outcome == "RewardModelRejected"
    decision = project.ledger.decision(1)
    assert decision is not None and decision.candidate is None
    assert decision.outcome == "reward_model_rejected"
    assert [(gate.value, gate.passed) for gate in decision.gates] == [(0.45, False)]


def written(project: Project, kind: str, value: ComparisonReport | MonitorsReport) -> ArtifactRef:
    with project.store.writing() as folder:
        (folder / f"{kind}.json").write_text(value.model_dump_json())
        return project.store.commit(folder, kind, "by hand")


def winner_is_promoted(round: Round, ended_by: str | None) -> bool:
    """Whether promotion takes a candidate that wins, given what ended its training."""
    project = round.project
    wins = ComparisonReport(metrics={"eval/win_rate": Estimate(value=0.7, low=0.6, high=0.8)})
    stop = Alarm(monitor="kl", step=5, severity="stop", sentence="too far")
    seen = MonitorsReport(ended_by=ended_by, steps=6, monitors=(), alarms=(stop,) if ended_by else ())
    pin(
        round,
        "policy_update",
        policy=files(project, "policy", "better"),
        monitors=written(project, "monitors", seen),
    )
    settings = Promotion(gates=(PromotionGate(metric="eval/win_rate", direction="above", bound=0.5),))
    outputs = _do(
        round, "promotion", "promotion", settings, evidence(round, written(project, "comparison", wins)), 1
    )
    assert isinstance(outputs, dict)
    text = (project.store.open(outputs["decision"]) / "decision.json").read_text()
    return Decision.model_validate_json(text).promoted


def test_a_winner_is_promoted(open_round: Callable[[int], Round]) -> None:
    assert winner_is_promoted(open_round(1), ended_by=None)


def test_a_winner_is_refused_if_a_monitor_stopped_it(open_round: Callable[[int], Round]) -> None:
    assert not winner_is_promoted(open_round(1), ended_by="kl")


def test_a_policy_that_an_earlier_version_updated_is_judged_by_its_comparison_alone(
    project: Project, open_round: Callable[[int], Round]
) -> None:
    round, comparison = open_round(1), files(project, "comparison", "numbers")
    pin(round, "policy_update", policy=files(project, "policy", "better"))
    assert evidence(round, comparison) == {"comparison": comparison}
