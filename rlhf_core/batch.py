"""Batches: token rows that start at position 0, masks made from positions, buckets by a row's own length.

B completions, P pairs, Q prompt length, T response length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from rlhf_core.records import Completion
from rlhf_core.tensors import mask_from_lengths

MIN_BUCKET = 32
"""Matrix products of fewer rows may sum in another order: a row would depend on its neighbours."""


@dataclass
class TextBatch:
    """Prompts and the responses that follow them: right-padded here, joined without a gap in `sequences`."""

    query_ids: Tensor
    """[B, Q] prompt tokens."""
    query_lengths: Tensor
    """[B] prompt tokens that count."""
    response_ids: Tensor
    """[B, T] generated tokens."""
    response_mask: Tensor
    """[B, T] bool, True up to and including the end token."""

    def __post_init__(self) -> None:
        rows, width = self.response_ids.shape
        if self.response_mask.shape != (rows, width) or self.response_mask.dtype != torch.bool:
            raise ValueError(
                f"response_mask is {self.response_mask.dtype} {list(self.response_mask.shape)}, "
                f"and response_ids are {[rows, width]}: the mask must be bool and of the same shape."
            )
        if self.query_ids.shape[0] != rows or self.query_lengths.shape != (rows,):
            raise ValueError(f"{self.query_ids.shape[0]} prompts and {rows} responses: each row needs both.")
        if (self.query_lengths < 1).any():
            raise ValueError("a prompt has no token: the first response token would have no state before it.")
        if (self.query_lengths > self.query_ids.shape[1]).any():
            raise ValueError(f"a prompt is longer than the {self.query_ids.shape[1]} columns of query_ids.")
        if (self.response_mask[:, 1:] & ~self.response_mask[:, :-1]).any():
            raise ValueError(
                "response_mask is True again after a False: responses start at position 0 and have no gap."
            )

    def __len__(self) -> int:
        return len(self.query_ids)

    @property
    def response_lengths(self) -> Tensor:
        """[B] tokens that count in each response."""
        return self.response_mask.sum(-1)

    @property
    def lengths(self) -> Tensor:
        """[B] tokens of each row, prompt and response."""
        return self.query_lengths + self.response_lengths

    def select(self, rows: Tensor) -> Self:
        """The rows named, in that order, everything that belongs to them included."""
        taken = {
            field.name: value[rows]
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **taken)

    def sequences(self, width: int, pad_id: int) -> Tensor:
        """[B, width] prompt and response of each row from position 0, then padding."""
        positions = torch.arange(width, device=self.query_ids.device)[None].expand(len(self), -1)
        start = self.query_lengths[:, None]
        longest = int(self.lengths.max())
        if longest > width:
            raise ValueError(
                f"a row has {longest} tokens, and the model takes {width}: its end would be cut off."
            )
        in_response = (positions >= start) & (positions < start + self.response_lengths[:, None])
        query = self.query_ids.gather(1, positions.clamp(max=self.query_ids.shape[1] - 1))
        response = self.response_ids.gather(1, (positions - start).clamp(0, self.response_ids.shape[1] - 1))
        padding = torch.full_like(query, pad_id)
        return torch.where(positions < start, query, torch.where(in_response, response, padding))

    def widths(self, bucket: int) -> list[int]:
        """The padded width of each row: a multiple of `bucket` that depends on nothing but its own length."""
        return [padded_width(length, bucket) for length in self.lengths.tolist()]

    def micro_batches(self, bucket: int, tokens: int) -> Iterator[tuple[Tensor, int]]:
        """Row numbers and width of each forward pass: rows of one width, at most `tokens` padded tokens."""
        widths = self.widths(bucket)
        for width in sorted(set(widths)):
            rows = [row for row, own in enumerate(widths) if own == width]
            size = max(1, tokens // width)
            for start in range(0, len(rows), size):
                yield torch.tensor(rows[start : start + size], device=self.query_ids.device), width

    def computed(self, bucket: int) -> int:
        """Positions that a forward pass over all rows computes, padding included."""
        return sum(self.widths(bucket))

    def states(self, hidden: Callable[..., Tensor], width: int, pad_id: int) -> Tensor:
        """[B, W, H] what `hidden` gives for rows of ids: here each row by itself, from position 0."""
        return hidden(self.sequences(width, pad_id))

    @property
    def weight(self) -> int:
        """Response tokens: what a loss over the batch is divided by."""
        return int(self.response_mask.sum())

    def parts(self, bucket: int, tokens: int) -> Iterator[Self]:
        """The batch in pieces that fit a forward pass."""
        for rows, _ in self.micro_batches(bucket, tokens):
            yield self.select(rows)


@dataclass
class RolloutBatch(TextBatch):
    """What PPO learns from; filled in the order of the method. Whatever is masked out is zero."""

    group_ids: Tensor
    """[B] which prompt a completion belongs to."""
    logprobs: Tensor | None = None
    """[B, T] of the policy that sampled, recomputed by the trainer's own forward."""
    ref_logprobs: Tensor | None = None
    """[B, T] of the reference."""
    scores: Tensor | None = None
    """[B] of the reward source, for the whole completion."""
    token_scores: Tensor | None = None
    """[B, T] where the scores are earned, clipped and less their penalties."""
    kl: Tensor | None = None
    """[B, T] estimate per token."""
    rewards: Tensor | None = None
    """[B, T] what the return is summed from."""
    values: Tensor | None = None
    """[B, T] expected return of the state before each token."""
    advantages: Tensor | None = None
    """[B, T] whitened over the whole batch."""
    returns: Tensor | None = None
    """[B, T] advantages + values, taken before whitening."""


