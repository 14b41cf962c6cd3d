"""What MLflow shall know of each run, in order and with its own times, in the project's own folder.

    tracking/0007/round.jsonl               the round's run
    tracking/0007/policy_update.2.jsonl     the second attempt at a stage
    tracking/0007/policy_update.2.run       the id that MLflow gave the run, once it has

Knows no MLflow. Written by the one process that holds the project; MLflow is told from here, now or later,
so that a database that was away, or is gone, can be made whole.
"""

import functools
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from rlhf_core.artifacts import create_once, replace
from rlhf_core.settings import Settings

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Opened(Settings):
    """A run begins; always the first fact of a journal."""

    fact: Literal["opened"] = "opened"
    t: int
    """Milliseconds since 1970, as in every fact."""
    id: str
    """What the run is found by in MLflow."""
    name: str
    tags: dict[str, str]


class Reopened(Settings):
    """A run that was ended goes on."""

    fact: Literal["reopened"] = "reopened"
    t: int


class Tagged(Settings):
    """Tags hold from here on."""

    fact: Literal["tagged"] = "tagged"
    t: int
    tags: dict[str, str]


class Parameters(Settings):
    """Parameters that the run had not before."""

    fact: Literal["parameters"] = "parameters"
    t: int
    parameters: dict[str, str]


class Measured(Settings):
    """Numbers of a step; they may be NaN."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")
    fact: Literal["measured"] = "measured"
    t: int
    step: int
    metrics: dict[str, float]


class Wrote(Settings):
    """A text of the run's artifacts."""

    fact: Literal["wrote"] = "wrote"
    t: int
    name: str
    text: str


class Stored(Settings):
    """Files of the run's artifacts."""

    fact: Literal["stored"] = "stored"
    t: int
    path: str
    """Their folder, from the home."""
    folder: str
    """The folder among the artifacts."""


class Read(Settings):
    """A row set that went in."""

    fact: Literal["read"] = "read"
    t: int
    role: str
    kind: str
    digest: str
    rows: int


class Closed(Settings):
    """A run ends."""

    fact: Literal["closed"] = "closed"
    t: int
    status: Status


Fact = Opened | Reopened | Tagged | Parameters | Measured | Wrote | Stored | Read | Closed
FACT: TypeAdapter[Fact] = TypeAdapter(Annotated[Fact, Field(discriminator="fact")])


def now() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _line(fact: Fact) -> bytes:
    return fact.model_dump_json().encode() + b"\n"


