from collections.abc import Callable
from math import exp, log

import pytest
import torch
from torch import Tensor, tensor

from rlhf_core.kl import approx_kl
from rlhf_core.losses import bradley_terry_loss, ppo_policy_loss, value_loss
from tests import reference

NAN = float("nan")
B, T = 6, 5
MASK = torch.arange(T) < tensor([5, 3, 1, 4, 2, 5])[:, None]
COUNT = int(MASK.sum())


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def rows(generator: torch.Generator) -> list[Tensor]:
    """Three random tensors [B, T]: what is trained, what it was at sampling, what it is held against."""
    return [torch.randn(B, T, generator=generator) for _ in range(3)]


def gradient_of(loss: Tensor, parameter: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, parameter)
    return gradient


def test_an_unchanged_policy_has_ratio_1_and_loss_minus_the_mean_advantage(rows: list[Tensor]) -> None:
    logprobs, advantages, _ = rows
    loss, diagnostics = ppo_policy_loss(logprobs, logprobs, advantages, MASK, 0.2, COUNT)
    torch.testing.assert_close(loss, -advantages[MASK].mean())
    assert diagnostics == {"clipfrac": 0, "approxkl": 0, "ratio": COUNT, "count": COUNT}


def test_policy_loss_by_hand() -> None:
    # Ratios 1.5, 1.5, 0.5, 0.5, 1.5 with advantages 2, -2, 2, -2, 2, clipped at 0.8 and 1.2. The worse terms:
    # -2.4, 3, -1, 1.6, -2.4, in sum -1.2; it is the clipped one in the first, the fourth and the last.
    # approxkl: 3 * (0.5 - log 1.5) + 2 * (-0.5 - log 0.5) = 0.5 - 3 log 1.5 + 2 log 2.
    logprobs = torch.full((1, 5), -1.0)
    new_logprobs = logprobs + tensor([[1.5, 1.5, 0.5, 0.5, 1.5]]).log()
    advantages = tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    loss, diagnostics = ppo_policy_loss(new_logprobs, logprobs, advantages, logprobs < 0, 0.2, denom=4)
    torch.testing.assert_close(loss, tensor(-0.3))
    assert diagnostics["clipfrac"] == 3
    torch.testing.assert_close(diagnostics["ratio"], tensor(5.5))
    torch.testing.assert_close(diagnostics["approxkl"], tensor(0.5 - 3 * log(1.5) + 2 * log(2)))


def test_policy_loss_and_gradient_equal_the_reference(rows: list[Tensor]) -> None:
    new_logprobs, logprobs, advantages = rows
    new_logprobs.mul_(0.3).add_(logprobs).requires_grad_()

    def slow(new: list[list[float]]) -> float:
        return reference.ppo_policy_loss(
            new, logprobs.tolist(), advantages.tolist(), MASK.tolist(), 0.2, COUNT
        )

    loss, diagnostics = ppo_policy_loss(new_logprobs, logprobs, advantages, MASK, 0.2, COUNT)
    assert 0 < diagnostics["clipfrac"] < COUNT
    torch.testing.assert_close(
        diagnostics["approxkl"] / diagnostics["count"], approx_kl(new_logprobs, logprobs, MASK).detach()
    )
    torch.testing.assert_close(loss, tensor(slow(new_logprobs.tolist())), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gradient_of(loss, new_logprobs),
        tensor(reference.gradient(slow, new_logprobs.tolist())),
        rtol=1e-5,
        atol=1e-7,
    )


def test_descending_the_policy_loss_makes_good_tokens_likelier(rows: list[Tensor]) -> None:
    logprobs, advantages, _ = rows
    new_logprobs = logprobs.clone().requires_grad_()
    loss, _ = ppo_policy_loss(new_logprobs, logprobs, advantages, MASK, 0.2, COUNT)
    step = -gradient_of(loss, new_logprobs)
    assert torch.equal(step[MASK].sign(), advantages[MASK].sign())
    assert (step[~MASK] == 0).all()


