"""Rows, masks, buckets and groups: nothing is lost, nothing counts twice, nothing looks at a neighbour."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.batch import MIN_BUCKET, PreferenceBatch, RolloutBatch, TextBatch, collate
from rlhf_core.tensors import mask_from_lengths

PAD = 0
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


def batch_of(lengths: list[tuple[int, int]]) -> TextBatch:
    """Rows whose prompts hold 100, 101, ... and whose responses hold 200, 201, ..."""
    prompts = [list(range(100, 100 + q)) for q, _ in lengths]
    return collate(prompts, [list(range(200, 200 + t)) for _, t in lengths], PAD)


def test_a_batch_is_padded_on_the_right_and_its_mask_comes_from_lengths() -> None:
    # The second response is made of the pad's own id: those are tokens all the same.
    batch = collate([[5], [6, 7]], [[8, 9, 1], [PAD, PAD]], PAD)
    assert batch.query_ids.tolist() == [[5, PAD], [6, 7]]
    assert batch.query_lengths.tolist() == [1, 2]
    assert batch.response_ids.tolist() == [[8, 9, 1], [PAD, PAD, PAD]]
    assert batch.response_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.response_lengths.tolist() == [3, 2]
    assert batch.weight == 5


def test_a_sequence_is_the_prompt_the_response_without_a_gap_and_padding() -> None:
    batch = collate([[5], [6, 7]], [[8, 9, 1], [4]], PAD)
    assert batch.sequences(5, PAD).tolist() == [[5, 8, 9, 1, PAD], [6, 7, 4, PAD, PAD]]


def test_sequences_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a row has 4 tokens, and the model takes 3"):
        collate([[5], [6, 7]], [[8, 9, 1], [4]], PAD).sequences(3, PAD)


@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 5), st.integers(0, 5))
def test_wider_tensors_give_the_same_sequences(
    lengths: list[tuple[int, int]], more_q: int, more_t: int
) -> None:
    batch = batch_of(lengths)
    wider = TextBatch(
        torch.nn.functional.pad(batch.query_ids, (0, more_q), value=77),
        batch.query_lengths,
        torch.nn.functional.pad(batch.response_ids, (0, more_t), value=88),
        torch.nn.functional.pad(batch.response_mask, (0, more_t)),
    )
    assert torch.equal(wider.sequences(80, PAD), batch.sequences(80, PAD))
    assert wider.widths(64) == batch.widths(64)


@settings(max_examples=40)
@given(LENGTHS, st.integers(8, 64), st.integers(1, 400))
def test_micro_batches_hold_each_row_once_in_one_width_within_the_budget(
    lengths: list[tuple[int, int]], bucket: int, tokens: int
) -> None:
    batch = batch_of(lengths)
    pieces = list(batch.micro_batches(bucket, tokens))
    assert sorted(torch.cat([rows for rows, _ in pieces]).tolist()) == list(range(len(lengths)))
    for rows, width in pieces:
        assert len(rows) * width <= tokens or len(rows) == 1
        assert all(batch.widths(bucket)[row] == width for row in rows)


@settings(max_examples=40)
@given(LENGTHS, st.integers(8, 64))
def test_a_width_holds_its_row_and_depends_on_that_row_alone(
    lengths: list[tuple[int, int]], bucket: int
) -> None:
    widths = batch_of(lengths).widths(bucket)
    assert widths == [batch_of([own]).widths(bucket)[0] for own in lengths]
    for (q, t), width in zip(lengths, widths, strict=True):
        assert q + t <= width < q + t + max(bucket, MIN_BUCKET)
        assert width == MIN_BUCKET or width % bucket == 0


def test_the_parts_of_a_batch_hold_all_of_its_weight() -> None:
    batch = batch_of([(3, 4), (50, 20), (3, 9), (2, 2), (60, 30)])
    parts = list(batch.parts(bucket=32, tokens=64))
    assert sum(len(part) for part in parts) == len(batch)
    assert sum(part.weight for part in parts) == batch.weight


def test_selecting_rows_takes_everything_that_belongs_to_them() -> None:
    text = batch_of([(1, 2), (2, 1), (3, 3)])
    columns = torch.arange(9.0).reshape(3, 3)
    batch = RolloutBatch(
        text.query_ids, text.query_lengths, text.response_ids, text.response_mask,
        group_ids=torch.tensor([4, 5, 6]), scores=torch.tensor([0.1, 0.2, 0.3]), values=columns,
    )  # fmt: skip
    taken = batch.select(torch.tensor([2, 0]))
    assert isinstance(taken, RolloutBatch)
    assert taken.query_lengths.tolist() == [3, 1]
    assert taken.response_lengths.tolist() == [3, 2]
    assert taken.group_ids.tolist() == [6, 4]
    assert taken.values is not None and taken.values.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert taken.advantages is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_mask": torch.ones(2, 3)}, r"response_mask is torch.float32 \[2, 3\].*must be bool"),
        ({"response_mask": torch.ones(2, 2, dtype=torch.bool)}, r"\[2, 2\], and response_ids are \[2, 3\]"),
        (
            {"response_mask": torch.tensor([[True, True, False], [True, False, True]])},
            "True again after a False",
        ),
        ({"query_ids": torch.zeros(3, 2, dtype=torch.long)}, "3 prompts and 2 responses"),
        ({"query_lengths": torch.tensor([1])}, "each row needs both"),
        ({"query_lengths": torch.tensor([0, 1])}, "a prompt has no token"),
        ({"query_lengths": torch.tensor([1, 3])}, "longer than the 2 columns"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(change: dict[str, Tensor], message: str) -> None:
    good = {
        "query_ids": torch.ones(2, 2, dtype=torch.long),
        "query_lengths": torch.tensor([1, 2]),
        "response_ids": torch.ones(2, 3, dtype=torch.long),
        "response_mask": mask_from_lengths(torch.tensor([3, 1]), 3),
    }
    TextBatch(**good)
    with pytest.raises(ValueError, match=message):
        TextBatch(**good | change)


@st.composite
def preference_batches(draw: Callable[..., object]) -> PreferenceBatch:
    """Groups of two to four completions, one to four pairs in each."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=6))
    assert isinstance(sizes, list)
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    pairs: list[tuple[int, int]] = []
    for start, size in zip(starts, sizes, strict=True):
        rows = st.integers(start, start + size - 1)
        found = draw(st.lists(st.tuples(rows, rows).filter(lambda p: p[0] != p[1]), min_size=1, max_size=4))
        assert isinstance(found, list)
        pairs += found
    group_ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    # The ids of a row's prompt and response tell which row it is.
    names = range(len(group_ids))
    completions = collate([[name] for name in names], [[name] * (1 + name % 3) for name in names], PAD)
    chosen, rejected = torch.tensor(pairs).unbind(-1)
    return PreferenceBatch(completions, torch.tensor(group_ids), chosen, rejected)


