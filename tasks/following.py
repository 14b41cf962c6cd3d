"""Follows a running stage: its numbers and the machine's to its journal, its progress to the display."""

import json
import os
import threading
import time
from pathlib import Path

from tasks.journal import Journal, Measured, now
from tasks.project import Project
from tasks.system_metrics import SystemMonitor

SAMPLE_SECONDS = 10.0
"""How often the machine is looked at; a stage that is shorter has no such numbers."""


class Spooled:
    """A spool that may be an earlier attempt's until the stage writes to it, and may be made anew then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._stale = self._identity()

    def changed(self) -> bool:
        """Whether there is something to read from `offset` on."""
        identity = self._identity()
        if identity is None or identity == self._stale:
            return False
        self._stale = None
        if identity[0] < self.offset:
            self.offset = 0
        return identity[0] > self.offset

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return None
        return stat.st_size, stat.st_mtime_ns, stat.st_ino


class Follower:
    """Looks at a stage's work folder from before it starts until it has ended."""

    def __init__(self, project: Project, journal: Journal, shown: str, work: Path) -> None:
        self.project = project
        self.journal = journal
        self.shown = shown
        self._metrics = Spooled(work / "metrics.jsonl")
        self._progress = Spooled(work / "progress.jsonl")
        self._monitor: SystemMonitor | None = None
        self._samples = 0
        self._next_sample = time.monotonic() + SAMPLE_SECONDS
        self._lock = threading.Lock()

    def look(self) -> None:
        """Take over what is new, and let MLflow be told of it."""
        with self._lock:
            if self._progress.changed():
                self._show()
            if self._metrics.changed():
                self._metrics.offset = self.journal.copy_spool(self._metrics.path, self._metrics.offset)
            if time.monotonic() >= self._next_sample:
                self._sample()
        self.project.teller.nudge()

    def _sample(self) -> None:
        self._next_sample = time.monotonic() + SAMPLE_SECONDS
        self._monitor = self._monitor or SystemMonitor()
        self.journal.add(Measured(t=now(), step=self._samples, metrics=self._monitor.sample()))
        self._samples += 1

    def _show(self) -> None:
        with self._progress.path.open("rb") as file:
            file.seek(self._progress.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._progress.offset += len(line)
                told = json.loads(line)
                if "alarm" in told:
                    self.project.display.alarm(self.shown, told["alarm"])
                else:
                    self.project.display.progress(self.shown, told["done"], told["total"], told["text"])
