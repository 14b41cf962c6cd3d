"""Packing: rows that share a row of a forward pass have the numbers and gradients that they have alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.batch import TextBatch, collate
from rlhf_core.models import FolderModel, load_base
from rlhf_core.packing import PackedBatch, first_fit
from rlhf_core.tiny_model import byte_tokenizer
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.test_trunk import FAMILIES

# In rows of 96: some are filled to the last token, some hold one row, some hold many.
LENGTHS = [(5, 15), (30, 34), (60, 36), (3, 2), (40, 24), (10, 10), (63, 1), (1, 1), (20, 44), (7, 50)]
WIDTH = 96


@pytest.fixture(params=FAMILIES)
def trunk(request: pytest.FixtureRequest, tmp_path: Path, stir: Callable[..., None]) -> Trunk:
    """A trunk of each family, with a trained policy and value."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[request.param]()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 5
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    made = Trunk(load_base(FolderModel(path=str(tmp_path / "model")), torch.float32), "f" * 64)
    for seed, role in enumerate(("policy", "value")):
        made.add_role(role, Lora(rank=4, alpha=8.0), seed, head="last" if role == "value" else None)
        stir(made, role, seed)
    return made


def packed(batch: TextBatch, width: int = WIDTH) -> PackedBatch:
    return PackedBatch(**vars(batch), row_width=width)


def logprobs(trunk: Trunk, batch: TextBatch) -> Tensor:
    with torch.no_grad(), trunk.role("policy"):
        return trunk.logprobs(batch, 1.0)[0]


def test_in_every_family_a_packed_row_has_the_numbers_it_has_alone(
    trunk: Trunk, make_batch: Callable[..., TextBatch]
) -> None:
    batch = make_batch(LENGTHS)
    assert len(first_fit(batch.lengths.tolist(), WIDTH)) < len(LENGTHS)
    alone = logprobs(trunk, batch)
    assert alone[batch.response_mask].std() > 0.5  # sharp opinions: a leak would show
    torch.testing.assert_close(logprobs(trunk, packed(batch)), alone, rtol=1e-5, atol=2e-5)
    with torch.no_grad(), trunk.role("value"):
        torch.testing.assert_close(trunk.values(packed(batch)), trunk.values(batch), rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(trunk.scores(packed(batch)), trunk.scores(batch), rtol=1e-5, atol=2e-5)


def test_in_every_family_what_a_packed_row_says_reaches_no_other_to_the_bit(
    trunk: Trunk, make_batch: Callable[..., TextBatch]
) -> None:
    batch = make_batch(LENGTHS)
    before = logprobs(trunk, packed(batch))
    for row in range(len(LENGTHS)):
        other = packed(batch).select(torch.arange(len(LENGTHS)))
        other.query_ids[row] = 255 - other.query_ids[row]
        other.response_ids[row] = 255 - other.response_ids[row]
        after = logprobs(trunk, other)
        neighbours = torch.arange(len(LENGTHS)) != row
        assert torch.equal(after[neighbours], before[neighbours])
        assert not torch.equal(after[row], before[row])


def test_in_every_family_packing_changes_no_gradient_beyond_rounding(
    trunk: Trunk, make_batch: Callable[..., TextBatch]
) -> None:
    batch = make_batch(LENGTHS)
    found = []
    for one in (batch, packed(batch)):
        with trunk.role("policy"):
            (-trunk.logprobs(one, 1.0)[0].sum() / one.weight).backward()
        found.append({name: p.grad.clone() for name, p in trunk.parameters("policy").items()})
        for parameter in trunk.parameters("policy").values():
            parameter.grad = None
    for name, wanted in found[0].items():
        # Sums over some hundred positions in another order, against the largest entry of the tensor.
        torch.testing.assert_close(found[1][name], wanted, rtol=0, atol=float(wanted.abs().max()) * 1e-4)


def test_first_fit_puts_the_longest_first_into_the_first_bin_with_room() -> None:
    # 6 opens a bin of 10 with 4 left; 5 opens a second; 4 fits the first; 3 and 2 fit the second.
    assert first_fit([2, 6, 3, 5, 4], 10) == [[1, 4], [3, 2, 0]]
    assert first_fit([10, 10], 10) == [[0], [1]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.data())
def test_bins_hold_each_row_once_and_packing_some_again_gives_as_many(
    lengths: list[int], data: st.DataObject
) -> None:
    bins = first_fit(lengths, 20)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= 20 for rows in bins)
    start = data.draw(st.integers(0, len(bins) - 1))
    some = bins[start : data.draw(st.integers(start, len(bins) - 1)) + 1]
    again = first_fit([lengths[row] for rows in some for row in rows], 20)
    assert len(again) == len(some)


def test_micro_batches_of_packed_rows_hold_each_row_once_within_the_budget(
    make_batch: Callable[..., TextBatch],
) -> None:
    batch = packed(make_batch(LENGTHS))
    bins = first_fit(batch.lengths.tolist(), WIDTH)
    for tokens in (1, WIDTH, 2 * WIDTH + 5, 100 * WIDTH):
        parts = list(batch.micro_batches(64, tokens))
        assert sorted(row for rows, _ in parts for row in rows.tolist()) == list(range(len(LENGTHS)))
        assert len(parts) == -(-len(bins) // max(1, tokens // WIDTH))
        assert all(width == WIDTH for _, width in parts)
    assert batch.computed(64) == len(bins) * WIDTH


def test_packing_computes_fewer_positions_than_padding_does() -> None:
    # 16 rows of 65 tokens are padded to 128 each; eight of 640 hold nine such rows, so two hold them all.
    plain = collate([[1] * 5] * 16, [[2] * 60] * 16, 0)
    assert plain.computed(64) == 16 * 128
    assert packed(plain, 640).computed(64) == 2 * 640


def test_a_row_that_is_longer_than_a_packed_one_is_refused(make_batch: Callable[..., TextBatch]) -> None:
    with pytest.raises(ValueError, match="a row has 97 tokens, and packed rows have 96"):
        packed(make_batch([(50, 47)]))
