"""What a stage is handed: its job, its inputs as folders, places to write to, and a sink for its numbers."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from rlhf_core.artifacts import ArtifactRef, Store
from rlhf_core.checkpoints import Checkpoints
from rlhf_core.metrics import Spool
from rlhf_core.settings import Execution, Json, Settings, Weights

if TYPE_CHECKING:
    from rlhf_core.models import Base
    from rlhf_core.trunk import Lora, Trunk

SettingsType = TypeVar("SettingsType", bound=Settings)


class TrunkFile(Settings):
    """What `trunk.json` says beside the model. A default is left out: settings to come change no digest."""

    dtype: Literal["float32", "bfloat16"]
    """What the trunk computes in."""
    length_bucket: int
    """Rows are padded to multiples of this."""
    weights: Weights = "lora"
    """How its roles are held."""


class Job(Settings):
    """One stage to run, complete: `python -m rlhf_core.stages JOB.json` needs nothing else."""

    stage: str
    """Its name."""
    settings: dict[str, Json]
    """Its recipe, every default written out."""
    inputs: dict[str, ArtifactRef]
    """What it reads, by role."""
    seed: int
    """What all its randomness is derived from."""
    execution: Execution
    """Where and how fast; not part of the key."""
    store: str
    """Folder of the store."""
    work: str
    """Folder for what is not an artifact: metrics, progress, the result."""


class StageContext:
    """A job being done."""

    def __init__(self, job: Job, store: Store, sink: Spool, checkpoints: Checkpoints, key: str) -> None:
        self.job = job
        self.store = store
        self.sink = sink
        self.checkpoints = checkpoints
        self.key = key
        self.outputs: dict[str, ArtifactRef] = {}
        self.metrics: dict[str, float] = {}
        self._stack = ExitStack()

    @property
    def seed(self) -> int:
        """What all randomness of the stage is derived from."""
        return self.job.seed

    def settings(self, model: type[SettingsType]) -> SettingsType:
        """The stage's recipe."""
        return model.model_validate(self.job.settings)

    def input(self, role: str) -> Path:
        """The verified folder of an input."""
        return self.store.open(self.job.inputs[role])

    def inputs(self, prefix: str) -> list[Path]:
        """The verified folders of all inputs `<prefix>.<number>`, in order."""
        roles = sorted(role for role in self.job.inputs if role.startswith(f"{prefix}."))
        return [self.input(role) for role in roles]

    @contextmanager
    def output(self, role: str, kind: str) -> Iterator[Path]:
        """An empty folder that becomes the artifact `role` when the block ends well."""
        with self.store.writing() as folder:
            yield folder
            self.outputs[role] = self.store.commit(folder, kind, self.key)

    def write_json(self, role: str, kind: str, value: Settings) -> None:
        """An artifact of one JSON file, `<kind>.json`."""
        with self.output(role, kind) as folder:
            (folder / f"{kind}.json").write_text(value.model_dump_json(indent=1))

    def summary(self, metrics: dict[str, float]) -> None:
        """Closing numbers of the stage: logged, and kept with its result where they are finite."""
        self.metrics.update({name: value for name, value in metrics.items() if math.isfinite(value)})
        self.sink.log(0, metrics)

    def trunk(self) -> "Trunk":
        """The project's trunk on the device of this job, with no role yet."""
        return open_trunk(self.input("trunk"), self.job.inputs["trunk"].digest, self.job.execution)

    def write_trunk(self, base: "Base", described: TrunkFile) -> "Trunk":
        """A base as the artifact `trunk`; opened again from there, with no role yet."""
        from rlhf_core.models import save_base

        with self.output("trunk", "trunk") as folder:
            (folder / "model").mkdir()
            save_base(base, folder / "model")
            said = json.dumps(described.model_dump(exclude_defaults=True), sort_keys=True)
            (folder / "trunk.json").write_text(said)
        made = self.outputs["trunk"]
        return open_trunk(self.store.open(made), made.digest, self.job.execution)

    def write_first_policy(self, trunk: "Trunk", lora: "Lora") -> None:
        """The artifact `policy` that changes nothing of a new trunk yet."""
        trunk.add_role("policy", lora, self.seed)
        with self.output("policy", "policy") as folder:
            trunk.save_role("policy", folder)


def described_in(folder: Path) -> TrunkFile:
    """What the folder of a trunk says of it."""
    return TrunkFile.model_validate_json((folder / "trunk.json").read_bytes())


def open_trunk(folder: Path, digest: str, execution: Execution) -> "Trunk":
    """The trunk in an artifact's folder, with no role yet, on the device that `execution` names."""
    from rlhf_core.hardware import torch_dtype
    from rlhf_core.models import load_trunk

    described = described_in(folder)
    base = load_trunk(folder / "model", torch_dtype(described.dtype))
    return trunk_on(base, digest, described.length_bucket, execution, described.weights)


def trunk_on(
    base: "Base", digest: str, bucket: int, execution: Execution, weights: Weights = "lora"
) -> "Trunk":
    """A base as a trunk with no role yet, as `execution` says where and how fast."""
    import torch

    from rlhf_core.hardware import best_device
    from rlhf_core.trunk import Trunk

    if execution.num_threads:
        torch.set_num_threads(execution.num_threads)
    return Trunk(
        base,
        digest,
        weights=weights,
        device=best_device() if execution.device == "auto" else execution.device,
        bucket=bucket,
        micro_batch_tokens=execution.tokens_per_micro_batch,
    )
