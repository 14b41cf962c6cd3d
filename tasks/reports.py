"""Where the reports of a project lie, and which decided rounds have not been told of to the end."""

from pathlib import Path

from rlhf_core.ledger import Ledger

FINISHED = "finished"
"""A file that is written last: registry, report and MLflow say what the ledger says."""


def report_folder(home: Path, project: str, number: int) -> Path:
    """Where the report of a round lies."""
    return home / "projects" / project / "reports" / f"round-{number:04d}"


def unfinished(home: Path, ledger: Ledger) -> list[int]:
    """Decided rounds whose report or MLflow run an interruption left behind."""
    return [
        number
        for number in ledger.rounds()
        if ledger.decision(number) and not (report_folder(home, ledger.name, number) / FINISHED).exists()
    ]
