"""bootstrap: the base model becomes the project's trunk, with a first policy that changes nothing yet."""

import json
from typing import Literal

from pydantic import Field

from rlhf_core.models import BaseModel, PackagedGGUF
from rlhf_core.settings import Execution, Settings, Weights
from rlhf_core.stages.context import StageContext, TrunkFile
from rlhf_core.trunk import Lora

NAME, VERSION = "bootstrap", 2


class Bootstrap(Settings):
    """The base of a project, fixed for its life."""

    base: BaseModel = PackagedGGUF()
    """Where the base model comes from; an instruct model needs no supervised fine-tuning first."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the trunk and its roles compute in; `auto` is resolved when the project is opened."""
    length_bucket: int = Field(default=64, ge=8, le=1024)
    """Rows are padded to multiples of this, by their own length alone."""
    weights: Weights = "lora"
    """What each role trains: an adapter on the one trunk, or with `full` a set of all weights of its own.

    `full` uses no `lora` setting, here or elsewhere, and wants rates of 1e-6 to 1e-5.
    """
    lora: Lora = Lora()
    """The policy's adapter."""


class BootstrapJob(Bootstrap):
    """With what identifies the base's content."""

    fingerprint: str = ""
    """Of the base model's files."""


def resolve(settings: Bootstrap, execution: Execution) -> tuple[Bootstrap, Execution]:
    """Both with `auto` replaced by what this machine has and computes fast in, when a project is opened.

    Weights that are trained themselves get float32: bfloat16 has no room for most steps of such small rates.
    """
    from rlhf_core.hardware import best_device, best_dtype

    device = best_device() if execution.device == "auto" else execution.device
    fast = best_dtype(device) if settings.weights == "lora" else "float32"
    dtype = fast if settings.dtype == "auto" else settings.dtype
    return settings.model_copy(update={"dtype": dtype}), execution.model_copy(update={"device": device})


def run(context: StageContext) -> None:
    """Write the trunk and the first policy."""
    from rlhf_core.hardware import torch_dtype
    from rlhf_core.models import load_base, load_trunk, save_base
    from rlhf_core.trunk import Trunk

    settings = context.settings(BootstrapJob)
    if settings.dtype == "auto":
        raise ValueError(
            "dtype `auto` reached a stage: it is resolved when a project is opened, and recorded"
        )
    context.sink.progress(0, 2, "loading the base model")
    base = load_base(settings.base, torch_dtype(settings.dtype))
    with context.output("trunk", "trunk") as folder:
        (folder / "model").mkdir()
        save_base(base, folder / "model")
        said = TrunkFile(dtype=settings.dtype, length_bucket=settings.length_bucket, weights=settings.weights)
        (folder / "trunk.json").write_text(json.dumps(said.model_dump(exclude_defaults=True), sort_keys=True))
    context.sink.progress(1, 2, "writing the first policy")
    loaded = load_trunk(context.store.open(context.outputs["trunk"]) / "model", torch_dtype(settings.dtype))
    trunk = Trunk(loaded, context.outputs["trunk"].digest, weights=settings.weights)
    trunk.add_role("policy", settings.lora, context.seed)
    with context.output("policy", "policy") as folder:
        trunk.save_role("policy", folder)
    context.sink.progress(2, 2, "done")
