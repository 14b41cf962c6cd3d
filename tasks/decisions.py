"""Tasks that end a round: gates, the ledger's decision, and the registry that follows it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NoReturn

from rlhf_core.artifacts import ArtifactRef
from rlhf_core.gates import Gate, judge
from rlhf_core.ledger import DecisionRecord, GateResult, RebaseRecord
from rlhf_core.stages.promotion import Decision, Promotion
from rlhf_core.stages.reward_validation import RewardReport
from tasks.context import Round, RoundEnded
from tasks.project import Project, journal_of
from tasks.registry import RegisteredKind

TRACKING_BEHIND = "TrackingBehind"
PROMOTED, REJECTED, REWARD_MODEL_REJECTED = "promoted", "rejected", "reward_model_rejected"
STATE_NAMES = {PROMOTED: "Promoted", REJECTED: "GateRejected", REWARD_MODEL_REJECTED: "RewardModelRejected"}


def accept(round: Round, reward_report: ArtifactRef, gates: Sequence[Gate]) -> None:
    """Go on if the reward model may serve; else the round ends here, its labels kept."""
    path = round.project.store.open(reward_report) / "reward_report.json"
    results = judge(gates, RewardReport.model_validate_json(path.read_bytes()).metrics)
    if not all(result.passed for result in results):
        failed = "; ".join(result.sentence for result in results if not result.passed)
        _decide(round, REWARD_MODEL_REJECTED, None, results)
        _end(
            round,
            REWARD_MODEL_REJECTED,
            f"the reward model may not serve: {failed}. Its labels stay in the pool.",
        )


def promote(round: Round, candidate: ArtifactRef, comparison: ArtifactRef, settings: Promotion) -> NoReturn:
    """Put the candidate in service if every gate passed; either way the round is decided.

    Alone of all stages it waits until MLflow knows everything of the round.
    """
    decision_ref = round.run("promotion", settings, evidence(round, comparison))["decision"]
    decision = Decision.model_validate_json(
        (round.project.store.open(decision_ref) / "decision.json").read_bytes()
    )
    conclude(round, candidate, decision)


def evidence(round: Round, comparison: ArtifactRef) -> dict[str, ArtifactRef]:
    """What promotion judges: the comparison, and what the monitors saw of the candidate's training."""
    updated = round.project.ledger.stage(round.number, "policy_update")
    seen = updated.outputs.get("monitors") if updated else None  # an earlier version's update had none
    return {"comparison": comparison, **({"monitors": seen} if seen else {})}


def conclude(round: Round, candidate: ArtifactRef, decision: Decision) -> NoReturn:
    """Decide the round, once MLflow knows everything of it."""
    waited = round.project.execution.tracking_seconds
    if not round.project.teller.settle(waited, patient=True):
        raise RoundEnded(
            TRACKING_BEHIND,
            f"round {round.number}: not decided, for MLflow lacks some of it after {waited:g} s and nobody "
            "could look up what a promotion rests on. Free MLflow's database or disk and run the same "
            "command again: nothing is computed twice.",
        )
    outcome = PROMOTED if decision.promoted else REJECTED
    _decide(round, outcome, candidate, decision.gates)
    failed = "; ".join(result.sentence for result in decision.gates if not result.passed)
    _end(round, outcome, "every gate passed" if decision.promoted else failed)


