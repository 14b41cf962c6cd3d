"""Tells MLflow again what a project's journals hold, into the database it had or into a new one."""

from pathlib import Path

from flows.console import ConsoleDisplay
from flows.loop import alone
from rlhf_core.ledger import Ledger
from rlhf_core.settings import Json
from tasks.mlflow_store import quiet_environment


def replay(home: Path, name: str, display: ConsoleDisplay) -> dict[str, Json]:
    """Runs, numbers, files, datasets and registry of a project as its home has them; says what MLflow lacked.

    A second time there is nothing to send. Raises `TrackingUnavailable` if MLflow cannot be reached.
    """
    from tasks.decisions import follow_ledger
    from tasks.finishing import finish_what_was_left, link_stages
    from tasks.project import Project, execution_of

    quiet_environment()
    ledger = Ledger(home / "projects", name)
    execution = execution_of(ledger)
    with alone(home, name, display, wait=False):
        project = Project(home, name, execution, display)
        for journal in project.journals.all():
            journal.mend()
        told = project.teller.tell()
        finish_what_was_left(project)
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