def told(batch: PreferenceBatch) -> list[tuple[int, int]]:
    """The pairs by what their completions hold, wherever those stand."""
    names = batch.completions.query_ids[:, 0]
    return list(zip(names[batch.chosen].tolist(), names[batch.rejected].tolist(), strict=True))


@settings(max_examples=40)
@given(preference_batches(), st.randoms(use_true_random=False))
def test_selecting_groups_keeps_their_pairs_and_no_others(batch: PreferenceBatch, random: object) -> None:
    groups = list(range(len(batch)))
    random.shuffle(groups)  # type: ignore[attr-defined]
    groups = groups[: 1 + len(groups) // 2]
    taken = batch.select(torch.tensor(groups))
    owner = dict(zip(batch.completions.query_ids[:, 0].tolist(), batch.group_ids.tolist(), strict=True))
    assert told(taken) == [pair for pair in told(batch) if owner[pair[0]] in groups]
    assert len(taken) == len(groups)
    # The groups are numbered anew, in the order asked for, and each completion is there once.
    names = taken.completions.query_ids[:, 0].tolist()
    assert [owner[name] for name in names] == [groups[new] for new in taken.group_ids.tolist()]
    assert sorted(names) == sorted(name for name, group in owner.items() if group in groups)


@settings(max_examples=40)
@given(preference_batches(), st.integers(1, 300))
def test_the_parts_of_preferences_hold_every_pair_once_and_every_completion_once(
    batch: PreferenceBatch, tokens: int
) -> None:
    parts = list(batch.parts(bucket=32, tokens=tokens))
    assert [pair for part in parts for pair in told(part)] == told(batch)
    names = [name for part in parts for name in part.completions.query_ids[:, 0].tolist()]
    assert names == batch.completions.query_ids[:, 0].tolist()
    assert sum(part.weight for part in parts) == batch.weight
    for part in parts:
        assert sum(part.completions.widths(32)) <= tokens or len(part) == 1


def test_a_pair_across_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="completions of two prompts"):
        PreferenceBatch(
            batch_of([(1, 1), (1, 1)]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([1])
        )