def _decide(round: Round, outcome: str, candidate: ArtifactRef | None, gates: list[GateResult]) -> None:
    stages = round.project.ledger.stages(round.number)
    metrics = {
        name: value
        for stage in stages
        for name, value in stage.metrics.items()
        if "measurement" not in stage.stage
    }
    round.project.ledger.decide(
        DecisionRecord(
            round=round.number,
            outcome=outcome,
            candidate=candidate,
            parent=round.record.champion,
            gates=gates,
            metrics=metrics,
            alarms=[alarm for stage in stages for alarm in stage.alarms],
            decided_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    )


def _end(round: Round, outcome: str, sentence: str) -> NoReturn:
    raise RoundEnded(STATE_NAMES[outcome], f"round {round.number}: {sentence}")


def follow_ledger(project: Project) -> int | None:
    """Registry versions and the alias `champion` as the ledger has them; returns the champion's version.

    Safe to repeat: this is also how an interruption between ledger and MLflow is repaired.
    """
    if not project.ledger.exists or not project.ledger.rounds():
        return None
    first = project.ledger.round(project.ledger.rounds()[0])
    assert first is not None
    initial = project.ledger.project().inputs["policy"]
    tags = {
        "rlhf.round": "0",
        "rlhf.digest": initial.digest,
        "rlhf.key": initial.key,
        "rlhf.outcome": "initial",
    }
    _register(
        project,
        "policy",
        initial,
        project.run_id(first.round),
        tags,
        "The initial policy: the trunk, unchanged.",
    )
    rebased = {record.round: record for record in project.ledger.rebases()}
    for number in project.ledger.rounds():
        _follow_round(project, number)
        if number in rebased:
            _follow_rebase(project, rebased[number])
    champion = project.registry.version_of(
        "policy", project.ledger.champion().digest, project.ledger.champion_round()
    )
    if champion is not None and project.registry.alias("policy", "champion") != champion:
        project.registry.set_alias("policy", "champion", champion)
    return champion


def _follow_round(project: Project, number: int) -> None:
    """The versions that a decided round made."""
    decision, record = project.ledger.decision(number), project.ledger.round(number)
    if decision is None or record is None:
        return
    common = {
        "rlhf.round": str(number),
        "prefect.flow_run_id": record.prefect_flow_run_id,
        "rlhf.outcome": decision.outcome,
    }
    trained = project.ledger.stage(number, "reward_modeling")
    labels = project.ledger.stage(number, "preferences")
    label_digest = labels.outputs["preferences"].digest if labels else ""
    reward_version = None
    if trained is not None:
        ref = trained.outputs["reward_model"]
        tags = {**common, "rlhf.digest": ref.digest, "rlhf.key": ref.key, "rlhf.labels": label_digest}
        served = "may not serve" if decision.outcome == REWARD_MODEL_REJECTED else "served"
        description = f"Reward model of round {number}: {served}."
        reward_version = _register(
            project, "reward-model", ref, _run_id(project, number, "reward_modeling"), tags, description
        )
    updated = project.ledger.stage(number, "policy_update")
    if decision.candidate is not None and updated is not None:
        parent = project.registry.version_of("policy", decision.parent.digest)
        tags = {
            **common,
            "rlhf.digest": decision.candidate.digest,
            "rlhf.key": decision.candidate.key,
            "rlhf.parent_version": str(parent),
            "rlhf.parent_digest": decision.parent.digest,
            "rlhf.labels": label_digest,
            "rlhf.reward_model_version": str(reward_version),
        }
        description = f"Candidate of round {number}: {decision.outcome}.\n\n" + "\n".join(
            f"- {g.sentence}" for g in decision.gates
        )
        _register(
            project,
            "policy",
            decision.candidate,
            _run_id(project, number, "policy_update"),
            tags,
            description,
        )


def _follow_rebase(project: Project, record: RebaseRecord) -> None:
    """The version of the first policy on a new trunk."""
    journal = journal_of(project.home, record.key)
    run_id = (journal.run_id if journal else "") or record.mlflow_run_id or project.run_id(record.round)
    parent = project.registry.version_of("policy", record.champion.digest)
    tags = {
        "rlhf.round": str(record.round),
        "rlhf.digest": record.policy.digest,
        "rlhf.key": record.policy.key,
        "rlhf.outcome": "rebased",
        "rlhf.parent_version": str(parent),
        "rlhf.parent_digest": record.champion.digest,
        "rlhf.trunk": record.trunk.digest,
        "rlhf.rebased_from_trunk": record.old_trunk.digest,
    }
    description = (
        f"Version {parent}, merged after round {record.round} into trunk {record.trunk.digest[:12]}: the "
        "initial policy of all later rounds."
    )
    _register(project, "policy", record.policy, run_id, tags, description)


def _run_id(project: Project, number: int, stage: str) -> str:
    """The run that a version came from: its stage's, or its round's where another project computed it."""
    return project.run_id(number, stage) or project.run_id(number)


def _register(
    project: Project,
    model: RegisteredKind,
    ref: ArtifactRef,
    run_id: str,
    tags: dict[str, str],
    description: str,
) -> int:
    folder = project.store.open(ref)
    return project.registry.register(model, folder, run_id=run_id, tags=tags, description=description)
