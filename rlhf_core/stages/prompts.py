"""prompts: this round's draw from three pools that never share a prompt.

A prompt's pool is a function of its id alone, so it stays where it is for the life of every project: what
labels were given on never becomes what is measured on.
"""

from collections.abc import Sequence
from random import Random

from pydantic import Field

from rlhf_core.artifacts import derive_seed
from rlhf_core.records import Prompt
from rlhf_core.settings import Settings
from rlhf_core.sources import read_column, read_rows, write_rows
from rlhf_core.stages.context import StageContext

NAME, VERSION = "prompts", 1
POOLS = ("labelling", "policy", "held_out")


class PromptDraw(Settings):
    """How many prompts a round uses for what."""

    labelling: int = Field(default=128, ge=1)
    """Prompts whose completions are labelled in this round; another draw every round."""
    policy: int = Field(default=256, ge=1)
    """Prompts that the policy is trained on, at most."""
    held_out: int = Field(default=128, ge=1)
    """Prompts that policies are measured on; the same ones in every round."""
    labelling_share: float = Field(default=0.4, gt=0, lt=1)
    """Share of the source that is the labelling pool."""
    held_out_share: float = Field(default=0.3, gt=0, lt=1)
    """Share of the source that is the held-out pool; the rest is the policy's."""


def pool_of(prompt_id: str, settings: PromptDraw) -> str:
    """The pool of a prompt, by its id alone."""
    place = derive_seed("pool", prompt_id) / 2**63
    if place < settings.labelling_share:
        return "labelling"
    return "held_out" if place < settings.labelling_share + settings.held_out_share else "policy"


def split(ids: Sequence[str], settings: PromptDraw) -> dict[str, list[int]]:
    """Where the prompts of the three pools stand in a source, in an order that depends on the ids alone.

    An empty or too small pool is refused.
    """
    pools: dict[str, list[int]] = {pool: [] for pool in POOLS}
    for place in sorted(range(len(ids)), key=lambda i: (derive_seed("order", ids[i]), ids[i])):
        pools[pool_of(ids[place], settings)].append(place)
    for pool, wanted in (("labelling", settings.labelling), ("held_out", settings.held_out), ("policy", 1)):
        if len(pools[pool]) < wanted:
            raise ValueError(
                f"the {pool} pool has {len(pools[pool])} of the source's {len(ids)} prompts, and a round "
                f"wants {wanted}: give more prompts, ask for fewer, or change the pools' shares."
            )
    return pools


def run(context: StageContext) -> None:
    """Write the round's draw of each pool."""
    settings = context.settings(PromptDraw)
    source = context.input("source") / "prompts.parquet"
    pools = split(read_column(source, "id"), settings)
    draws = Random(derive_seed(context.seed, "draw"))
    drawn = {
        "labelling": draws.sample(pools["labelling"], settings.labelling),
        "policy": pools["policy"][: settings.policy],
        "held_out": pools["held_out"][: settings.held_out],
    }
    for pool, places in drawn.items():
        with context.output(f"{pool}_prompts", "prompts") as folder:
            write_rows(read_rows(source, Prompt, places), folder / "prompts.parquet")
    context.summary({f"prompts/{pool}": float(len(places)) for pool, places in drawn.items()})
