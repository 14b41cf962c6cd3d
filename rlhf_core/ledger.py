"""A project's create-only history; its champion, and the trunk of each round, are folds over it.

    ledger/project.json             what the project is: trunk, first policy, prompts, settings, execution
    ledger/0007/opened.json         the round's resolved settings, its champion, its seed
    ledger/0007/<stage>.json        what the stage gave: never computed again in this round
    ledger/0007/decision.json       how the round ended; from here on it is history
    ledger/rebase-0007.json         after round 7 the champion became the trunk of all rounds to come

A record is there whole or not at all, and never changes.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from rlhf_core.artifacts import ArtifactRef, create_once
from rlhf_core.settings import Json, Settings

PROJECT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class ProjectRecord(Settings):
    """What a project is, written when it is opened."""

    name: str
    settings: dict[str, Json]
    """The recipe and execution it was opened with, `auto` resolved."""
    base: str
    """Fingerprint of the base model."""
    demonstrations: str = ""
    """Fingerprint of what the base was fine-tuned on; empty where it was not."""
    inputs: dict[str, ArtifactRef]
    """The trunk, the first policy, and the demonstrations if there are any."""


class RoundRecord(Settings):
    """What a round started from."""

    round: int = Field(ge=1)
    settings: dict[str, Json]
    """All of the round's settings, resolved."""
    seed: int
    champion: ArtifactRef
    """The policy in service when the round was opened."""
    source: ArtifactRef
    """The prompts it draws from."""
    texts: ArtifactRef | None = None
    """What its pretraining mix learns from, if it has one."""
    mlflow_run_id: str
    prefect_flow_run_id: str


class StageRecord(Settings):
    """What a stage of a round gave."""

    stage: str
    """The stage, with its subject where a round runs it more than once: `measurement.candidate`."""
    key: str
    outputs: dict[str, ArtifactRef]
    cached: bool
    """It was found done and not computed for this round."""
    seconds: float
    mlflow_run_id: str
    """The run that holds its metrics: of this round, or of the round that computed it."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Its closing numbers."""
    alarms: list[str] = Field(default_factory=list)


class GateResult(Settings):
    """One gate's judgement."""

    name: str
    value: float | None
    """The measurement's bad end; none where it is missing or not finite, which fails."""
    bound: float
    passed: bool
    sentence: str


class DecisionRecord(Settings):
    """How a round ended."""

    round: int
    outcome: str
    """promoted, rejected, reward_model_rejected."""
    candidate: ArtifactRef | None
    parent: ArtifactRef
    """The champion the candidate was compared with."""
    gates: list[GateResult]
    metrics: dict[str, float]
    alarms: list[str]
    decided_at: str


class RebaseRecord(Settings):
    """A champion that was merged into a new trunk; rounds before it keep the trunk that they had."""

    round: int = Field(ge=1)
    """The last round before it."""
    key: str
    """Of the recipe that merged it."""
    trunk: ArtifactRef
    """What the rounds to come compute on."""
    policy: ArtifactRef
    """The first policy on it, which changes nothing yet: champion, and initial policy, from here on."""
    champion: ArtifactRef
    """The policy that was merged."""
    old_trunk: ArtifactRef
    """What it was merged into."""
    metrics: dict[str, float]
    """How well the new trunk says what the champion said."""
    mlflow_run_id: str
    rebased_at: str


RecordType = TypeVar("RecordType", bound=Settings)


class LedgerConflict(RuntimeError):
    """Two different things claim one place in a project's history."""


