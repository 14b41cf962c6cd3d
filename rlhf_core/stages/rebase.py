"""rebase: the champion becomes a new trunk, on which a first policy changes nothing yet.

Cumulative KL to the initial policy grows round by round until its gate lets nothing through. From here on it
is counted from what the project has reached. Tokenizer, template, dtype and kind of weights stay.
"""

import torch

from rlhf_core.models import Base, load_trunk
from rlhf_core.settings import Settings
from rlhf_core.stages.comparison import kl_to
from rlhf_core.stages.context import StageContext, described_in
from rlhf_core.stages.measurement import Measured
from rlhf_core.trunk import Lora

NAME, VERSION = "rebase", 1


class Rebase(Settings):
    """What a rebase is told beside its inputs."""

    lora: Lora = Lora()
    """The first policy's adapter, as in bootstrap."""
    temperature: float = 1.0
    """Of the samples that the champion was measured on; KL to it is taken at it."""


def run(context: StageContext) -> None:
    """Write the merged trunk and its first policy, and measure that it says what the champion said."""
    settings = context.settings(Rebase)
    context.sink.progress(0, 2, "merging the champion")
    trunk = context.write_trunk(merged(context), described_in(context.input("trunk")))
    context.sink.progress(1, 2, "measuring the merged trunk")
    sampled = Measured(context, "measured").sampled
    with torch.no_grad():
        kl = kl_to(trunk, "reference", sampled, settings.temperature)
    context.summary(
        {
            "rebase/kl_to_champion": sum(kl) / len(kl),
            "rebase/max_log_ratio": max(map(abs, kl)),
            "rebase/completions": float(len(kl)),
        }
    )
    context.write_first_policy(trunk, settings.lora)
    context.sink.progress(2, 2, "done")


def merged(context: StageContext) -> Base:
    """The bare model that says what the champion says, in the trunk's dtype."""
    from rlhf_core.hardware import torch_dtype
    from rlhf_core.pretrained import freeze

    folder = context.input("trunk")
    trunk = context.trunk()
    trunk.load_role("policy", context.input("policy"))
    if trunk.is_initial("policy"):
        raise ValueError(
            "the policy changes nothing of its trunk: merged, it would be the same trunk again. Rebase once "
            "a candidate was promoted."
        )
    bare = load_trunk(folder / "model", torch_dtype("float32"))
    trunk.merge_into("policy", bare.model)
    return freeze(bare, torch_dtype(described_in(folder).dtype))
