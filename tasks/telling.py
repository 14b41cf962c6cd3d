"""Tells MLflow what the journals hold, in a thread of its own: no stage waits for an MLflow that is away."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tasks.journal import Journal, Journals
from tasks.mlflow_store import TrackingUnavailable
from tasks.tracking import Tracker

TELL_SECONDS = 5.0
"""How often a running stage's numbers are told."""
STAGE_SECONDS = 3.0
"""What a stage that has ended waits, once, for an MLflow that does not answer."""
OPEN_SECONDS = 60.0
"""What a command waits when it begins: a new home's database takes seconds to make."""
RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Told:
    """What MLflow was told."""

    runs: int = 0
    """Runs that it did not have."""
    facts: int = 0
    """Lines of journals."""

    def __add__(self, other: "Told") -> "Told":
        return Told(self.runs + other.runs, self.facts + other.facts)


class Teller:
    """Keeps MLflow level with the journals of a project; what it cannot tell now it tells later, in order."""

    def __init__(self, tracker: Tracker, journals: Journals, warn: Callable[[str], None]) -> None:
        self.tracker = tracker
        self.journals = journals
        self.behind = False
        """MLflow did not take what it was last told; said once, until it does."""
        self._warn = warn
        self._runs: dict[str, tuple[str, int]] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._telling: Future[Told] | None = None
        self._last = 0.0

    def tell(self) -> Told:
        """Tell all that MLflow does not know; raises `TrackingUnavailable`."""
        told = Told()
        try:
            self.tracker.store.check()
            # Asked of MLflow itself, so that a database that was put back or is new is told what it lacks.
            self._runs = self.tracker.runs() if self._runs is None else self._runs
            for journal in self.journals.all():
                told += self._tell(journal, self._runs)
        except TrackingUnavailable:
            self._runs = None
            raise
        return told

    def nudge(self) -> None:
        """Tell what is new, in the background, unless that is being done or was done just now."""
        if self._telling is not None and not self._telling.done():
            return
        self._look_back()
        if time.monotonic() - self._last > TELL_SECONDS:
            self._last = time.monotonic()
            self._telling = self._pool.submit(self.tell)

    def settle(self, seconds: float = STAGE_SECONDS, *, patient: bool = False) -> bool:
        """Whether MLflow knows all that was written before this call, within so many seconds.

        One that is behind already is not waited for, unless with patience, which tries again until the
        time is over.
        """
        if self.behind and not patient:
            self.nudge()
            if self.behind:
                return False
        deadline = time.monotonic() + seconds
        while not self._try(max(0.0, deadline - time.monotonic())):
            if not patient or time.monotonic() + RETRY_SECONDS > deadline:
                return False
            time.sleep(RETRY_SECONDS)
        return True

    def stop(self) -> None:
        """End the thread; what it is telling now is finished or fails."""
        self._pool.shutdown(cancel_futures=True)

    def _try(self, seconds: float) -> bool:
        if self._telling is not None:
            self._telling.cancel()
        self._last = time.monotonic()
        self._telling = self._pool.submit(self.tell)
        try:
            self._telling.result(seconds)
        except TimeoutError:
            self._fall_behind(f"MLflow has not answered for {seconds:.0f} s.")
        except TrackingUnavailable as error:
            self._fall_behind(str(error))
        else:
            self.behind = False
            return True
        return False

    def _look_back(self) -> None:
        """Take notice of how the last telling in the background went."""
        if self._telling is None or self._telling.cancelled():
            return
        try:
            self._telling.result(0)
        except TrackingUnavailable as error:
            self._fall_behind(str(error))
        else:
            self.behind = False

    def _fall_behind(self, reason: str) -> None:
        if not self.behind:
            self.behind = True
            self._warn(f"{reason} Stages go on; MLflow is told later.")

    def _tell(self, journal: Journal, runs: dict[str, tuple[str, int]]) -> Told:
        made = self._run(journal, runs)
        run_id, told = runs[journal.opened.id]
        if journal.size == told:
            return Told(made)
        sent, told = self.tracker.send(run_id, journal.facts(told), told)
        runs[journal.opened.id] = (run_id, told)
        return Told(made, sent)

    def _run(self, journal: Journal, runs: dict[str, tuple[str, int]]) -> int:
        """The number of runs that had to be made so that this journal has one."""
        if journal.opened.id in runs:
            journal.found(runs[journal.opened.id][0])
            return 0
        parent = self.journals.parent(journal)
        made = 0 if parent is None else self._run(parent, runs)
        parent_id = None if parent is None else runs[parent.opened.id][0]
        run_id = self.tracker.make_run(journal.opened, parent_id)
        runs[journal.opened.id] = (run_id, 0)
        journal.found(run_id)
        return made + 1