class Ledger:
    """The records of one project."""

    def __init__(self, projects: Path, name: str) -> None:
        if not PROJECT_NAME.fullmatch(name):
            raise ValueError(
                f"project name {name!r}: it names folders and registered models, so it takes 1 to 63 of "
                "a-z, 0-9, '-' and '_', the first a letter or digit."
            )
        self.name = name
        self.root = projects / name / "ledger"

    @property
    def exists(self) -> bool:
        """Whether the project was ever opened."""
        return (self.root / "project.json").exists()

    def open_project(self, record: ProjectRecord) -> ProjectRecord:
        """Create the project."""
        return self._create("project", record)

    def project(self) -> ProjectRecord:
        """What the project is."""
        record = self._read("project", ProjectRecord)
        if record is None:
            raise ValueError(f"there is no project {self.name!r} here: `rlhf run` with its run file opens it")
        return record

    def open_round(self, record: RoundRecord) -> RoundRecord:
        """Open a round, or give the one that is open."""
        return self._create(f"{record.round:04d}/opened", record)

    def round(self, number: int) -> RoundRecord | None:
        """What a round started from."""
        return self._read(f"{number:04d}/opened", RoundRecord)

    def rounds(self) -> list[int]:
        """The numbers of all rounds ever opened, in order."""
        return sorted(int(path.parent.name) for path in self.root.glob("[0-9][0-9][0-9][0-9]/opened.json"))

    def pin(self, number: int, record: StageRecord) -> StageRecord:
        """Record what a stage gave; in this round it is never computed again."""
        first = self._create(f"{number:04d}/{record.stage}", record)
        if _digests(first) != _digests(record):
            raise LedgerConflict(
                f"round {number} already has another {record.stage}: {_digests(first)}, "
                f"now {_digests(record)}. Two runs of one round disagree; what is recorded stands."
            )
        return first

    def stage(self, number: int, stage: str) -> StageRecord | None:
        """What a stage gave in a round, if it is finished."""
        return self._read(f"{number:04d}/{stage}", StageRecord)

    def stages(self, number: int) -> list[StageRecord]:
        """All finished stages of a round, in the order they finished."""
        paths = sorted((self.root / f"{number:04d}").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [
            StageRecord.model_validate_json(path.read_bytes())
            for path in paths
            if path.stem not in ("opened", "decision")
        ]

    def decide(self, record: DecisionRecord) -> DecisionRecord:
        """End a round."""
        return self._create(f"{record.round:04d}/decision", record)

    def decision(self, number: int) -> DecisionRecord | None:
        """How a round ended, if it has."""
        return self._read(f"{number:04d}/decision", DecisionRecord)

    def rebase(self, record: RebaseRecord) -> RebaseRecord:
        """Go on from a new trunk, after the last round."""
        if self.open_round_number() is not None or record.round != max(self.rounds(), default=0):
            raise LedgerConflict(
                f"a rebase after round {record.round}, and rounds {self.rounds()} were opened: "
                "a round that has begun would change its trunk. What is recorded stands."
            )
        first = self._create(f"rebase-{record.round:04d}", record)
        if (first.trunk.digest, first.policy.digest) != (record.trunk.digest, record.policy.digest):
            raise LedgerConflict(
                f"the project was rebased after round {record.round} already, onto trunk "
                f"{first.trunk.digest[:12]} and not {record.trunk.digest[:12]}. What is recorded stands."
            )
        return first

    def rebases(self) -> list[RebaseRecord]:
        """Every rebase, in order."""
        paths = sorted(self.root.glob("rebase-[0-9][0-9][0-9][0-9].json"))
        return [RebaseRecord.model_validate_json(path.read_bytes()) for path in paths]

    def rebase_before(self, number: int) -> RebaseRecord | None:
        """The last rebase before a round; none where it is played on the project's first trunk."""
        before = [record for record in self.rebases() if record.round < number]
        return before[-1] if before else None

    def anchor(self, number: int | None = None) -> dict[str, ArtifactRef]:
        """`trunk` and initial `policy` of a round; of the next one, where none is named."""
        wanted = len(self.rounds()) + 1 if number is None else number
        rebased = self.rebase_before(wanted)
        return {"trunk": rebased.trunk, "policy": rebased.policy} if rebased else self.project().inputs

    def trunk_of(self, policy: ArtifactRef) -> ArtifactRef:
        """The trunk that a policy of the project is at home on."""
        for record in self.rebases():
            if record.policy.digest == policy.digest:
                return record.trunk
        for number in self.rounds():
            decision = self.decision(number)
            if decision and decision.candidate and decision.candidate.digest == policy.digest:
                return self.anchor(number)["trunk"]
        return self.project().inputs["trunk"]

    def open_round_number(self) -> int | None:
        """The round that was opened and not decided."""
        undecided = [number for number in self.rounds() if self.decision(number) is None]
        return undecided[0] if undecided else None

    def champion(self) -> ArtifactRef:
        """The policy in service: the initial one, or what the last promoting round put there."""
        decision = self.won()
        return decision.candidate if decision and decision.candidate else self.anchor()["policy"]

    def won(self) -> DecisionRecord | None:
        """The decision that put the champion in service; none while that is the initial policy."""
        rebased = self.rebases()
        since = rebased[-1].round if rebased else 0
        decisions = [self.decision(number) for number in self.rounds() if number > since]
        promoted = [found for found in decisions if found and found.outcome == "promoted" and found.candidate]
        return promoted[-1] if promoted else None

    def champion_round(self) -> int:
        """The round that put the champion in service, or after which the project was rebased; else 0."""
        decision, rebased = self.won(), self.rebases()
        return decision.round if decision else rebased[-1].round if rebased else 0

    def _create(self, name: str, record: RecordType) -> RecordType:
        path = self.root / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        create_once(path, json.dumps(record.to_json(), indent=1).encode())
        return type(record).model_validate_json(path.read_bytes())

    def _read(self, name: str, model: type[RecordType]) -> RecordType | None:
        path = self.root / f"{name}.json"
        return model.model_validate_json(path.read_bytes()) if path.exists() else None


def _digests(record: StageRecord) -> Mapping[str, str]:
    return {role: ref.digest for role, ref in record.outputs.items()}