@dataclass
class PreferenceBatch:
    """Pairs of completions by groups of one prompt, each completion encoded once whatever its pairs."""

    completions: TextBatch
    """[C] every completion of every group."""
    group_ids: Tensor
    """[C] the group of each completion, counted from 0 without gaps."""
    chosen: Tensor
    """[P] row of the better completion."""
    rejected: Tensor
    """[P] row of the worse one, in the same group."""

    def __post_init__(self) -> None:
        if (self.group_ids[self.chosen] != self.group_ids[self.rejected]).any():
            raise ValueError("a pair has completions of two prompts: their scores cannot be compared.")

    def __len__(self) -> int:
        return int(self.group_ids.max()) + 1

    @property
    def weight(self) -> int:
        """Pairs: what a loss over the batch is divided by."""
        return len(self.chosen)

    def select(self, groups: Tensor) -> "PreferenceBatch":
        """The groups named, with all their completions and pairs."""
        new_group = torch.full((len(self),), -1)
        new_group[groups] = torch.arange(len(groups))
        kept = new_group[self.group_ids] >= 0
        new_row = kept.cumsum(0) - 1
        pairs = kept[self.chosen]
        return PreferenceBatch(
            completions=self.completions.select(kept.nonzero().flatten()),
            group_ids=new_group[self.group_ids][kept],
            chosen=new_row[self.chosen[pairs]],
            rejected=new_row[self.rejected[pairs]],
        )

    def parts(self, bucket: int, tokens: int) -> Iterator["PreferenceBatch"]:
        """Whole groups that together fit the token budget, one group at least."""
        widths = torch.tensor(self.completions.widths(bucket))
        cost = torch.zeros(len(self), dtype=torch.long).index_add(0, self.group_ids.cpu(), widths).tolist()
        part: list[int] = []
        for group in range(len(self)):
            if part and sum(cost[g] for g in part) + cost[group] > tokens:
                yield self.select(torch.tensor(part))
                part = []
            part.append(group)
        yield self.select(torch.tensor(part))


def padded_width(length: int, bucket: int) -> int:
    """The width of a row of so many tokens: a multiple of `bucket`, and never a very small one."""
    return max(MIN_BUCKET, -(-length // bucket) * bucket)


def pad_rows(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """[rows, longest] ids, padded on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], dtype=torch.long)


def collate(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device | str = "cpu",
) -> TextBatch:
    """Token rows as one batch; the masks come from the rows' lengths, never from the pad id."""
    responses = pad_rows(response_ids, pad_id)
    lengths = torch.tensor([len(row) for row in response_ids])
    batch = TextBatch(
        query_ids=pad_rows(prompt_ids, pad_id),
        query_lengths=torch.tensor([len(row) for row in prompt_ids]),
        response_ids=responses,
        response_mask=mask_from_lengths(lengths, responses.shape[1]),
    )
    return TextBatch(**{field.name: getattr(batch, field.name).to(device) for field in fields(batch)})


def collate_completions(
    completions: Sequence[Completion], pad_id: int, device: torch.device | str = "cpu"
) -> TextBatch:
    """Completions as one batch, with the very ids they were sampled with."""
    return collate([c.prompt_ids for c in completions], [c.response_ids for c in completions], pad_id, device)
