"""The project's policies and reward models in MLflow's registry: numbered versions with their files and tags.

The ledger decides who is champion; what is written here follows it, and may be written again after any
interruption.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_core.artifacts import ArtifactRef
from tasks.mlflow_store import TrackingUnavailable, reaching_mlflow
from tasks.tracking import Tracker, metric_points

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

RegisteredKind = Literal["policy", "reward-model"]
KINDS: dict[RegisteredKind, str] = {"policy": "policy", "reward-model": "reward_model"}

SOURCE = "models:/"


class Registry:
    """The registered models `<project>.policy` and `<project>.reward-model`."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def register(
        self,
        model: RegisteredKind,
        folder: Path,
        *,
        run_id: str,
        tags: Mapping[str, str],
        description: str,
        metrics: Mapping[str, float] | None = None,
    ) -> int:
        """The number of the version that holds the files of `folder`, made unless there is one.

        The tags `rlhf.digest` and `rlhf.round` say which version this is: a second call with the same two
        gives the same number.
        """
        missing = {"rlhf.digest", "rlhf.round"} - tags.keys()
        if missing:
            raise ValueError(
                f"a {model} version needs the tags {sorted(missing)}: without them it would be made twice."
            )
        with reaching_mlflow(f"registering a {model}"):
            versions = self._versions(model, tags["rlhf.digest"])
            version = next((v for v in versions if v.tags["rlhf.round"] == tags["rlhf.round"]), None)
            if version is None:
                logged = self._logged_model(model, folder, run_id, tags)
                self._log_metrics(run_id, logged.model_id, metrics or {}, int(tags["rlhf.round"]))
                version = self._create_version(model, logged.model_id, run_id, tags, description)
            number = int(version.version)
            # The model's page names its version by this tag.
            link = json.dumps([{"name": self._name(model), "version": number}])
            model_id = str(version.source).removeprefix(SOURCE)
            self._tracker.client.set_logged_model_tags(model_id, {"mlflow.modelVersions": link})
        return number

    def version_of(self, model: RegisteredKind, digest: str, round: int | None = None) -> int | None:
        """The newest version with these contents; of this round, where one is named."""
        with reaching_mlflow(f"looking up a {model}"):
            found = [
                int(version.version)
                for version in self._versions(model, digest)
                if round is None or version.tags["rlhf.round"] == str(round)
            ]
            return max(found, default=None)

    def ref_of(self, model: RegisteredKind, version: int) -> ArtifactRef | None:
        """The artifact that a version holds."""
        with reaching_mlflow(f"looking up a {model}"):
            named = f"name = '{self._name(model)}'"
            for found in self._tracker.client.search_model_versions(named, max_results=10000):
                if int(found.version) == version:
                    return ArtifactRef(
                        kind=KINDS[model], digest=found.tags["rlhf.digest"], key=found.tags["rlhf.key"]
                    )
        return None

    def tag_version(self, model: RegisteredKind, version: int, tags: Mapping[str, str]) -> None:
        """Sets tags on a version, such as what became of a candidate."""
        with reaching_mlflow(f"setting tags on a {model}"):
            for key, value in tags.items():
                self._tracker.client.set_model_version_tag(self._name(model), str(version), key, value)

    def set_alias(self, model: RegisteredKind, alias: str, version: int) -> None:
        """Lets an alias name this version and no other."""
        with reaching_mlflow(f"setting alias {alias}"):
            self._tracker.client.set_registered_model_alias(self._name(model), alias, str(version))

    def alias(self, model: RegisteredKind, alias: str) -> int | None:
        """The version an alias names."""
        with reaching_mlflow(f"looking up alias {alias}"):
            found = self._tracker.client.search_registered_models(f"name = '{self._name(model)}'")
            # A search gives no aliases, and getting a model that is not there raises.
            aliases = self._tracker.client.get_registered_model(self._name(model)).aliases if found else {}
        return int(aliases[alias]) if alias in aliases else None

    def _name(self, model: RegisteredKind) -> str:
        return f"{self._tracker.project}.{model}"

    def _versions(self, model: RegisteredKind, digest: str) -> list["ModelVersion"]:
        return list(
            self._tracker.client.search_model_versions(
                f"name = '{self._name(model)}' and tags.`rlhf.digest` = '{digest}'"
            )
        )

    def _create_version(
        self, model: RegisteredKind, model_id: str, run_id: str, tags: Mapping[str, str], description: str
    ) -> "ModelVersion":
        import mlflow

        client, name = self._tracker.client, self._name(model)
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        # A source of this form links the version's page to the model's, but MLflow looks it up in the
        # process's default database, whichever client is asked.
        mlflow.set_tracking_uri(self._tracker.store.uri)
        return client.create_model_version(
            name, SOURCE + model_id, run_id, tags=dict(tags), description=description, model_id=model_id
        )

    def _log_metrics(self, run_id: str, model_id: str, metrics: Mapping[str, float], step: int) -> None:
        """Logs numbers on the run and on the model at once."""
        for point in metric_points(metrics, step, int(time.time() * 1000)):
            self._tracker.client.log_metric(
                run_id, point.key, point.value, point.timestamp, step, model_id=model_id
            )

    def _logged_model(
        self, model: RegisteredKind, folder: Path, run_id: str, tags: Mapping[str, str]
    ) -> "LoggedModel":
        """The model with its files in place; one that an interrupted call left behind is gone on with."""
        from mlflow.entities import LoggedModelOutput

        client = self._tracker.client
        experiment_id = self._tracker.experiment_id
        wanted_tags = " and ".join(f"tags.`{tag}` = '{tags[tag]}'" for tag in ("rlhf.digest", "rlhf.round"))
        left_behind = client.search_logged_models([experiment_id], f"name = '{model}' and {wanted_tags}")
        logged = (
            left_behind[0]
            if left_behind
            else client.create_logged_model(
                experiment_id, model, source_run_id=run_id, tags=dict(tags), model_type="role"
            )
        )
        outputs = client.get_run(run_id).outputs
        if not outputs or logged.model_id not in [output.model_id for output in outputs.model_outputs]:
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, int(tags["rlhf.round"]))])
        client.log_model_artifacts(logged.model_id, str(folder))
        wanted = {
            str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
        stored = self._stored_files(logged.model_id)
        if not wanted or any(stored.get(name) != size for name, size in wanted.items()):
            raise TrackingUnavailable(
                f"MLflow holds {stored} of a {model} whose files are {wanted}: a version without its "
                "files would look ready. Look at the disk and run the same command again."
            )
        if logged.status != "READY":
            client.finalize_logged_model(logged.model_id, "READY")
        return logged

    def _stored_files(self, model_id: str, folder: str | None = None) -> dict[str, int]:
        files: dict[str, int] = {}
        for entry in self._tracker.client.list_logged_model_artifacts(model_id, folder):
            files |= (
                self._stored_files(model_id, entry.path)
                if entry.is_dir
                else {entry.path: entry.file_size or 0}
            )
        return files
