"""A project of a home, opened for work: its store, its ledger, its tracking, and who shows how far it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlhf_core.artifacts import ArtifactRef, Store
from rlhf_core.ledger import Ledger
from rlhf_core.settings import Execution, Json, parse_settings
from rlhf_core.stages import job_key
from rlhf_core.stages.context import Job
from tasks.journal import Journal, Journals
from tasks.registry import Registry
from tasks.telling import OPEN_SECONDS, Teller
from tasks.tracking import Tracker

JOURNAL = "journal"
"""The file of a work folder that names the journal of what was last computed there, from the home."""


class Display(Protocol):
    """Shows people how far a stage is."""

    def started(self, name: str) -> None:
        """A stage begins."""

    def progress(self, name: str, done: int, total: int, text: str) -> None:
        """It is this far."""

    def finished(self, name: str, seconds: float, cached: bool) -> None:
        """It is done."""

    def alarm(self, name: str, sentence: str) -> None:
        """Something looks wrong."""


@dataclass
class Project:
    """A project of a home, opened for work."""

    home: Path
    name: str
    execution: Execution
    display: Display
    store: Store = field(init=False)
    ledger: Ledger = field(init=False)
    tracker: Tracker = field(init=False)
    registry: Registry = field(init=False)
    journals: Journals = field(init=False)
    teller: Teller = field(init=False)
    executed: set[tuple[int, str]] = field(default_factory=set)
    """(round, stage) of all that this process computed."""

    def __post_init__(self) -> None:
        self.store = Store(self.home / "store")
        self.ledger = Ledger(self.home / "projects", self.name)
        self.tracker = Tracker(self.home, self.name)
        self.registry = Registry(self.tracker)
        self.journals = journals_of(self.home, self.name)
        self.teller = Teller(self.tracker, self.journals, lambda text: self.display.alarm("MLflow", text))

    def begin_telling(self) -> list[str]:
        """Make MLflow level with what earlier commands left; gives the runs that were left open.

        Whoever calls it is the only one who plays the project, so an open run is a killed process's.
        """
        left = [journal.opened.name for journal in self.journals.all() if journal.mend()]
        self.teller.settle(OPEN_SECONDS)
        return left

    def run_id(self, number: int, stage: str = "") -> str:
        """The MLflow run of a round or of a stage in it."""
        return run_id(self.home, self.ledger, number, stage)

    def job(
        self, name: str, settings: Mapping[str, Json], inputs: Mapping[str, ArtifactRef], seed: int
    ) -> tuple[Job, str]:
        """The job of a stage and its key; its work folder is named by the key."""
        key = job_key(name, settings, inputs, seed)
        work = self.home / "work" / key
        return (
            Job(
                stage=name,
                settings=dict(settings),
                inputs=dict(inputs),
                seed=seed,
                execution=self.execution,
                store=str(self.store.root),
                work=str(work),
            ),
            key,
        )


def execution_of(ledger: Ledger) -> Execution:
    """Where and how fast a project computes, as it was opened."""
    held = ledger.project().settings.get("execution", {})
    return parse_settings(Execution, held if isinstance(held, dict) else {})


def journals_of(home: Path, name: str) -> Journals:
    """The journals of a project."""
    return Journals(home / "projects" / name / "tracking", name)


def journal_of(home: Path, key: str) -> Journal | None:
    """The journal of the stage run that computed what this key names, of whichever project."""
    named = home / "work" / key / JOURNAL
    journal = Journal(home / named.read_text()) if named.exists() else None
    return journal if journal is not None and journal.path.exists() else None


def run_id(home: Path, ledger: Ledger, number: int, stage: str = "") -> str:
    """The MLflow run of a round or of a stage in it, which may be an earlier round's; empty if none.

    The ledger's own record names what was known when it was written: a run can be made later, or anew.
    """
    if stage:
        record = ledger.stage(number, stage)
        journal = journal_of(home, record.key) if record else None
        recorded = record.mlflow_run_id if record else ""
    else:
        opened = ledger.round(number)
        journal = journals_of(home, ledger.root.parent.name).round(number)
        recorded = opened.mlflow_run_id if opened else ""
    return (journal.run_id if journal else "") or recorded
