"""One stage, once: found in the ledger, found done in the store, or run; then pinned, and told to MLflow."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from prefect.states import Completed

from rlhf_core.artifacts import ArtifactRef, Recipe, derive_seed
from rlhf_core.ledger import RoundRecord, StageRecord
from rlhf_core.settings import Settings
from rlhf_core.sources import count_rows
from rlhf_core.stages import stage
from rlhf_core.stages.context import Job
from tasks.following import Follower, close_run
from tasks.launch import launch
from tasks.project import Project

ROW_SETS = frozenset(("prompts", "completions", "comparisons", "preferences"))
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


class RoundEnded(Exception):
    """A round ends here, in a named way that is no failure."""

    def __init__(self, outcome: str, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome
        self.sentence = sentence


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
        self,
        name: str,
        settings: Settings,
        inputs: Mapping[str, ArtifactRef],
        *,
        subject: str = "",
        seed: int | None = None,
    ) -> dict[str, ArtifactRef]:
        """The artifacts of a stage; `subject` tells apart what one round runs several times.

        The Prefect task shows as `Cached` where nothing had to be computed.
        """
        shown = f"{name}.{subject}" if subject else name
        doing = task(
            name=name,
            task_run_name=shown,
            cache_policy=NO_CACHE,
            persist_result=False,
            tags=["gpu"] if name in COMPUTING else [],
        )(_do)
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
    follower = Follower(project, run_id, shown, work)
    started = time.perf_counter()
    try:
        done = launch(job, follower.look)
    except BaseException as error:
        close_run(project, run_id, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    seconds = time.perf_counter() - started
    project.executed.add((round.number, shown))
    (work / "mlflow_run_id").write_text(run_id)
    follower.drain()
    inputs = {f"rlhf.input.{role}": ref.digest for role, ref in job.inputs.items()}
    outputs = {f"rlhf.output.{role}": ref.digest for role, ref in done.outputs.items()}
    project.tracker.tag(run_id, {**inputs, **outputs})
    project.tracker.text(run_id, "recipe.json", done.model_dump_json(indent=1))
    for role, ref in job.inputs.items():
        if ref.kind in ROW_SETS:
            rows = count_rows(project.store.open(ref) / f"{ref.kind}.parquet")
            source = f"{ref.kind}:{ref.digest}"
            project.tracker.dataset(
                run_id, name=role, digest64=ref.digest, role=role, source=source, rows=rows
            )
    close_run(project, run_id, "FINISHED")
    project.display.finished(shown, seconds, False)
    return _record(done, shown, seconds=seconds, cached=False, mlflow_run_id=run_id)


def _known_run(job: Job) -> str:
    path = Path(job.work) / "mlflow_run_id"
    return path.read_text() if path.exists() else ""


def _record(done: Recipe, shown: str, *, seconds: float, cached: bool, mlflow_run_id: str) -> StageRecord:
    metrics = cast(dict[str, float], done.told.get("metrics", {}))
    alarms = cast(list[str], done.told.get("alarms", []))
    return StageRecord(
        stage=shown,
        key=done.key,
        outputs=done.outputs,
        cached=cached,
        seconds=seconds,
        mlflow_run_id=mlflow_run_id,
        metrics=metrics,
        alarms=alarms,
    )
