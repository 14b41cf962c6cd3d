"""Looks at every step with every monitor, says what is new, and keeps the score for the report."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from pydantic import TypeAdapter, ValidationError

from rlhf_core.alarms import ENDED_BY_MONITOR, Action, Alarm, MonitorRecord, MonitorsReport, WorstReading
from rlhf_core.algorithms.experience import Experience
from rlhf_core.algorithms.monitors.looking import MAX_EXAMPLES, Memory, Monitor, Reading, Seen
from rlhf_core.settings import Json

CALM_STEPS = 3
"""Steps within all limits after which an alarm is over: one that comes and goes is one alarm."""
MAX_TOLD = 3
"""Times that one monitor's alarm is said; what comes after is counted only."""
SCHEMA = 1
"""Of the state that a checkpoint holds; raised when it would be read differently."""


@dataclass
class Watched:
    """How one monitor stands."""

    memory: Memory = field(default_factory=Memory)
    beyond: int = 0
    """Steps in a row with a number beyond its limit."""
    calm: int = 0
    """Steps in a row without."""
    first: int | None = None
    since: int | None = None
    steps: int = 0
    told: int = 0
    worst: dict[str, WorstReading] = field(default_factory=dict)


@dataclass
class State:
    """Everything a watcher has seen, as plain JSON values once dumped."""

    watched: dict[str, Watched]
    schema: int = SCHEMA
    ended_by: str | None = None
    steps: int = 0
    alarms: list[Alarm] = field(default_factory=list)


_STATE = TypeAdapter(State)


class Watcher:
    """The monitors of one stage at work."""

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        self._monitors = dict(monitors)
        self._state = State({name: Watched() for name in self._looking()})

    def step(self, step: int, found: Experience, metrics: Mapping[str, float]) -> list[Alarm]:
        """What is new at a step, whose rollouts and metrics are all known; called once a step, in order."""
        seen = Seen(step, found, metrics)
        new: list[Alarm] = []
        for name, monitor in self._looking().items():
            watched = self._state.watched[name]
            readings = [one for one in monitor.look(seen, watched.memory) if math.isfinite(one.value)]
            for one in readings:
                _keep_worst(watched, one, step)
            new += _judge(name, monitor, watched, step, [one for one in readings if one.beyond])
        self._state.steps += 1
        self._state.alarms += new
        stops = [alarm.monitor for alarm in new if alarm.severity == "stop" and not alarm.over]
        self._state.ended_by = self._state.ended_by or next(iter(stops), None)
        return new

    @property
    def ended(self) -> str | None:
        """Why the stage must end, as `monitor:<name>`; none where it may go on."""
        return None if self._state.ended_by is None else f"{ENDED_BY_MONITOR}{self._state.ended_by}"

    @property
    def num_alarmed(self) -> int:
        """Monitors whose alarm is on."""
        return sum(watched.since is not None for watched in self._state.watched.values())

    def report(self) -> MonitorsReport:
        """What was seen so far."""
        return MonitorsReport(
            ended_by=self._state.ended_by,
            steps=self._state.steps,
            monitors=tuple(self._record(name) for name in self._monitors),
            alarms=tuple(self._state.alarms),
        )

    def state_dict(self) -> dict[str, Json]:
        """All that a resumed stage needs to alarm as one that was never interrupted."""
        return cast(dict[str, Json], _STATE.dump_python(self._state, mode="json"))

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Go on where `state_dict` was taken; refuses the state of other monitors."""
        try:
            loaded = _STATE.validate_python(dict(state))
        except ValidationError as error:
            raise ValueError(f"this is no state of monitors, nothing can go on from it: {error}") from error
        if loaded.schema != SCHEMA or list(loaded.watched) != list(self._looking()):
            raise ValueError(
                f"the state is of schema {loaded.schema} and watches {', '.join(loaded.watched)}; here is "
                f"schema {SCHEMA}, watching {', '.join(self._looking())}: a resumed stage would alarm "
                "otherwise than an undisturbed one. Resume with the settings and version it was started "
                "with, or start the stage over."
            )
        self._state = loaded

    def _looking(self) -> dict[str, Monitor]:
        return {name: one for name, one in self._monitors.items() if one.action is not Action.OFF}

    def _record(self, name: str) -> MonitorRecord:
        monitor, watched = self._monitors[name], self._state.watched.get(name, Watched())
        return MonitorRecord(
            monitor=name,
            action=monitor.action,
            first=watched.first,
            since=watched.since,
            steps=watched.steps,
            worst=tuple(watched.worst.values()),
            advice=monitor.advice,
        )


def _keep_worst(watched: Watched, reading: Reading, step: int) -> None:
    known = watched.worst.get(reading.what)
    worse = known is None or reading.worse_than(known.value)
    # One that counts is worse than any that does not: it is what an alarm would have come from.
    if known is None or (worse if reading.counts == known.counts else reading.counts):
        watched.worst[reading.what] = WorstReading(
            what=reading.what,
            value=reading.value,
            step=step,
            limit=reading.limit,
            side=reading.side,
            counts=reading.counts,
        )


def _judge(
    name: str, monitor: Monitor, watched: Watched, step: int, beyond: list[Reading]
) -> Iterator[Alarm]:
    """The alarm that begins or ends at this step, if one does."""
    severity = "stop" if monitor.action is Action.STOP else "warn"
    watched.beyond = watched.beyond + 1 if beyond else 0
    watched.calm = 0 if beyond else watched.calm + 1
    watched.steps += bool(beyond)
    if watched.since is None and watched.beyond >= monitor.steps and beyond:
        watched.since, watched.told = step, watched.told + 1
        watched.first = step if watched.first is None else watched.first
        if watched.told <= MAX_TOLD:
            yield Alarm(
                monitor=name,
                step=step,
                severity=severity,
                sentence=_sentence(monitor, watched, beyond),
                examples=tuple(example for one in beyond for example in one.examples)[: 2 * MAX_EXAMPLES],
            )
    elif watched.since is not None and watched.calm >= CALM_STEPS:
        since, watched.since = watched.since, None
        if watched.told <= MAX_TOLD:
            said = f"over; it was on since step {since}, and {CALM_STEPS} steps were within the limits."
            yield Alarm(monitor=name, step=step, severity=severity, over=True, sentence=said)


def _sentence(monitor: Monitor, watched: Watched, beyond: list[Reading]) -> str:
    """What is wrong with the values, why it matters, what to change."""
    found = "; ".join(one.spoken for one in beyond)
    lasting = f", for {watched.beyond} steps" if watched.beyond > 1 else ""
    if watched.told > 1:
        again = f"again, time {watched.told}"
        last = "; further ones are counted only" if watched.told == MAX_TOLD else ""
        return f"{again}{last}: {found}{lasting}."
    end = " The stage ends here, and its candidate is not promoted." if monitor.action is Action.STOP else ""
    advice = f"{monitor.advice[0].upper()}{monitor.advice[1:]}."
    return f"{found}{lasting}. {monitor.why}. {advice}{end}"
