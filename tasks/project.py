"""A project of a home, opened for work: its store, its ledger, its tracker, and who shows how far it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlhf_core.artifacts import ArtifactRef, Store
from rlhf_core.ledger import Ledger
from rlhf_core.settings import Execution, Json
from rlhf_core.stages import job_key
from rlhf_core.stages.context import Job
from tasks.registry import Registry
from tasks.tracking import Tracker


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
    executed: set[tuple[int, str]] = field(default_factory=set)
    """(round, stage) of all that this process computed."""

    def __post_init__(self) -> None:
        self.store = Store(self.home / "store")
        self.ledger = Ledger(self.home / "projects", self.name)
        self.tracker = Tracker(self.home, self.name)
        self.registry = Registry(self.tracker)

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
