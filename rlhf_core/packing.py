"""Packing: several rows share one row of a forward pass, each from position 0, none attending to another.

Saves the padding of many short rows (Krell et al., 2021). A packed row's numbers equal those of the row alone
up to rounding, not to the bit: it is for losses that are sums over tokens, not for ratios.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.batch import TextBatch


@dataclass
class PackedBatch(TextBatch):
    """Rows that are laid end to end in rows of one width; positions start anew with each.

    Which rows attend to which follows from the positions alone: transformers masks what lies before the last
    position 0. Padding is position 0 throughout, so that it attends to itself.
    """

    row_width: int
    """Tokens of a packed row; no row of the batch is longer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = int(self.lengths.max())
        if longest > self.row_width:
            raise ValueError(
                f"a row has {longest} tokens, and packed rows have {self.row_width}: its end would be cut."
            )

    def micro_batches(self, bucket: int, tokens: int) -> Iterator[tuple[Tensor, int]]:
        """Row numbers of each forward pass: whole packed rows, at most `tokens` tokens of them."""
        bins = first_fit(self.lengths.tolist(), self.row_width)
        size = max(1, tokens // self.row_width)
        for start in range(0, len(bins), size):
            rows = [row for one in bins[start : start + size] for row in one]
            yield torch.tensor(rows, device=self.query_ids.device), self.row_width

    def computed(self, bucket: int) -> int:
        """Positions that a forward pass over all rows computes, padding included."""
        return len(first_fit(self.lengths.tolist(), self.row_width)) * self.row_width

    def states(self, hidden: Callable[..., Tensor], width: int, pad_id: int) -> Tensor:
        """[B, W, H] what `hidden` gives for each row, computed in packed rows of `width` tokens."""
        lengths = self.lengths
        bins = first_fit(lengths.tolist(), width)
        starts = _starts(bins, lengths.tolist(), width).to(lengths.device)
        positions = torch.arange(int(lengths.max()), device=lengths.device)
        within = positions < lengths[:, None]
        places = starts[:, None] + positions
        ids = torch.full((len(bins) * width,), pad_id, device=lengths.device)
        position_ids = torch.zeros_like(ids)
        ids[places[within]] = self.sequences(len(positions), pad_id)[within]
        position_ids[places[within]] = positions.expand_as(places)[within]
        packed = hidden(ids.view(-1, width), position_ids=position_ids.view(-1, width))
        # Behind a row's end lies its neighbour, which its mask leaves out: any place inside will do.
        return packed.flatten(0, 1)[places.clamp(max=len(ids) - 1)]


def first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Bins of row numbers, of at most `width` tokens each: longest first, into the first that has room.

    First-fit decreasing needs at most 11/9 of the fewest bins possible, and one more (Johnson, 1973). Packing
    the rows of some of its bins again gives as many bins.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((place for place, left in enumerate(room) if left >= lengths[row]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(width)
        bins[place].append(row)
        room[place] -= lengths[row]
    return bins


def _starts(bins: Sequence[Sequence[int]], lengths: Sequence[int], width: int) -> Tensor:
    """[B] where each row begins in the packed rows laid end to end."""
    starts = torch.empty(len(lengths), dtype=torch.long)
    for number, rows in enumerate(bins):
        start = number * width
        for row in rows:
            starts[row] = start
            start += lengths[row]
    return starts