def test_an_absurd_ratio_is_held_and_gives_no_gradient() -> None:
    # A negative advantage is not clipped from above: only the guard stands between 100 nats and an inf.
    new_logprobs = tensor([[100.0, 0.0]], requires_grad=True)
    loss, _ = ppo_policy_loss(
        new_logprobs, torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2).bool(), 0.2, 2
    )
    torch.testing.assert_close(loss, tensor((exp(20) + 1) / 2))
    assert gradient_of(loss, new_logprobs).tolist() == [[0, 0.5]]


def test_dual_clip_bounds_what_a_bad_token_that_became_likelier_can_cost() -> None:
    # Ratios 8, 2, 8 and 0.5; c = 3. A = -1: max(8, 1.2) = 8 is held at 3; max(2, 1.2) = 2 is below it.
    # A = +1: min(8, 1.2) = 1.2 is earned. A = -1 at 0.5: max(0.5, 0.8) = 0.8. (3 + 2 - 1.2 + 0.8) / 4.
    ratios = torch.tensor([[8.0, 2.0, 8.0, 0.5]])
    new_logprobs = ratios.log().requires_grad_()
    advantages = torch.tensor([[-1.0, -1.0, 1.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    loss, diagnostics = ppo_policy_loss(
        new_logprobs, torch.zeros(1, 4), advantages, mask, 0.2, 4, dual_clip=3.0
    )
    assert loss.item() == pytest.approx(4.6 / 4)
    assert diagnostics["dual_clipfrac"].item() == 1
    loss.backward()
    assert new_logprobs.grad is not None
    assert new_logprobs.grad[0].tolist() == pytest.approx([0, 2 / 4, 0, 0])  # d ratio / d logprob = ratio


def test_value_loss_by_hand() -> None:
    # Values move from 0 to 1, clipped to 0.2. Returns 2, 0, 0.5; errors of the plain values 1, 1, 0.25 and of
    # the clipped ones 3.24, 0.04, 0.09. The worse are 3.24, 1, 0.25, in sum 4.49; clipped is worse once.
    new_values, values, returns = torch.ones(1, 3), torch.zeros(1, 3), tensor([[2.0, 0.0, 0.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, diagnostics = value_loss(new_values, values, returns, mask, 0.2, denom=2)
    torch.testing.assert_close(loss, tensor(0.5 * 4.49 / 2))
    assert diagnostics == {"clipfrac": 1, "error": 2.25, "count": 3}
    loss, diagnostics = value_loss(new_values, values, returns, mask, None, denom=2)
    assert loss == 0.5 * 2.25 / 2
    assert diagnostics == {"clipfrac": 0, "error": 2.25, "count": 3}


@pytest.mark.parametrize("clip_range", [0.2, None])
def test_value_loss_and_gradient_equal_the_reference(clip_range: float | None, rows: list[Tensor]) -> None:
    new_values, values, returns = rows
    new_values.mul_(0.3).add_(values).requires_grad_()

    def slow(new: list[list[float]]) -> float:
        return reference.value_loss(new, values.tolist(), returns.tolist(), MASK.tolist(), clip_range, COUNT)

    loss, diagnostics = value_loss(new_values, values, returns, MASK, clip_range, COUNT)
    assert bool(0 < diagnostics["clipfrac"] < COUNT) is (clip_range is not None)
    torch.testing.assert_close(loss, tensor(slow(new_values.tolist())), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gradient_of(loss, new_values),
        tensor(reference.gradient(slow, new_values.tolist())),
        rtol=1e-5,
        atol=1e-7,
    )


def test_bradley_terry_by_hand() -> None:
    # Probabilities of the chosen one: 3/4, 1/4 and, in a tie, 1/2.
    chosen, rejected = tensor([3.0, 1.0, 1.0]).log(), tensor([1.0, 3.0, 1.0]).log()
    loss, diagnostics = bradley_terry_loss(chosen, rejected, denom=3)
    torch.testing.assert_close(loss, tensor(-log(0.75 * 0.25 * 0.5) / 3))
    assert diagnostics["accuracy"] == 1.5
    torch.testing.assert_close(diagnostics["margin"], tensor(0.0))
    assert diagnostics["count"] == 3


def test_bradley_terry_at_equal_scores_is_log_2_whatever_the_smoothing() -> None:
    scores = tensor([-3.0, 0.0, 5.0])
    for smoothing in (0.0, 0.1, 0.5):
        loss, _ = bradley_terry_loss(scores, scores, 3, label_smoothing=smoothing)
        torch.testing.assert_close(loss, tensor(log(2)))


def test_bradley_terry_stays_finite_for_a_hopeless_pair() -> None:
    # -log sigmoid(-x) tends to x, where the sigmoid itself is 0 in float32.
    assert bradley_terry_loss(tensor([0.0]), tensor([500.0]), 1)[0] == 500


def test_bradley_terry_and_gradient_equal_the_reference(generator: torch.Generator) -> None:
    scores = torch.randn(2, 7, generator=generator).requires_grad_()
    weights = torch.rand(7, generator=generator)
    denom = float(weights.sum())

    def slow(sides: list[list[float]]) -> float:
        return reference.bradley_terry_loss(sides[0], sides[1], denom, weights.tolist(), 0.1, 0.05)

    loss, _ = bradley_terry_loss(scores[0], scores[1], denom, weights, 0.1, 0.05)
    torch.testing.assert_close(loss, tensor(slow(scores.tolist())), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gradient_of(loss, scores), tensor(reference.gradient(slow, scores.tolist())), rtol=1e-5, atol=1e-7
    )


def policy_case(rows: slice, data: list[Tensor], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    new, old, advantages = data
    return ppo_policy_loss(new[rows], old[rows], advantages[rows], mask[rows], 0.2, COUNT)


def dual_case(rows: slice, data: list[Tensor], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    new, old, advantages = data
    return ppo_policy_loss(new[rows], old[rows], advantages[rows], mask[rows], 0.2, COUNT, dual_clip=1.5)


def value_case(rows: slice, data: list[Tensor], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    new, old, returns = data
    return value_loss(new[rows], old[rows], returns[rows], mask[rows], 0.2, COUNT)


def pair_case(rows: slice, data: list[Tensor], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    new, rejected, _ = data
    return bradley_terry_loss(new[rows, 0], rejected[rows, 0], B, None, 0.1, 0.05)


Case = Callable[[slice, list[Tensor], Tensor], tuple[Tensor, dict[str, Tensor]]]


@pytest.mark.parametrize("case", [policy_case, dual_case, value_case, pair_case])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_whole_minibatch(case: Case, size: int, rows: list[Tensor]) -> None:
    # Rows of 1 to 5 tokens: a mean of micro-batch means would weigh the tokens of short ones more.
    new = rows[0].requires_grad_()
    whole, diagnostics = case(slice(B), rows, MASK)
    parts = [case(slice(start, start + size), rows, MASK) for start in range(0, B, size)]
    loss = torch.stack([part for part, _ in parts]).sum()
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient_of(loss, new), gradient_of(whole, new), rtol=1e-6, atol=1e-6)
    for key, total in diagnostics.items():
        added = torch.stack([part[key] for _, part in parts]).sum()
        torch.testing.assert_close(added, total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [policy_case, dual_case, value_case])
def test_padding_changes_no_loss_and_no_gradient(case: Case, rows: list[Tensor]) -> None:
    new = rows[0].requires_grad_()
    junk = torch.full((B, 100), NAN)
    mask = torch.cat([MASK, torch.zeros(B, 100, dtype=torch.bool)], dim=1)
    plain, diagnostics = case(slice(B), rows, MASK)
    padded, padded_diagnostics = case(slice(B), [torch.cat([x, junk], dim=1) for x in rows], mask)
    torch.testing.assert_close(padded, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient_of(padded, new), gradient_of(plain, new), rtol=1e-6, atol=1e-6)
    for key, total in diagnostics.items():
        torch.testing.assert_close(padded_diagnostics[key], total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [policy_case, dual_case, value_case, pair_case])
def test_diagnostics_are_scalars_cut_from_the_graph(case: Case, rows: list[Tensor]) -> None:
    rows[0].requires_grad_()
    _, diagnostics = case(slice(B), rows, MASK)
    assert all(x.ndim == 0 and not x.requires_grad for x in diagnostics.values())
