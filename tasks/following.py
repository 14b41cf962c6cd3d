"""Tells MLflow and the display what a running stage writes; an MLflow that is away stops no stage."""

import json
import logging
import threading
import time
from pathlib import Path
from typing import Literal

from tasks.mlflow_store import TrackingUnavailable
from tasks.project import Project

FORWARD_SECONDS = 5.0
log = logging.getLogger(__name__)


class Follower:
    """Follows a stage's spool: metrics to MLflow every few seconds, progress to the display at once."""

    def __init__(self, project: Project, run_id: str, shown: str, work: Path) -> None:
        self.project = project
        self.run_id = run_id
        self.shown = shown
        self.metrics = work / "metrics.jsonl"
        self.progress = work / "progress.jsonl"
        self._sent = self._shown = 0
        self._last_forward = 0.0
        self._lock = threading.Lock()

    def look(self) -> None:
        """Pass on what is new."""
        with self._lock:
            self._show()
            if time.monotonic() - self._last_forward > FORWARD_SECONDS:
                self._forward()

    def drain(self) -> None:
        """Pass on all of it."""
        with self._lock:
            self._show()
            self._forward()

    def _forward(self) -> None:
        self._last_forward = time.monotonic()
        try:
            self._sent = self.project.tracker.forward(self.run_id, self.metrics, self._sent)
        except TrackingUnavailable as error:
            log.warning("%s; the metrics stay in %s", error, self.metrics)

    def _show(self) -> None:
        if not self.progress.exists():
            return
        with self.progress.open("rb") as file:
            file.seek(self._shown)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._shown += len(line)
                told = json.loads(line)
                if "alarm" in told:
                    self.project.display.alarm(self.shown, told["alarm"])
                else:
                    self.project.display.progress(self.shown, told["done"], told["total"], told["text"])


def close_run(project: Project, run_id: str, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """Close a run; one that MLflow cannot be told of now stays open, and is repaired later."""
    try:
        project.tracker.close(run_id, status)
    except TrackingUnavailable as error:
        log.warning("%s", error)
