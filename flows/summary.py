"""What happened in a project, for people and for programs; read from its ledger."""

from collections.abc import Set
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from flows.terminal import safe
from rlhf_core.artifacts import ArtifactRef
from rlhf_core.ledger import DecisionRecord, Ledger, RebaseRecord, StageRecord
from rlhf_core.settings import Json

COLUMNS = {
    "reward_model/accuracy": "RM acc.",
    "eval/gold_before": "gold before",
    "eval/gold_after": "gold after",
    "eval/win_rate": "win rate",
    "eval/kl_to_initial": "KL to initial",
}
OUTCOMES = {"reward_model_rejected": "RM rejected"}
GAIN = "eval/gold_minus_initial"


def summary(home: Path, name: str, executed: Set[tuple[int, str]] | None = None) -> dict[str, Json]:
    """The project as JSON; `executed` names what this command computed, None means to tell it as recorded."""
    ledger = Ledger(home / "projects", name)
    return {
        "project": name,
        "home": str(home),
        "champion": champion_of(home, name, ledger),
        "rebases": [rebase_of(record) for record in ledger.rebases()],
        "rounds": [_round(home, ledger, number, executed) for number in ledger.rounds()],
    }


def champion_of(home: Path, name: str, ledger: Ledger) -> dict[str, Json]:
    """The policy in service as JSON."""
    return {"policy": ledger.champion().digest, "version": champion_version(home, name, ledger)}


def rebase_of(record: RebaseRecord) -> dict[str, Json]:
    """A rebase as JSON; artifacts by their digests."""
    return {
        "after_round": record.round,
        "trunk": record.trunk.digest,
        "policy": record.policy.digest,
        "merged_champion": record.champion.digest,
        "old_trunk": record.old_trunk.digest,
        "metrics": dict(record.metrics),
    }


def short(ref: ArtifactRef) -> str:
    """As much of a digest as people compare."""
    return ref.digest[:12]


def champion_version(home: Path, name: str, ledger: Ledger) -> int | None:
    """The champion's number in MLflow's registry; none while MLflow is away or was not told yet."""
    from tasks.mlflow_store import TrackingUnavailable
    from tasks.registry import Registry
    from tasks.tracking import Tracker

    try:
        return Registry(Tracker(home, name)).version_of(
            "policy", ledger.champion().digest, ledger.champion_round()
        )
    except TrackingUnavailable:
        return None


def _round(home: Path, ledger: Ledger, number: int, executed: Set[tuple[int, str]] | None) -> dict[str, Json]:
    record, decision = ledger.round(number), ledger.decision(number)
    assert record is not None
    from tasks.project import run_id

    return {
        "round": number,
        "outcome": decision.outcome if decision else "open",
        "mlflow_run_id": run_id(home, ledger, number),
        "prefect_flow_run_id": record.prefect_flow_run_id,
        "stages": [_stage(home, ledger, stage, number, executed) for stage in ledger.stages(number)],
        "metrics": dict(decision.metrics) if decision else {},
        "alarms": list(decision.alarms) if decision else [],
        "gates": _gates(decision) if decision else [],
    }


def _stage(
    home: Path, ledger: Ledger, stage: StageRecord, number: int, executed: Set[tuple[int, str]] | None
) -> dict[str, Json]:
    from tasks.project import run_id

    return {
        "stage": stage.stage,
        "artifacts": {role: ref.digest for role, ref in stage.outputs.items()},
        "cached": stage.cached if executed is None else (number, stage.stage) not in executed,
        "seconds": round(stage.seconds, 3),
        "mlflow_run_id": run_id(home, ledger, number, stage.stage),
    }


def _gates(decision: DecisionRecord) -> list[Json]:
    return [gate.to_json() for gate in decision.gates]


def show(home: Path, name: str, console: Console) -> None:
    """The project as a table, and where to look."""
    ledger = Ledger(home / "projects", name)
    table = Table(title=f"project {name}", box=box.SIMPLE)
    for title in ("round", "outcome", *COLUMNS.values(), "minutes"):
        words = title == "outcome"
        table.add_column(title, justify="left" if words else "right", min_width=11 if words else 5)
    rebased = {record.round: record for record in ledger.rebases()}
    for number in ledger.rounds():
        decision = ledger.decision(number)
        metrics = decision.metrics if decision else {}
        minutes = sum(stage.seconds for stage in ledger.stages(number)) / 60
        numbers = [f"{metrics[key]:.3f}" if key in metrics else "-" for key in COLUMNS]
        outcome = OUTCOMES.get(decision.outcome, decision.outcome) if decision else "open"
        table.add_row(str(number), outcome, *numbers, f"{minutes:.1f}", end_section=number in rebased)
        if number in rebased:
            table.add_row("", "rebased", *["" for _ in COLUMNS], "", end_section=True)
    console.print(table)
    champion = short(ledger.champion())
    console.print(f"champion  policy {champion}, version {champion_version(home, name, ledger)}")
    for record in rebased.values():
        console.print(
            f"rebased   after round {record.round}: champion {short(record.champion)} became trunk "
            f"{short(record.trunk)}; from round {record.round + 1} on the initial policy is "
            f"{short(record.policy)}, the first one on it",
            soft_wrap=True,
        )
    won = ledger.won()
    if won is not None and GAIN in won.metrics:
        value, low, high = (won.metrics[f"{GAIN}{end}"] for end in ("", "_low", "_high"))
        console.print(
            f"gain      gold {value:+.3f} over the initial policy, 95 % interval {low:+.3f} to {high:+.3f}"
        )
    for number in ledger.rounds()[-1:]:
        _explain(ledger.decision(number), console)
    for number in ledger.rounds():
        page = home / "projects" / name / "reports" / f"round-{number:04d}" / "report.html"
        if page.exists():
            console.print(f"report    {page}", soft_wrap=True)
    console.print(f"pages     rlhf ui --home {home}", soft_wrap=True, highlight=False)


def _explain(decision: DecisionRecord | None, console: Console) -> None:
    """What failed and what alarmed in a round, each with what to change."""
    if decision is None:
        return
    for gate in decision.gates:
        if not gate.passed:
            console.print(f"failed    round {decision.round}: {gate.sentence}", markup=False)
    for alarm in decision.alarms:
        console.print(f"alarm     round {decision.round}: {safe(alarm)}", style="yellow", markup=False)
