"""pairing: which completions of a prompt are compared."""

from itertools import combinations, groupby
from random import Random

from pydantic import Field

from rlhf_core.artifacts import derive_seed
from rlhf_core.records import Comparison, Completion, compare
from rlhf_core.settings import Settings
from rlhf_core.sources import read_rows, write_rows
from rlhf_core.stages.context import StageContext

NAME, VERSION = "pairing", 1


class Pairing(Settings):
    """Which pairs are labelled."""

    pairs_per_prompt: int = Field(default=0, ge=0)
    """Pairs of each prompt, drawn at random; 0 takes all, which teaches more than more epochs would."""


def pair(completions: list[Completion], settings: Pairing, seed: int) -> list[Comparison]:
    """Comparisons of unlike completions of one prompt, in an order of showing that favours neither."""
    comparisons = []
    for prompt_id, group in groupby(
        sorted(completions, key=lambda c: (c.prompt_id, c.id)), lambda c: c.prompt_id
    ):
        draws = Random(derive_seed(seed, prompt_id))
        pairs = [(a.id, b.id) for a, b in combinations(list(group), 2) if a.text.strip() != b.text.strip()]
        if settings.pairs_per_prompt:
            pairs = draws.sample(pairs, min(len(pairs), settings.pairs_per_prompt))
        comparisons += [compare(prompt_id, *(ids if draws.random() < 0.5 else ids[::-1])) for ids in pairs]
    return comparisons


def run(context: StageContext) -> None:
    """Write the comparisons, and beside them the completions they are of."""
    completions = read_rows(context.input("completions") / "completions.parquet", Completion)
    comparisons = pair(completions, context.settings(Pairing), context.seed)
    if not comparisons:
        raise ValueError(
            f"{len(completions)} completions give no pair to compare: all completions of each prompt are the "
            "same. Sample more of each prompt, or at a higher temperature."
        )
    with context.output("comparisons", "comparisons") as folder:
        write_rows(comparisons, folder / "comparisons.parquet")
        write_rows(completions, folder / "completions.parquet")
    context.summary({"preference/comparisons": float(len(comparisons))})
