"""One stage, once: found in the ledger, found done in the store, or run; then pinned, and told to MLflow."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from prefect.states import Completed

from rlhf_core.artifacts import ArtifactRef, Recipe, derive_seed
from rlhf_core.ledger import RoundRecord, StageRecord
from rlhf_core.metrics import read_lines
from rlhf_core.settings import Settings
from rlhf_core.sources import count_rows
from rlhf_core.stages import stage
from rlhf_core.stages.context import Job
from tasks.following import Follower
from tasks.journal import Journal, Read, now
from tasks.launch import launch
from tasks.project import JOURNAL, Project, journal_of

ROW_SETS = {
    "demonstrations": "demonstrations.parquet",
    "prompt_source": "prompts.parquet",
    "prompts": "prompts.parquet",
    "texts": "prompts.parquet",
    "completions": "completions.parquet",
    "comparisons": "comparisons.parquet",
    "preferences": "preferences.parquet",
    "measurements": "completions.parquet",
}
"""The kinds of artifact that hold rows, and the file that holds them."""
SAMPLES = "samples.json"
"""Completions of a policy update, among the artifacts of its run in MLflow."""
COMPUTING = frozenset(
    (
        "bootstrap",
        "rollouts",
        "reward_modeling",
        "reward_validation",
        "policy_update",
        "measurement",
        "comparison",
        "rebase",
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
        """What the round is anchored to: `trunk`, and the initial `policy` on it."""
        return self.project.ledger.anchor(self.number)[role]

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
    record = result_of(project, round.number, job, key, shown)
    project.ledger.pin(round.number, record)
    if record.cached:
        return Completed(name="Cached", message="the store has what this recipe gives", data=record.outputs)
    return record.outputs


def result_of(project: Project, number: int, job: Job, key: str, shown: str) -> StageRecord:
    """What a job gives, found in the store or computed now; round 0 is before the first."""
    done = project.store.recipe(key)
    if done is None:
        return execute(project, number, job, key, shown)
    told = _told_before(project, job, done)
    project.display.finished(shown, 0.0, True)
    return _record(done, shown, seconds=0.0, cached=True, mlflow_run_id=told)


def execute(project: Project, number: int, job: Job, key: str, shown: str) -> StageRecord:
    """Run a job; what it gave is kept and the round goes on, whatever MLflow does."""
    work = Path(job.work)
    work.mkdir(parents=True, exist_ok=True)
    project.display.started(shown)
    tags = {
        "rlhf.stage_key": key,
        "rlhf.subject": shown,
        "rlhf.version": str(stage(job.stage).VERSION),
        "prefect.task_run_id": str(task_run.id or ""),
    }
    journal = project.journals.attempt(number, shown, tags)
    (work / JOURNAL).write_text(str(journal.path.relative_to(project.home)))
    follower = Follower(project, journal, shown, work)
    started = time.perf_counter()
    try:
        done = launch(job, follower.look)
    except BaseException as error:
        journal.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        project.teller.settle()
        raise
    seconds = time.perf_counter() - started
    project.executed.add((number, shown))
    _tell_outcome(project, journal, job, done)
    project.display.finished(shown, seconds, False)
    return _record(done, shown, seconds=seconds, cached=False, mlflow_run_id=journal.run_id)


def _tell_outcome(
    project: Project, journal: Journal, job: Job, done: Recipe, ended: int | None = None
) -> None:
    """What went into a stage and what came out, and the end of its run."""
    inputs = {f"rlhf.input.{role}": ref.digest for role, ref in job.inputs.items()}
    outputs = {f"rlhf.output.{role}": ref.digest for role, ref in done.outputs.items()}
    journal.tag({**inputs, **outputs})
    journal.write("recipe.json", done.model_dump_json(indent=1))
    samples = read_lines(Path(job.work) / "samples.jsonl")
    if samples:
        journal.write(SAMPLES, as_table(samples))
        journal.tag({"mlflow.loggedArtifacts": json.dumps([{"path": SAMPLES, "type": "table"}])})
    for role, ref in job.inputs.items():
        if ref.kind in ROW_SETS:
            rows = count_rows(project.store.open(ref) / ROW_SETS[ref.kind])
            journal.add(Read(t=now(), role=role, kind=ref.kind, digest=ref.digest, rows=rows))
    journal.close("FINISHED", ended)
    project.teller.settle()


def as_table(samples: Sequence[Mapping[str, object]]) -> str:
    """Completions that people look at in the form that MLflow shows as a table."""
    columns = ("step", "prompt", "text", "score", "kl", "length", "stop")
    rows = [[sample[column] for column in columns] for sample in samples]
    return json.dumps({"columns": columns, "data": rows})


def _told_before(project: Project, job: Job, done: Recipe) -> str:
    """The MLflow run of what the store has; told to its end, where its process was killed."""
    journal = journal_of(project.home, done.key)
    if journal is None:
        return ""
    closed = journal.closed
    if journal.path.is_relative_to(project.journals.folder) and not (closed and closed.status == "FINISHED"):
        journal.copy_spool(Path(job.work) / "metrics.jsonl")
        ended = journal.opened.t + int(1000 * float(str(done.told.get("seconds", 0))))
        _tell_outcome(project, journal, job, done, ended)
    return journal.run_id


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
