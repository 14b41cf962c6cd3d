"""Where the reports of a project lie, and which rounds and rebases have not been told of to the end."""

from pathlib import Path

from rlhf_core.ledger import Ledger, RebaseRecord

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


def rebase_told(home: Path, project: str, record: RebaseRecord) -> Path:
    """The file that is there once MLflow has the policy that a rebase made."""
    return home / "projects" / project / "reports" / f"rebase-{record.round:04d}" / FINISHED


def untold(home: Path, ledger: Ledger) -> list[RebaseRecord]:
    """Rebases that an interruption kept from MLflow's registry."""
    return [record for record in ledger.rebases() if not rebase_told(home, ledger.name, record).exists()]