class Journal:
    """The facts of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def begin(cls, path: Path, name: str, tags: Mapping[str, str]) -> "Journal":
        """A new journal; MLflow need not be there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = Opened(t=now(), id=uuid.uuid4().hex, name=name, tags=dict(tags))
        create_once(path, _line(opened))
        return cls(path)

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self.path.stat().st_size

    @functools.cached_property
    def opened(self) -> Opened:
        """How the run began."""
        with self.path.open("rb") as lines:
            return Opened.model_validate_json(lines.readline())

    @property
    def run_id(self) -> str:
        """The id of the run in MLflow; empty until MLflow has it."""
        path = self.path.with_suffix(".run")
        return path.read_text() if path.exists() else ""

    def found(self, run_id: str) -> None:
        """Keep the id that MLflow gave the run."""
        if run_id != self.run_id:
            replace(self.path.with_suffix(".run"), run_id.encode())

    @property
    def closed(self) -> Closed | None:
        """How the run ended, if nothing came after its end."""
        *_, (last, _) = self.facts()
        return last if isinstance(last, Closed) else None

    def facts(self, offset: int = 0) -> Iterator[tuple[Fact, int]]:
        """Every fact from byte `offset` on, with the offset behind it; a torn last line waits.

        An offset that is no line's end is from before the journal lost its end with the machine's power: then
        it is every fact, since to tell one again changes nothing.
        """
        with self.path.open("rb") as lines:
            lines.seek(max(0, offset - 1))
            if offset and lines.read(1) != b"\n":
                offset = 0
                lines.seek(0)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                yield FACT.validate_json(line), offset

    def add(self, *facts: Fact) -> None:
        """Append facts, all in one write."""
        with self.path.open("ab") as file:
            file.write(b"".join(map(_line, facts)))

    def tag(self, tags: Mapping[str, str]) -> None:
        """Tags hold from here on."""
        self.add(Tagged(t=now(), tags=dict(tags)))

    def write(self, name: str, text: str) -> None:
        """A text among the run's artifacts."""
        self.add(Wrote(t=now(), name=name, text=text))

    def parameters(self, parameters: Mapping[str, str]) -> None:
        """Parameters; one that the run has keeps its value."""
        known = {key for fact, _ in self.facts() if isinstance(fact, Parameters) for key in fact.parameters}
        new = {key: value for key, value in parameters.items() if key not in known}
        if new:
            self.add(Parameters(t=now(), parameters=new))

    def copy_spool(self, spool: Path, offset: int = 0) -> int:
        """Take over a stage's numbers from byte `offset` of its spool; gives the offset to go on from."""
        if not spool.exists():
            return offset
        with spool.open("rb") as lines:
            lines.seek(offset)
            whole, newline, _ = lines.read().rpartition(b"\n")
        told = [json.loads(line) for line in whole.splitlines()]
        if told:
            self.add(*(Measured(t=line["t"], step=line["step"], metrics=line["metrics"]) for line in told))
        return offset + len(whole + newline)

    def reopen(self) -> None:
        """Go on with a run that was ended."""
        if self.closed:
            self.add(Reopened(t=now()))

    def close(self, status: Status, t: int | None = None) -> None:
        """End the run."""
        self.add(Closed(t=now() if t is None else t, status=status))

    def mend(self) -> bool:
        """End the run as KILLED, at its last sign of life, if a process that is gone left it open."""
        whole = self.path.read_bytes().rpartition(b"\n")
        os.truncate(self.path, len(whole[0] + whole[1]))
        *_, (last, _) = self.facts()
        if isinstance(last, Closed):
            return False
        self.close("KILLED", last.t)
        return True


class Journals:
    """The journals of one project."""

    def __init__(self, folder: Path, project: str) -> None:
        self.folder = folder
        self.project = project
        self._known: dict[Path, Journal] = {}

    def round(self, number: int) -> Journal:
        """The journal of a round, whether or not it was begun."""
        return self.at(self._folder(number) / "round.jsonl")

    def begin_round(self, number: int) -> Journal:
        """The journal of a round, begun or gone on with."""
        journal = self.round(number)
        if journal.path.exists():
            journal.reopen()
            return journal
        tags = {"rlhf.kind": "round", "rlhf.round": str(number), "rlhf.project": self.project}
        return Journal.begin(journal.path, f"round-{number:04d}", tags)

    def attempt(self, number: int, stage: str, tags: Mapping[str, str]) -> Journal:
        """A new journal for a stage that is about to be executed."""
        folder = self._folder(number)
        attempts = [int(path.stem.rpartition(".")[2]) for path in folder.glob(f"{stage}.*.jsonl")]
        own = {
            "rlhf.kind": "stage",
            "rlhf.round": str(number),
            "rlhf.project": self.project,
            "rlhf.stage": stage,
        }
        return Journal.begin(folder / f"{stage}.{max(attempts, default=0) + 1}.jsonl", stage, {**tags, **own})

    def parent(self, journal: Journal) -> Journal | None:
        """The journal of the round a stage belongs to; none for a round."""
        path = journal.path.with_name("round.jsonl")
        return None if path == journal.path or not path.exists() else self.at(path)

    def all(self) -> list[Journal]:
        """Every journal, a round before its stages."""
        paths = self.folder.glob("[0-9][0-9][0-9][0-9]/*.jsonl")
        order = sorted(paths, key=lambda path: (path.parent.name, path.name != "round.jsonl", path.name))
        return [self.at(path) for path in order]

    def at(self, path: Path) -> Journal:
        """The journal in this file."""
        return self._known.setdefault(path, Journal(path))

    def _folder(self, number: int) -> Path:
        return self.folder / f"{number:04d}"
