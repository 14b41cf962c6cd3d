"""Tells MLflow again what a project's journals hold, into the database it had or into a new one."""

from pathlib import Path

from flows.console import ConsoleDisplay
from flows.loop import alone
from rlhf_core.ledger import Ledger
from rlhf_core.settings import Execution, Json, parse_settings
from tasks.mlflow_store import quiet_environment


def replay(home: Path, name: str, display: ConsoleDisplay) -> dict[str, Json]:
    """Runs, numbers, files, datasets and registry of a project as its home has them; says what MLflow lacked.

    A second time there is nothing to send. Raises `TrackingUnavailable` if MLflow cannot be reached.
    """
    from tasks.decisions import follow_ledger
    from tasks.finishing import finish_round, link_stages
    from tasks.project import Project
    from tasks.reports import unfinished

    quiet_environment()
    ledger = Ledger(home / "projects", name)
    held = ledger.project().settings.get("execution", {})
    execution = parse_settings(Execution, held if isinstance(held, dict) else {})
    with alone(home, name, display, wait=False):
        project = Project(home, name, execution, display)
        for journal in project.journals.all():
            journal.mend()
        told = project.teller.tell()
        for number in unfinished(home, ledger):
            finish_round(project, number)
        told = told + project.teller.tell()
        version = follow_ledger(project)
        for number in ledger.rounds():
            if ledger.decision(number) is not None:
                link_stages(project, number)
        project.teller.stop()
    return {
        "project": name,
        "rounds": len(ledger.rounds()),
        "runs_made": told.runs,
        "facts_sent": told.facts,
        "champion_version": version,
    }
