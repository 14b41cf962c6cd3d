from math import log

import pytest
import torch
from torch import Tensor, tensor

from rlhf_core.tensors import (
    explained_variance,
    last_true,
    logprobs_from_logits,
    mask_from_lengths,
    mask_to_first_eos,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    zero_masked,
)
from tests.reference import categorical, categorical_entropy

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_masked_statistics_by_hand() -> None:
    x = tensor([[1.0, 2.0, NAN], [6.0, INF, NAN]])
    mask = tensor([[True, True, False], [True, False, False]])
    assert zero_masked(x, mask).tolist() == [[1, 2, 0], [6, 0, 0]]
    assert masked_sum(x, mask) == 9
    assert masked_mean(x, mask) == 3
    assert masked_mean(x, mask, dim=1).tolist() == [1.5, 6]
    assert masked_mean(x, mask, denom=6) == 1.5
    # (1 - 3)^2 + (2 - 3)^2 + (6 - 3)^2 = 14 over 3 values
    torch.testing.assert_close(masked_var(x, mask), tensor(14 / 3))


def test_no_gradient_comes_from_masked_places() -> None:
    x = tensor([1.0, NAN, INF], requires_grad=True)
    masked_mean(x, tensor([True, False, False])).backward()
    assert x.grad is not None and x.grad.tolist() == [1, 0, 0]


def test_sums_are_float32_whatever_comes_in() -> None:
    # In bf16, 256 + 1 is 256: a running sum of ones would stop there.
    ones = torch.ones(1000, dtype=torch.bfloat16)
    total = masked_sum(ones, torch.ones(1000, dtype=torch.bool))
    assert total.dtype == torch.float32 and total == 1000


def test_a_mean_over_nothing_is_refused() -> None:
    mask = tensor([[True, True], [False, False]])
    with pytest.raises(ValueError, match="nothing to average"):
        masked_mean(torch.ones(2, 2), mask, dim=1)
    with pytest.raises(ValueError, match="nothing to average"):
        masked_mean(torch.ones(2, 2), torch.zeros_like(mask))


def test_whitened_values_have_mean_0_and_variance_1(generator: torch.Generator) -> None:
    x = 5 + 3 * torch.randn(6, 7, generator=generator)
    mask = mask_from_lengths(tensor([7, 5, 1, 4, 7, 2]), 7)
    white = masked_whiten(x, mask)
    counted = white[mask]
    torch.testing.assert_close(counted.mean(), tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(counted.var(correction=0), tensor(1.0), rtol=1e-5, atol=0)
    assert (white[~mask] == 0).all()


def test_whitening_without_shift_keeps_the_mean(generator: torch.Generator) -> None:
    x = 0.5 + 3 * torch.randn(6, 7, generator=generator)
    mask = mask_from_lengths(tensor([7, 5, 1, 4, 7, 2]), 7)
    for sign in (1, -1):
        counted = masked_whiten(sign * x, mask, shift_mean=False)[mask]
        torch.testing.assert_close(counted.mean(), sign * x[mask].mean(), rtol=1e-5, atol=0)
        torch.testing.assert_close(counted.var(correction=0), tensor(1.0), rtol=1e-5, atol=0)


def test_whitening_takes_its_statistics_over_all_rows_not_row_by_row() -> None:
    x = tensor([[0.0] * 4, [2.0] * 4])
    # Mean 1, variance 1 over both rows; within a row there is nothing to scale.
    torch.testing.assert_close(
        masked_whiten(x, torch.ones(2, 4, dtype=torch.bool)), tensor([[-1.0] * 4, [1.0] * 4])
    )


def test_whitening_refuses_fewer_than_eight_values() -> None:
    x = torch.arange(20.0).reshape(2, 10)
    with pytest.raises(ValueError, match="cannot whiten 7 values"):
        masked_whiten(x, mask_from_lengths(tensor([4, 3]), 10))
    masked_whiten(x, mask_from_lengths(tensor([4, 4]), 10))


def test_padding_changes_no_statistic(generator: torch.Generator) -> None:
    x = torch.randn(4, 5, generator=generator)
    mask = mask_from_lengths(tensor([5, 3, 1, 4]), 5)
    padded = torch.cat([x, torch.full((4, 100), NAN)], dim=1)
    padded_mask = torch.cat([mask, torch.zeros(4, 100, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(masked_mean(padded, padded_mask), masked_mean(x, mask), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        masked_whiten(padded, padded_mask)[:, :5], masked_whiten(x, mask), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        explained_variance(padded / 2, padded, padded_mask), tensor(0.75), rtol=1e-5, atol=0
    )


def test_explained_variance_by_hand() -> None:
    mask = tensor([[True, True, True, True, False]])
    returns = tensor([[1.0, 2.0, 3.0, 4.0, NAN]])
    assert explained_variance(returns, returns, mask) == 1
    # A constant offset is no variance: the residual is the same everywhere.
    assert explained_variance(returns - 7, returns, mask) == 1
    assert explained_variance(torch.full_like(returns, 2.0), returns, mask) == 0
    # values = -returns: the residual is 2 * returns, with 4 times the variance; 1 - 4 = -3.
    assert explained_variance(-returns, returns, mask) == -3


def test_equal_returns_leave_nothing_to_explain() -> None:
    # The float32 mean of ten times 0.1 is not 0.1, so the variance as computed is not 0 but about 1e-16.
    returns = torch.full((1, 10), 0.1)
    mask = torch.ones(1, 10, dtype=torch.bool)
    assert masked_var(returns, mask) > 0
    for values in (returns, torch.arange(10.0)[None]):
        assert explained_variance(values, returns, mask) == 0


def test_mask_from_lengths_counts_from_the_left() -> None:
    assert mask_from_lengths(tensor([0, 2, 3]), 3).int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match=r"\[2, 4\] do not fit a width of 3"):
        mask_from_lengths(tensor([2, 4]), 3)


EOS, OTHER_EOS = 9, 8


@pytest.mark.parametrize(
    ("ids", "length", "expected"),
    [
        ([1, 2, EOS, 3, 4], 5, [1, 1, 1, 0, 0]),
        ([1, 2, OTHER_EOS, EOS, 4], 5, [1, 1, 1, 0, 0]),
        ([1, EOS, EOS, EOS, EOS], 5, [1, 1, 0, 0, 0]),
        ([EOS, 1, 2, 3, 4], 5, [1, 0, 0, 0, 0]),
        ([1, 2, 3, 4, 5], 5, [1, 1, 1, 1, 1]),
        ([1, 2, 3, 4, EOS], 5, [1, 1, 1, 1, 1]),
        ([1, 2, 3, EOS, EOS], 3, [1, 1, 1, 0, 0]),
    ],
    ids=[
        "first EOS ends",
        "any end id ends",
        "pad equal to EOS",
        "EOS at once",
        "cut off",
        "EOS last",
        "EOS outside the length",
    ],
)
def test_the_mask_ends_with_the_first_eos(ids: list[int], length: int, expected: list[int]) -> None:
    # A full row beside it, so that rows must be told apart.
    mask = mask_to_first_eos(tensor([ids, [1] * 5]), [EOS, OTHER_EOS], tensor([length, 5]))
    assert mask.int().tolist() == [expected, [1] * 5]


def test_last_true_finds_the_last_token_and_names_empty_rows() -> None:
    mask = tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]]).bool()
    assert last_true(mask).tolist() == [1, 3, 0]
    mask[[0, 2]] = False
    with pytest.raises(ValueError, match=r"rows \[0, 2\] of the mask have no True place"):
        last_true(mask)


