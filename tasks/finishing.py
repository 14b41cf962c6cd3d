"""What follows a decision: registry, report, the round's MLflow run; all may be done again at any time."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext

from rlhf_core.alarms import MonitorsReport
from rlhf_core.evals.held_out import by_metric
from rlhf_core.ledger import DecisionRecord, RebaseRecord
from rlhf_core.metrics import read_lines
from rlhf_core.records import Completion, LookedAt, Measurement
from rlhf_core.report.page import write_report
from rlhf_core.report.view import CalibrationPoint, RoundView, Sample, Scores
from rlhf_core.selection import Selection
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows
from rlhf_core.stages.comparison import ComparisonReport
from rlhf_core.stages.reward_validation import RewardReport
from tasks.decisions import follow_ledger
from tasks.journal import Measured, Stored
from tasks.mlflow_store import TrackingUnavailable
from tasks.project import Project
from tasks.reports import FINISHED, rebase_told, report_folder, unfinished, untold
from tasks.tracking import NOTE

NUM_SAMPLES = 10
Report = TypeVar("Report", bound=Settings)


def finish_round(project: Project, number: int) -> None:
    """Report, MLflow and registry say what the ledger says of a decided round.

    A round that MLflow cannot be told of now is finished by the next command, or by `rlhf replay`.
    """
    folder = report_folder(project.home, project.name, number)
    folder.mkdir(parents=True, exist_ok=True)
    page = write_report(view(project, number), folder)
    if FlowRunContext.get() is not None:
        create_markdown_artifact(page.read_text(), key=f"{project.name}-round-{number:04d}".replace("_", "-"))
    _tell_decision(project, number, folder)
    if _followed(project, lambda: link_stages(project, number)):
        (folder / FINISHED).write_text("")


def finish_rebase(project: Project, record: RebaseRecord) -> None:
    """MLflow's registry says what the ledger says of a rebase; else the next command lets it."""
    if _followed(project):
        told = rebase_told(project.home, project.name, record)
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_text("")


def finish_what_was_left(project: Project) -> None:
    """Rounds and rebases that are decided, and that an interruption left half told."""
    for number in unfinished(project.home, project.ledger):
        finish_round(project, number)
    for record in untold(project.home, project.ledger):
        finish_rebase(project, record)


def _followed(project: Project, further: Callable[[], None] = lambda: None) -> bool:
    """Whether MLflow knows all of the journals and of the ledger; it says so where it does not."""
    if not project.teller.settle():
        return False
    try:
        follow_ledger(project)
        further()
    except TrackingUnavailable as error:
        project.display.alarm("MLflow", str(error))
        return False
    return True


def _tell_decision(project: Project, number: int, folder: Path) -> None:
    """How the round ended, written once, as of when it was decided."""
    decision, journal = project.ledger.decision(number), project.journals.round(number)
    assert decision is not None
    if not journal.path.exists():  # of a round that an earlier version told to MLflow itself
        return
    closed = journal.closed
    if closed is not None and closed.status == "FINISHED":
        return
    stages = project.ledger.stages(number)
    keys = {f"rlhf.stage.{s.stage}.key": s.key for s in stages}
    outputs = {f"rlhf.stage.{s.stage}.{role}": ref.digest for s in stages for role, ref in s.outputs.items()}
    decided_at = int(datetime.fromisoformat(decision.decided_at).timestamp() * 1000)
    journal.reopen()
    journal.tag({"rlhf.outcome": decision.outcome, **keys, **outputs, NOTE: described(decision)})
    journal.add(
        Measured(t=decided_at, step=number, metrics=decision.metrics),
        Stored(t=decided_at, path=str(folder.relative_to(project.home)), folder="report"),
    )
    journal.write("decision.json", decision.model_dump_json(indent=1))
    journal.close("FINISHED")


def described(decision: DecisionRecord) -> str:
    """A round in Markdown, for the first lines of its run's page: outcome, gates, and where to read on."""
    gates = "".join(f"- {gate.sentence}\n" for gate in decision.gates)
    alarms = f"\nAlarms: {len(decision.alarms)}.\n" if decision.alarms else ""
    outcome = decision.outcome.replace("_", " ").capitalize()
    return f"**{outcome}**\n\n{gates}{alarms}\nPlots and samples: `report/report.html` among the artifacts."


def link_stages(project: Project, number: int) -> None:
    """The round's run names the runs of its stages, of this round or of the round that computed them."""
    run_ids = {record.stage: project.run_id(number, record.stage) for record in project.ledger.stages(number)}
    tags = {f"rlhf.stage.{stage}.run_id": run_id for stage, run_id in run_ids.items() if run_id}
    project.tracker.tag(project.run_id(number), tags)


