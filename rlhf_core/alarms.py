"""What a stage that watches itself says: alarms as they come, and a record of every monitor at the end."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from rlhf_core.settings import Settings

ENDED_BY_MONITOR = "monitor:"
"""What a stage's end is called by, followed by the name of the monitor that ended it."""

NOTHING_SEEN = "nothing to look at"
"""The state of a monitor whose numbers the stage never had."""


class Action(StrEnum):
    """What follows when a monitor's numbers are beyond their limits."""

    WARN = "warn"
    """It is said once, counted, and said again when it is over."""
    STOP = "stop"
    """The stage ends after this step, and its candidate is not promoted."""
    OFF = "off"
    """The monitor does not look."""


class Alarm(Settings):
    """One thing that a monitor says."""

    monitor: str
    """The monitor's name."""
    step: int
    """The step whose numbers it speaks of."""
    severity: Literal["warn", "stop"]
    """`stop` ended the stage."""
    over: bool = False
    """It says that an alarm is over."""
    sentence: str
    """What is wrong with the values, why it matters, what to change."""
    examples: tuple[str, ...] = ()
    """Texts that show it."""

    @property
    def line(self) -> str:
        """The alarm as one reads it among others."""
        return f"step {self.step}: {self.monitor}: {self.sentence}"


class WorstReading(Settings):
    """The worst that a monitor saw of one number."""

    what: str
    """The number in words."""
    value: float
    """Its worst value."""
    step: int
    """The step it was seen at."""
    limit: float
    """Where it begins to be wrong."""
    side: Literal["above", "below"]
    """Which side of the limit is wrong."""
    counts: bool = True
    """Whether all else that makes it wrong was true as well."""

    @property
    def spoken(self) -> str:
        """The number beside its limit."""
        alone = "" if self.counts else "; the rest of the condition did not hold"
        return f"{self.what}: {self.value:.3g} at step {self.step} (limit {self.limit:.3g}{alone})"


class MonitorRecord(Settings):
    """What one monitor saw in a stage."""

    monitor: str
    """Its name, which is its place in the settings too."""
    action: Action
    """What it may do."""
    first: int | None = None
    """The step of its first alarm."""
    since: int | None = None
    """The step at which the alarm began that was not over when the stage ended."""
    steps: int = Field(default=0, ge=0)
    """Steps with numbers beyond a limit, alarm or not."""
    worst: tuple[WorstReading, ...] = ()
    """The worst value of each number that was looked at; empty where none could be."""
    advice: str
    """What to change."""

    @property
    def state(self) -> str:
        """How it stands in a word or two."""
        if self.action is Action.OFF:
            return "off"
        if self.since is not None:
            return f"since step {self.since}"
        if self.first is not None:
            return f"over; first at step {self.first}"
        return "ok" if self.worst else NOTHING_SEEN


class MonitorsReport(Settings):
    """What watched a stage, and what it saw; the file `monitors.json` of an artifact."""

    ended_by: str | None
    """The monitor that ended the stage."""
    steps: int
    """Steps that were watched."""
    monitors: tuple[MonitorRecord, ...]
    """Every monitor, in the order of the settings."""
    alarms: tuple[Alarm, ...]
    """All that was said, in order."""
