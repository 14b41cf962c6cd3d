"""What follows a decision: registry, report, the round's MLflow run; all may be done again at any time."""

import json
from typing import TypeVar

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext

from rlhf_core.evals.held_out import by_metric
from rlhf_core.metrics import read_lines
from rlhf_core.records import Completion, Measurement
from rlhf_core.report.page import write_report
from rlhf_core.report.view import CalibrationPoint, RoundView, Sample, Scores
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows
from rlhf_core.stages.comparison import ComparisonReport
from rlhf_core.stages.reward_validation import RewardReport
from tasks.decisions import follow_ledger
from tasks.project import Project
from tasks.reports import FINISHED, report_folder

NUM_SAMPLES = 10
Report = TypeVar("Report", bound=Settings)


def finish_round(project: Project, number: int) -> None:
    """Registry, report and MLflow say what the ledger says of a decided round."""
    record, decision = project.ledger.round(number), project.ledger.decision(number)
    assert record is not None and decision is not None
    follow_ledger(project)
    folder = report_folder(project.home, project.name, number)
    folder.mkdir(parents=True, exist_ok=True)
    page = write_report(view(project, number), folder)
    tracker, run_id = project.tracker, record.mlflow_run_id
    stages = project.ledger.stages(number)
    tracker.tag(
        run_id,
        {
            "rlhf.outcome": decision.outcome,
            **{f"rlhf.stage.{s.stage}.run_id": s.mlflow_run_id for s in stages},
            **{f"rlhf.stage.{s.stage}.key": s.key for s in stages},
            **{f"rlhf.stage.{s.stage}.{role}": ref.digest for s in stages for role, ref in s.outputs.items()},
        },
    )
    tracker.log_summary(run_id, decision.metrics, step=number)
    tracker.artifact(run_id, folder, "report")
    tracker.text(run_id, "decision.json", decision.model_dump_json(indent=1))
    if FlowRunContext.get() is not None:
        create_markdown_artifact(page.read_text(), key=f"{project.name}-round-{number:04d}".replace("_", "-"))
    tracker.close(run_id, "FINISHED")
    (folder / FINISHED).write_text("")


def view(project: Project, number: int) -> RoundView:
    """What the report shows of a round, read from its artifacts and spools."""
    ledger = project.ledger
    record, decision = ledger.round(number), ledger.decision(number)
    assert record is not None and decision is not None
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
        links={"MLflow run": record.mlflow_run_id, "Prefect flow run": record.prefect_flow_run_id},
        settings_yaml=json.dumps(record.settings, indent=1),
    )


def _read(project: Project, number: int, stage: str, role: str, model: type[Report]) -> Report | None:
    """What a stage of the round wrote as JSON; nothing if the round ended before it."""
    found = project.ledger.stage(number, stage)
    if found is None:
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
