"""One stage, once: found in the ledger, found done in the store, or run; then pinned, and told to MLflow."""

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from prefect.states import Completed

from rlhf_core.artifacts import ArtifactRef, Recipe, Store, derive_seed
from rlhf_core.ledger import Ledger, RoundRecord, StageRecord
from rlhf_core.settings import Execution, Json, Settings
from rlhf_core.stages import job_key, stage
from rlhf_core.stages.context import Job
from tasks.launch import launch
from tasks.mlflow_store import TrackingUnavailable
from tasks.registry import Registry
from tasks.tracking import Tracker

FORWARD_SECONDS = 5.0
COMPUTING = frozenset(
    (
        "bootstrap",
        "rollouts",
        "reward_modeling",
        "reward_validation",
        "policy_update",
        "measurement",
        "comparison",
    )
)
log = logging.getLogger(__name__)


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


class RoundEnded(Exception):
    """A round ends here, in a named way that is no failure."""

    def __init__(self, outcome: str, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome
        self.sentence = sentence


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
                stage=name, settings=dict(settings), inputs=dict(inputs), seed=seed, execution=self.execution,
                store=str(self.store.root), work=str(work),
            ),
            key,
        )  # fmt: skip


@dataclass
class Round:
    """A round being played."""

    project: Project
    record: RoundRecord

    @property
    def number(self) -> int:
        """Its number."""
        return self.record.round

    def seed(self, name: str) -> int:
        """The seed of a stage in this round."""
        return derive_seed(self.record.seed, name, self.number)

    def artifact(self, role: str) -> ArtifactRef:
        """What the project started from: its trunk, its first policy."""
        return self.project.ledger.project().inputs[role]

    def run(
        self, name: str, settings: Settings, inputs: Mapping[str, ArtifactRef], *, subject: str = "", seed: int | None = None
    ) -> dict[str, ArtifactRef]:  # fmt: skip
        """The artifacts of a stage; `subject` tells apart what one round runs several times.

        The Prefect task shows as `Cached` where nothing had to be computed.
        """
        shown = f"{name}.{subject}" if subject else name
        doing = task(
            _do, name=f"{name}", task_run_name=shown, cache_policy=NO_CACHE, persist_result=False,
            tags=["gpu"] if name in COMPUTING else [],
        )  # fmt: skip
        state = doing(
            self,
            name,
            shown,
            settings,
            dict(inputs),
            self.seed(name) if seed is None else seed,
            return_state=True,
        )
        return cast(dict[str, ArtifactRef], state.result())


def _do(
    round: Round, name: str, shown: str, settings: Settings, inputs: dict[str, ArtifactRef], seed: int
) -> object:
    """The body of every stage's Prefect task."""
    project = round.project
    pinned = project.ledger.stage(round.number, shown)
    if pinned is not None:
        project.display.finished(shown, 0.0, True)
        return Completed(
            name="Cached", message=f"finished before in round {round.number}", data=pinned.outputs
        )
    job, key = project.job(name, settings.to_json(), inputs, seed)
    done = project.store.recipe(key)
    if done is not None:
        record = _record(done, shown, seconds=0.0, cached=True, mlflow_run_id=_known_run(job))
        project.display.finished(shown, 0.0, True)
    else:
        record = execute(round, job, key, shown)
    project.ledger.pin(round.number, record)
    if record.cached:
        return Completed(name="Cached", message="the store has what this recipe gives", data=record.outputs)
    return record.outputs


def execute(round: Round, job: Job, key: str, shown: str) -> StageRecord:
    """Run a job and tell MLflow of it; what it gave is kept whatever MLflow does."""
    project = round.project
    work = Path(job.work)
    work.mkdir(parents=True, exist_ok=True)
    project.display.started(shown)
    tags = {
        "rlhf.subject": shown,
        "rlhf.version": str(stage(job.stage).VERSION),
        "prefect.task_run_id": str(task_run.id or ""),
    }
    run_id = project.tracker.open_stage(round.record.mlflow_run_id, shown, key=key, tags=tags)
    spool = Looking(project, run_id, shown, work)
    started = time.perf_counter()
    try:
        done = launch(job, spool.look)
    except BaseException as error:
        _close(project, run_id, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    seconds = time.perf_counter() - started
    project.executed.add((round.number, shown))
    (work / "mlflow_run_id").write_text(run_id)
    spool.drain()
    inputs = {f"rlhf.input.{role}": ref.digest for role, ref in job.inputs.items()}
    outputs = {f"rlhf.output.{role}": ref.digest for role, ref in done.outputs.items()}
    project.tracker.tag(run_id, {**inputs, **outputs})
    project.tracker.text(run_id, "recipe.json", done.model_dump_json(indent=1))
    for role, ref in job.inputs.items():
        if ref.kind in ("prompts", "completions", "comparisons", "preferences"):
            rows = sum(1 for _ in project.store.open(ref).glob("*.parquet"))
            project.tracker.dataset(
                run_id,
                name=role,
                digest64=ref.digest,
                role=role,
                source=f"{ref.kind}:{ref.digest}",
                rows=rows,
            )
    _close(project, run_id, "FINISHED")
    project.display.finished(shown, seconds, False)
    return _record(done, shown, seconds=seconds, cached=False, mlflow_run_id=run_id)


class Looking:
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


def _close(project: Project, run_id: str, status: str) -> None:
    try:
        project.tracker.close(run_id, status)  # type: ignore[arg-type]
    except TrackingUnavailable as error:
        log.warning("%s", error)


def _known_run(job: Job) -> str:
    path = Path(job.work) / "mlflow_run_id"
    return path.read_text() if path.exists() else ""


def _record(done: Recipe, shown: str, *, seconds: float, cached: bool, mlflow_run_id: str) -> StageRecord:
    metrics = cast(dict[str, float], done.told.get("metrics", {}))
    alarms = cast(list[str], done.told.get("alarms", []))
    return StageRecord(
        stage=shown, key=done.key, outputs=done.outputs, cached=cached, seconds=seconds,
        mlflow_run_id=mlflow_run_id, metrics=metrics, alarms=alarms,
    )  # fmt: skip
