"""bootstrap: the base, fine-tuned if asked, becomes the trunk; with a first policy that changes nothing.

Fine-tuning trains an adapter on the base in the trunk's dtype; its update is added to the base's weights in
float32, and only then are they cast.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlhf_core.algorithms.demonstrations import Split, TokenRows, tokenised
from rlhf_core.algorithms.sft import ROLE, SFT, fine_tune, held_out_loss, laid_out
from rlhf_core.artifacts import canonical, derive_seed
from rlhf_core.models import Base, BaseModel, PackagedGGUF, TextCodec, load_base
from rlhf_core.records import Demonstration
from rlhf_core.roles import merge
from rlhf_core.settings import Execution, InvalidSettings, Settings, Weights
from rlhf_core.sources import demonstrations, read_rows
from rlhf_core.stages.context import StageContext, TrunkFile, trunk_on
from rlhf_core.trunk import Lora

if TYPE_CHECKING:
    import torch

NAME, VERSION = "bootstrap", 2


class Bootstrap(Settings):
    """The base of a project, fixed until it is rebased."""

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
    sft: SFT | None = None
    """Supervised fine-tuning of the base on demonstrations, merged into the trunk; none by default."""


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


def split_of(settings: SFT, codec: TextCodec, records: Iterable[Demonstration]) -> Split:
    """Demonstrations as token rows; raises for what cannot be learned from."""
    split = tokenised(
        codec,
        records,
        max_length=settings.max_length,
        responses_end=settings.responses_end,
        drop_too_long=settings.drop_too_long,
        held_out_share=settings.held_out_share,
    )
    if len(split.train) < settings.demonstrations_per_minibatch:
        raise ValueError(
            f"{len(split.train)} demonstrations to learn do not fill a minibatch of "
            f"{settings.demonstrations_per_minibatch}: no step would be taken. Lower "
            "demonstrations_per_minibatch, or give more."
        )
    return split


def check_demonstrations(settings: Bootstrap) -> None:
    """Read all demonstrations before a project is opened; raises for what the stage would refuse."""
    from rlhf_core.hardware import torch_dtype

    if settings.sft is None:
        return
    codec = TextCodec(load_base(settings.base, torch_dtype("float32"), weights=False))
    try:
        split_of(settings.sft, codec, demonstrations(settings.sft.demonstrations))
    except ValueError as error:
        raise InvalidSettings(f"bootstrap.sft: {error}") from error


class Fingerprint:
    """Of demonstrations, in their order: equal content has an equal one, wherever it comes from."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def passing(self, records: Iterable[Demonstration]) -> Iterator[Demonstration]:
        """The records, each taken in."""
        for record in records:
            self._digest.update(canonical(record.to_json()) + b"\n")
            yield record

    def __str__(self) -> str:
        return self._digest.hexdigest()


def fingerprint_of(records: Iterable[Demonstration]) -> str:
    """Of all these demonstrations."""
    fingerprint = Fingerprint()
    for _ in fingerprint.passing(records):
        pass
    return str(fingerprint)


def run(context: StageContext) -> None:
    """Write the trunk and the first policy."""
    from rlhf_core.hardware import torch_dtype

    settings = context.settings(BootstrapJob)
    if settings.dtype == "auto":
        raise ValueError(
            "dtype `auto` reached a stage: it is resolved when a project is opened, and recorded"
        )
    context.sink.progress(0, 2, "loading the base model")
    dtype, held_out = torch_dtype(settings.dtype), TokenRows(0)
    if settings.sft is None:
        base = load_base(settings.base, dtype)
    else:
        base, held_out = fine_tuned(context, settings, settings.sft, dtype)
    said = TrunkFile(dtype=settings.dtype, length_bucket=settings.length_bucket, weights=settings.weights)
    trunk = context.write_trunk(base, said)
    context.sink.progress(1, 2, "writing the first policy")
    merged = held_out_loss(trunk, "reference", laid_out(held_out, trunk, packing=False))
    if merged is not None:
        context.summary({"sft/held_out_loss_merged": merged})
    context.write_first_policy(trunk, settings.lora)
    context.sink.progress(2, 2, "done")


def fine_tuned(
    context: StageContext, settings: Bootstrap, sft: SFT, dtype: "torch.dtype"
) -> tuple[Base, TokenRows]:
    """The base with what it learned from the demonstrations merged in; and those that were held out."""
    from rlhf_core.hardware import torch_dtype
    from rlhf_core.pretrained import freeze

    base = load_base(settings.base, dtype)
    trunk = trunk_on(base, "", settings.length_bucket, context.job.execution)
    found = read_rows(context.input("demonstrations") / "demonstrations.parquet", Demonstration)
    split = split_of(sft, trunk.codec, found)
    context.summary(
        {
            "sft/train_demonstrations": float(len(split.train)),
            "sft/held_out_demonstrations": float(len(split.held_out)),
            "sft/too_long": float(split.num_too_long),
        }
    )
    if split.num_too_long:
        context.sink.alarm(
            f"{split.num_too_long} of {len(found)} demonstrations were left out: they have more than "
            f"{min(sft.max_length, trunk.codec.context_length)} tokens"
        )
    trunk.add_role(ROLE, sft.lora, derive_seed(context.seed, "sft adapter"))
    context.summary(fine_tune(trunk, split, sft, derive_seed(context.seed, "sft order"), context.sink))
    adapter = {name: parameter.detach().cpu() for name, parameter in trunk.parameters(ROLE).items()}
    del base, trunk  # before a second one is loaded
    whole = load_base(settings.base, torch_dtype("float32"))
    merge(whole.model, adapter, sft.lora)
    return freeze(whole, dtype), split.held_out
