"""The runs of a project in MLflow: a parent per round, a child per executed stage, by explicit run id.

Knows no stage and no flow. The fluent interface with its thread-local active run is left out: a round
outlives its process.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.journal import Closed, Fact, Measured, Opened, Parameters, Read, Reopened, Stored, Tagged, Wrote
from tasks.mlflow_store import MlflowStore, reaching_mlflow

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

JOURNAL = "rlhf.journal"  # the tag by which the run of a journal is found
TOLD = "rlhf.told"  # how many bytes of the journal the run tells
NOTE = "mlflow.note.content"  # the tag that MLflow's pages show as a description, in Markdown
EXPERIMENT_NOTE = (
    "Iterative RLHF, a run a round: its description says how the round ended, its child runs are its stages, "
    "its artifacts hold the report. Policies and reward models are in the model registry."
)
METRICS_PER_BATCH = 1000
ITEMS_PER_BATCH = 100
PARAMETER_LENGTH = 6000


class Tracker:
    """One project's experiment; anything but making the object may raise `TrackingUnavailable`."""

    def __init__(self, home: Path, project: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", project):
            raise ValueError(
                f"project name {project!r} cannot name a model in MLflow: begin with a letter or a digit and "
                "go on with letters, digits, `_`, `.` and `-`."
            )
        self.project = project
        self.store = MlflowStore(home)

    def open(self) -> None:
        """Makes the database and the experiment where there are none; seconds for a new home."""
        _ = self.experiment_id

    @property
    def client(self) -> "MlflowClient":
        """MLflow's client of the home's database."""
        return self.store.client

    @functools.cached_property
    def experiment_id(self) -> str:
        """The experiment that bears the project's name."""
        client = self.client
        artifacts = (self.store.folder / "artifacts" / self.project).as_uri()
        with reaching_mlflow("opening its experiment"), self.store.lock():
            experiment = client.get_experiment_by_name(self.project)
            if experiment is None:
                note = {NOTE: EXPERIMENT_NOTE}
                return str(client.create_experiment(self.project, artifacts, note))
            if experiment.lifecycle_stage == "deleted":
                client.restore_experiment(experiment.experiment_id)
        if experiment.artifact_location != artifacts:
            raise ValueError(
                f"the home was moved: MLflow keeps the files of {self.project!r} at "
                f"{experiment.artifact_location}, not at {artifacts}, and would write new ones to the old "
                "place. Move the home back."
            )
        return str(experiment.experiment_id)

    def runs(self) -> dict[str, tuple[str, int]]:
        """Of every run that tells a journal: the run's id, and how many bytes of the journal it tells."""
        with reaching_mlflow("looking up runs"):
            found: list[Run] = []
            token: str | None = ""
            while token is not None:
                page = self.client.search_runs(
                    [self.experiment_id], f"tags.`{JOURNAL}` != ''", max_results=1000, page_token=token
                )
                found += page
                token = page.token
        return {
            run.data.tags[JOURNAL]: (str(run.info.run_id), int(run.data.tags.get(TOLD, 0))) for run in found
        }

    def make_run(self, opened: Opened, parent_run_id: str | None) -> str:
        """The id of a new run that began when its journal says."""
        tags = {**opened.tags, JOURNAL: opened.id}
        if parent_run_id is not None:
            tags["mlflow.parentRunId"] = parent_run_id
        with reaching_mlflow(f"opening {opened.name}"):
            run = self.client.create_run(self.experiment_id, opened.t, tags, run_name=opened.name)
        return str(run.info.run_id)

    def send(self, run_id: str, facts: Iterable[tuple[Fact, int]], told: int) -> tuple[int, int]:
        """Tells a run the facts of its journal; gives their number and how far it is told now, kept in a tag.

        A fact brings its own time, so that telling it again stores nothing new: after an error the caller
        begins again where the tag says.
        """
        points: list[Metric] = []
        count = 0
        with reaching_mlflow("telling a run"):
            for fact, told in facts:
                count += 1
                if isinstance(fact, Measured):
                    points += metric_points(fact.metrics, fact.step, fact.t)
                else:
                    self._tell(run_id, fact)
                if len(points) >= METRICS_PER_BATCH:
                    self._log_points(run_id, points)
                    self.tag(run_id, {TOLD: str(told)})
                    points = []
            self._log_points(run_id, points)
            if count:
                self.tag(run_id, {TOLD: str(told)})
        return count, told

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags on a run."""
        with reaching_mlflow("setting tags"):
            from mlflow.entities import RunTag

            items = [RunTag(key, value) for key, value in tags.items()]
            for start in range(0, len(items), ITEMS_PER_BATCH):
                self.client.log_batch(run_id, tags=items[start : start + ITEMS_PER_BATCH])

    def _tell(self, run_id: str, fact: Fact) -> None:
        match fact:
            case Reopened():
                self.client.update_run(run_id, status="RUNNING")
            case Tagged():
                self.tag(run_id, fact.tags)
            case Parameters():
                self._log_parameters(run_id, fact.parameters)
            case Wrote():
                self.client.log_text(run_id, fact.text, fact.name)
            case Stored():
                path = self.store.folder.parent / fact.path
                if path.is_dir():  # a report that was cleared away is no reason to tell nothing
                    self.client.log_artifacts(run_id, str(path), fact.folder)
            case Read():
                self._log_dataset(run_id, fact)
            case Closed():
                self.client.set_terminated(run_id, fact.status, fact.t)

    def _log_points(self, run_id: str, points: Sequence["Metric"]) -> None:
        for start in range(0, len(points), METRICS_PER_BATCH):
            self.client.log_batch(run_id, metrics=points[start : start + METRICS_PER_BATCH])

    def _log_dataset(self, run_id: str, read: Read) -> None:
        """Names a row set as an input; MLflow has room for half the sha256, a tag for all."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=read.role,
            digest=read.digest[:32],
            source_type="local",
            source=json.dumps({"uri": f"{read.kind}:{read.digest}"}),
            profile=json.dumps({"num_rows": read.rows}),
        )
        tags = [InputTag("mlflow.data.context", read.role), InputTag("rlhf.dataset.sha256", read.digest)]
        self.client.log_inputs(run_id, [DatasetInput(dataset, tags)])

    def _log_parameters(self, run_id: str, parameters: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        items = [Param(key, _fitting(value)) for key, value in parameters.items()]
        for start in range(0, len(items), ITEMS_PER_BATCH):
            self.client.log_batch(run_id, params=items[start : start + ITEMS_PER_BATCH])


def metric_points(metrics: Mapping[str, float], step: int, milliseconds: int) -> list["Metric"]:
    """The points to send; a number that is not finite is told as a 1 under `<name>_nonfinite` at its step.

    MLflow reads a NaN back as 0 in places, and stores an infinity as 1.8e308.
    """
    from mlflow.entities import Metric

    return [
        Metric(name, value, milliseconds, step)
        if math.isfinite(value)
        else Metric(f"{name}_nonfinite", 1.0, milliseconds, step)
        for name, value in metrics.items()
    ]


def _fitting(value: str) -> str:
    if len(value) <= PARAMETER_LENGTH:
        return value
    note = f"... ({len(value)} characters, all of them in settings.yaml)"
    return value[: PARAMETER_LENGTH - len(note)] + note