def all_logprobs(logits: Tensor, temperature: float) -> Tensor:
    vocabulary = torch.arange(logits.shape[-1]).expand(logits.shape)
    return torch.stack(
        [logprobs_from_logits(logits, ids, temperature)[0] for ids in vocabulary.unbind(-1)], dim=-1
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_normalised_at_the_sampling_temperature(
    temperature: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    logits = (5 * torch.randn(3, 2, 11, generator=generator)).to(dtype)
    logprobs = all_logprobs(logits, temperature)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.logsumexp(-1), torch.zeros(3, 2), rtol=0, atol=1e-6)
    expected = [[log(p) for p in categorical(row, temperature)] for row in logits.flatten(0, 1).tolist()]
    torch.testing.assert_close(logprobs.flatten(0, 1), tensor(expected), rtol=1e-5, atol=1e-6)


def test_temperature_by_hand() -> None:
    # Logits T log 1 and T log 3 at temperature T weigh 1 : 3, so p = 1/4 and 3/4 at every T.
    # Entropy = 1/4 log 4 + 3/4 log 4/3 = log 4 - 3/4 log 3.
    for temperature in (1.0, 0.7, 2.0):
        logits = temperature * tensor([[1.0, 3.0], [1.0, 3.0]]).log()
        logprobs, entropy = logprobs_from_logits(logits, tensor([0, 1]), temperature, with_entropy=True)
        torch.testing.assert_close(logprobs.exp(), tensor([0.25, 0.75]))
        torch.testing.assert_close(entropy, tensor([log(4) - 0.75 * log(3)] * 2))


def test_entropy_is_that_of_the_tempered_distribution(generator: torch.Generator) -> None:
    ids = torch.zeros(5, dtype=torch.long)
    _, uniform = logprobs_from_logits(torch.full((5, 7), 3.0), ids, 0.7, with_entropy=True)
    torch.testing.assert_close(uniform, torch.full((5,), log(7)))
    logits = 2 * torch.randn(5, 7, generator=generator)
    _, entropy = logprobs_from_logits(logits, ids, 0.7, with_entropy=True)
    expected = [categorical_entropy(categorical(row, 0.7)) for row in logits.tolist()]
    torch.testing.assert_close(entropy, tensor(expected))
    assert logprobs_from_logits(logits, ids, 0.7)[1] is None


def test_the_gradient_of_a_logprob_is_one_hot_minus_p_over_the_temperature() -> None:
    logits = tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    logprobs, _ = logprobs_from_logits(logits, tensor([1]), 0.7)
    logprobs.sum().backward()
    p = categorical([0.5, -1.0, 2.0], 0.7)
    torch.testing.assert_close(logits.grad, tensor([[-p[0], 1 - p[1], -p[2]]]) / 0.7)


def test_large_logits_do_not_overflow() -> None:
    logprobs, entropy = logprobs_from_logits(
        tensor([[1e4, 0.0], [1e4, 1e4]]), tensor([0, 1]), 0.1, with_entropy=True
    )
    torch.testing.assert_close(logprobs, tensor([0.0, -log(2)]))
    torch.testing.assert_close(entropy, tensor([0.0, log(2)]))


def test_a_lone_row_has_the_bits_it_has_among_others(generator: torch.Generator) -> None:
    # Wide enough that torch would split one row's sum over its threads; the chosen token outweighs the rest
    # together, so that its log-probability is near 0 and the last bit of the sum shows in it.
    logits = torch.randn(40, 49152, generator=generator) - 12
    ids = torch.randint(49152, (40,), generator=generator)
    logits[torch.arange(40), ids] = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together, _ = logprobs_from_logits(logits, ids, 1.0)
        alone = [logprobs_from_logits(logits[i : i + 1], ids[i : i + 1], 1.0)[0] for i in range(40)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), together)
