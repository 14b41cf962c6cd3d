"""The runs of a project in MLflow: a parent per round, a child per executed stage, by explicit run id.

Knows no stage and no flow. The fluent interface with its thread-local active run is left out: a round
outlives its process.
"""

import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tasks.mlflow_store import MlflowStore, reaching_mlflow

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

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
                return str(client.create_experiment(self.project, artifact_location=artifacts))
            if experiment.lifecycle_stage == "deleted":
                client.restore_experiment(experiment.experiment_id)
        if experiment.artifact_location != artifacts:
            raise ValueError(
                f"the home was moved: MLflow keeps the files of {self.project!r} at "
                f"{experiment.artifact_location}, not at {artifacts}, and would write new ones to the old "
                "place. Move the home back."
            )
        return str(experiment.experiment_id)

    def open_round(
        self, round: int, *, settings_yaml: str, parameters: Mapping[str, str], tags: Mapping[str, str]
    ) -> str:
        """The id of a round's parent run, made or, after an interruption, found again and reopened.

        A parameter keeps the value it had first. The settings that hold now are the artifact `settings.yaml`,
        and their sha256 is a tag.
        """
        own = {"rlhf.kind": "round", "rlhf.round": str(round)}
        with reaching_mlflow(f"opening round {round}"):
            condition = f"tags.`rlhf.kind` = 'round' and tags.`rlhf.round` = '{round}'"
            found = self.client.search_runs([self.experiment_id], condition, max_results=1)
            if found:
                run_id, known = str(found[0].info.run_id), found[0].data.params
                self.client.update_run(run_id, status="RUNNING")
            else:
                run_id, known = self._create_run(f"round-{round:04d}", own), {}
            sha256 = hashlib.sha256(settings_yaml.encode()).hexdigest()
            self.tag(run_id, {**tags, **own, "rlhf.owner": self.store.owner, "rlhf.settings_sha256": sha256})
            self._log_parameters(run_id, {key: parameters[key] for key in parameters.keys() - known.keys()})
            self.text(run_id, "settings.yaml", settings_yaml)
        return run_id

    def open_stage(self, parent_run_id: str, stage: str, *, key: str, tags: Mapping[str, str]) -> str:
        """The id of a new child run, for a stage that is about to be executed."""
        with reaching_mlflow(f"opening stage {stage}"):
            parent = self.client.get_run(parent_run_id)
            own = {
                "mlflow.parentRunId": parent_run_id,
                "rlhf.kind": "stage",
                "rlhf.round": parent.data.tags["rlhf.round"],
                "rlhf.stage": stage,
                "rlhf.stage_key": key,
            }
            return self._create_run(stage, {**tags, **own})

    def forward(self, run_id: str, spool: Path, offset: int = 0) -> int:
        """Sends the spool's lines from byte `offset` on and gives the offset to go on from.

        A last line without its newline waits. A line brings its own time, so that sending it again stores
        nothing new: after an error the caller keeps its offset and calls again.
        """
        with reaching_mlflow("forwarding metrics"):
            for points, end in _read_spool(spool, offset):
                for start in range(0, len(points), METRICS_PER_BATCH):
                    self.client.log_batch(run_id, metrics=points[start : start + METRICS_PER_BATCH])
                offset = end
        return offset

    def log_summary(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """Logs numbers at one step; a number that is there already is not stored again."""
        with reaching_mlflow("logging a summary"):
            for point in metric_points(metrics, step, int(time.time() * 1000)):
                history = self.client.get_metric_history(run_id, point.key)
                if (step, point.value) not in [(old.step, old.value) for old in history]:
                    self.client.log_batch(run_id, metrics=[point])

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Sets tags on a run."""
        with reaching_mlflow("setting tags"):
            from mlflow.entities import RunTag

            items = [RunTag(key, value) for key, value in tags.items()]
            for start in range(0, len(items), ITEMS_PER_BATCH):
                self.client.log_batch(run_id, tags=items[start : start + ITEMS_PER_BATCH])

    def artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Copies a file, or what is in a folder, into the run's artifacts."""
        with reaching_mlflow(f"storing {path.name}"):
            log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
            log(run_id, str(path), folder)

    def text(self, run_id: str, name: str, text: str) -> None:
        """Stores a text as the artifact `name` of a run."""
        with reaching_mlflow(f"storing {name}"):
            self.client.log_text(run_id, text, name)

    def dataset(self, run_id: str, *, name: str, digest64: str, role: str, source: str, rows: int) -> None:
        """Names a row set as an input of a run; MLflow has room for half the sha256, a tag for all."""
        with reaching_mlflow(f"naming input {name}"):
            from mlflow.entities import Dataset, DatasetInput, InputTag

            dataset = Dataset(
                name=name,
                digest=digest64[:32],
                source_type="local",
                source=json.dumps({"uri": source}),
                profile=json.dumps({"num_rows": rows}),
            )
            tags = [InputTag("mlflow.data.context", role), InputTag("rlhf.dataset.sha256", digest64)]
            self.client.log_inputs(run_id, [DatasetInput(dataset, tags)])

    def close(self, run_id: str, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Ends a run."""
        with reaching_mlflow("closing a run"):
            self.client.set_terminated(run_id, status)

    def repair(self) -> list[str]:
        """Ends as KILLED the runs whose process is gone without having closed them; gives their ids."""
        client, experiment_id = self.client, self.experiment_id
        with reaching_mlflow("repairing"), self.store.lock():
            condition = f"attributes.status = 'RUNNING' and tags.`rlhf.project` = '{self.project}'"
            running = client.search_runs([experiment_id], condition, max_results=10000)
            left = [run.info.run_id for run in running if not self.store.lives(run.data.tags["rlhf.owner"])]
            for run_id in left:
                client.set_terminated(run_id, "KILLED")
            self.store.forget_dead_owners()
        return left

    def _create_run(self, name: str, tags: Mapping[str, str]) -> str:
        owned = {**tags, "rlhf.project": self.project, "rlhf.owner": self.store.owner}
        return str(self.client.create_run(self.experiment_id, run_name=name, tags=owned).info.run_id)

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


def _read_spool(spool: Path, offset: int) -> Iterator[tuple[list["Metric"], int]]:
    """Groups of points, each with the offset behind its last line."""
    if not spool.exists():
        return
    with spool.open("rb") as lines:
        lines.seek(offset)
        points: list[Metric] = []
        for line in lines:
            if not line.endswith(b"\n"):
                break
            record = json.loads(line)
            points += metric_points(record["metrics"], record["step"], record["t"])
            offset += len(line)
            if len(points) >= METRICS_PER_BATCH:
                yield points, offset
                points = []
        if points:
            yield points, offset


def _fitting(value: str) -> str:
    if len(value) <= PARAMETER_LENGTH:
        return value
    note = f"... ({len(value)} characters, all of them in settings.yaml)"
    return value[: PARAMETER_LENGTH - len(note)] + note