def view(project: Project, number: int) -> RoundView:
    """What the report shows of a round, read from its artifacts and spools."""
    ledger = project.ledger
    record, decision = ledger.round(number), ledger.decision(number)
    assert record is not None and decision is not None
    rebased = ledger.rebase_before(number)
    rewards = _read(project, number, "reward_validation", "reward_report", RewardReport)
    comparison = _read(project, number, "comparison", "comparison", ComparisonReport)
    return RoundView(
        project=project.name,
        round=number,
        outcome=decision.outcome,
        stages=ledger.stages(number),
        gates=decision.gates,
        alarms=decision.alarms,
        update_steps=_steps(project, number),
        reward_model_metrics=rewards.metrics if rewards else {},
        calibration=[CalibrationPoint(b.confidence, b.accuracy, b.pairs) for b in rewards.calibration]
        if rewards
        else [],
        accuracy_by_round=rewards.accuracy_by_round if rewards else {},
        comparison=comparison.metrics if comparison else {},
        scores=_scores(project, number),
        samples=_samples(project, number),
        links={"MLflow run": project.run_id(number), "Prefect flow run": record.prefect_flow_run_id},
        settings_yaml=json.dumps(record.settings, indent=1),
        monitors=_read(project, number, "policy_update", "monitors", MonitorsReport),
        selection=_read(project, number, "policy_update", "selection", Selection),
        looked_at=_looked_at(project, number),
        rebased_after=rebased.round if rebased else None,
    )


def _read(project: Project, number: int, stage: str, role: str, model: type[Report]) -> Report | None:
    """What a stage of the round wrote as JSON; nothing if the round ended before it wrote that."""
    found = project.ledger.stage(number, stage)
    if found is None or role not in found.outputs:  # an earlier version wrote less
        return None
    return model.model_validate_json((project.store.open(found.outputs[role]) / f"{role}.json").read_bytes())


def _steps(project: Project, number: int) -> list[tuple[int, dict[str, float]]]:
    """The steps of the policy update, from its spool; empty if its work folder was cleared."""
    found = project.ledger.stage(number, "policy_update")
    if found is None:
        return []
    lines = read_lines(project.home / "work" / found.key / "metrics.jsonl")
    return [
        (int(str(line["step"])), metrics)
        for line in lines
        if isinstance(metrics := line["metrics"], dict) and "objective/scores" in metrics
    ]


def _looked_at(project: Project, number: int) -> list[LookedAt]:
    """The completions of the policy update that were kept; none if its work folder was cleared."""
    found = project.ledger.stage(number, "policy_update")
    path = project.home / "work" / found.key / "samples.jsonl" if found else None
    return [LookedAt.model_validate(line) for line in read_lines(path)] if path else []


def _scores(project: Project, number: int) -> dict[str, Scores]:
    """Proxy and gold of every held-out completion, where the round came to score them."""
    proxy = _values(project, number, "comparison", "comparison", "scores")
    before, after = (
        _values(project, number, f"measurement.{who}", "measurements", "measurements")
        for who in ("champion", "candidate")
    )
    found = {
        "proxy": (proxy.get("proxy_before"), proxy.get("proxy_after")),
        "gold": (before.get("gold"), after.get("gold")),
    }
    return {name: Scores(old, new) for name, (old, new) in found.items() if old and new}


def _values(project: Project, number: int, stage: str, role: str, file: str) -> dict[str, list[float]]:
    """The values of each metric in a stage's rows; none where the stage did not write such rows."""
    found = project.ledger.stage(number, stage)
    path = project.store.open(found.outputs[role]) / f"{file}.parquet" if found else None
    if path is None or not path.exists():
        return {}
    rows = by_metric(read_rows(path, Measurement))
    return {metric: [row.value for row in those] for metric, those in rows.items()}


def _samples(project: Project, number: int) -> list[Sample]:
    """The same prompts continued by champion and candidate."""
    both = [project.ledger.stage(number, f"measurement.{who}") for who in ("champion", "candidate")]
    if both[0] is None or both[1] is None:
        return []
    before, after = (
        read_rows(project.store.open(found.outputs["measurements"]) / "completions.parquet", Completion)
        for found in both
        if found
    )
    later = {completion.id: completion for completion in after}
    return [Sample(c.prompt_text, c.text, later[c.id].text) for c in before[:NUM_SAMPLES] if c.id in later]
