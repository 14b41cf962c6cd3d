"""The label pool as a reward model reads it: groups of one prompt's completions, split by prompt for ever."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_core.artifacts import derive_seed
from rlhf_core.batch import PreferenceBatch, collate_completions
from rlhf_core.records import Completion, Preference
from rlhf_core.sources import read_rows


@dataclass(frozen=True)
class LabelledGroup:
    """One prompt's completions of one round, and the decided pairs among them."""

    prompt_id: str
    round: int
    completions: list[Completion]
    pairs: list[tuple[int, int]]
    """(chosen, rejected), as places in `completions`."""
    ties: int


def read_groups(folder: Path) -> list[LabelledGroup]:
    """The groups of one preferences artifact, in the order of their prompts."""
    completions: dict[str, list[Completion]] = {}
    for completion in read_rows(folder / "completions.parquet", Completion):
        completions.setdefault(completion.prompt_id, []).append(completion)
    labels: dict[str, list[Preference]] = {}
    for preference in read_rows(folder / "preferences.parquet", Preference):
        labels.setdefault(preference.prompt_id, []).append(preference)
    return [_group(prompt_id, completions[prompt_id], labels[prompt_id]) for prompt_id in sorted(labels)]


def _group(prompt_id: str, completions: list[Completion], labels: list[Preference]) -> LabelledGroup:
    place = {completion.id: index for index, completion in enumerate(completions)}
    decided = [(p.chosen, p.rejected) for p in labels if p.chosen is not None and p.rejected is not None]
    pairs = [(place[chosen], place[rejected]) for chosen, rejected in decided]
    return LabelledGroup(prompt_id, labels[0].round, completions, pairs, ties=len(labels) - len(pairs))


def is_held_out(prompt_id: str, share: float) -> bool:
    """Whether labels on this prompt validate reward models: by its id alone, so the same in every round."""
    return derive_seed("held-out labels", prompt_id) / 2**63 < share


def split_groups(
    groups: Sequence[LabelledGroup], share: float
) -> tuple[list[LabelledGroup], list[LabelledGroup]]:
    """(train, held out), groups without a decided pair left out."""
    decided = [group for group in groups if group.pairs]
    train = [group for group in decided if not is_held_out(group.prompt_id, share)]
    held_out = [group for group in decided if is_held_out(group.prompt_id, share)]
    if not train or not held_out:
        raise ValueError(
            f"{len(decided)} prompts with decided pairs split into {len(train)} for training and "
            f"{len(held_out)} held out: both are needed. Label more prompts, or change held_out_share "
            f"({share})."
        )
    return train, held_out


def to_batch(groups: Sequence[LabelledGroup], pad_id: int, device: torch.device) -> PreferenceBatch:
    """The groups as one batch; each completion once, those in no pair left out."""
    completions: list[Completion] = []
    group_ids: list[int] = []
    chosen: list[int] = []
    rejected: list[int] = []
    for number, group in enumerate(groups):
        used = sorted({place for pair in group.pairs for place in pair})
        row = {place: len(completions) + index for index, place in enumerate(used)}
        completions += [group.completions[place] for place in used]
        group_ids += [number] * len(used)
        chosen += [row[place] for place, _ in group.pairs]
        rejected += [row[place] for _, place in group.pairs]
    return PreferenceBatch(
        completions=collate_completions(completions, pad_id, device),
        group_ids=torch.tensor(group_ids),
        chosen=torch.tensor(chosen),
        rejected=torch.tensor(rejected),
    )
