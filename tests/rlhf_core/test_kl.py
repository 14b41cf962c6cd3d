from math import exp, log

import pytest
import torch
from torch import Tensor, tensor

from rlhf_core.advantages import token_rewards
from rlhf_core.kl import KLEstimator, approx_kl, kl_per_token, sequence_kl
from rlhf_core.losses import ppo_policy_loss
from rlhf_core.tensors import logprobs_from_logits, masked_whiten
from tests.reference import categorical, categorical_kl, gradient

NAN, INF = float("nan"), float("inf")
POLICY, REFERENCE = [0.3, -0.8, 1.2, 0.0], [0.0, 0.1, -0.2, 0.4]
NUM_SAMPLES = 10_000


def logprobs_of(logits: list[float] | Tensor, ids: Tensor) -> Tensor:
    """Gives the log-probabilities [1, N] of N sampled tokens, each from the same categorical."""
    return logprobs_from_logits(torch.as_tensor(logits).expand(len(ids), -1), ids, 1.0)[0][None]


@pytest.fixture
def ids() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.multinomial(tensor(categorical(POLICY)), NUM_SAMPLES, replacement=True, generator=generator)


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K3])
def test_the_mean_over_policy_samples_is_the_exact_kl(estimator: KLEstimator, ids: Tensor) -> None:
    mask = torch.ones(1, NUM_SAMPLES, dtype=torch.bool)
    kl = kl_per_token(logprobs_of(POLICY, ids), logprobs_of(REFERENCE, ids), mask, estimator)
    exact = categorical_kl(categorical(POLICY), categorical(REFERENCE))
    assert exact > 0.2
    assert abs(kl.mean() - exact) < 3 * kl.std() / NUM_SAMPLES**0.5


@pytest.mark.parametrize("estimator", [KLEstimator.K1, KLEstimator.K3])
def test_the_expectation_under_the_policy_is_the_exact_kl(estimator: KLEstimator) -> None:
    # Every token once, weighed by its probability: no sampling error is left.
    tokens, p = torch.arange(4), tensor(categorical(POLICY))
    mask = torch.ones(1, 4, dtype=torch.bool)
    kl = kl_per_token(logprobs_of(POLICY, tokens), logprobs_of(REFERENCE, tokens), mask, estimator)
    exact = categorical_kl(categorical(POLICY), categorical(REFERENCE))
    torch.testing.assert_close((p * kl[0]).sum(), tensor(exact), rtol=1e-5, atol=0)


def test_k2_is_the_exact_second_moment_and_near_the_kl_where_the_policies_are_near(ids: Tensor) -> None:
    mask = torch.ones(1, NUM_SAMPLES, dtype=torch.bool)
    p, q = categorical(POLICY), categorical(REFERENCE)
    k2 = kl_per_token(logprobs_of(POLICY, ids), logprobs_of(REFERENCE, ids), mask, KLEstimator.K2)
    moment = sum(x * log(x / y) ** 2 / 2 for x, y in zip(p, q, strict=True))
    assert abs(k2.mean() - moment) < 3 * k2.std() / NUM_SAMPLES**0.5
    assert abs(moment - categorical_kl(p, q)) > 0.04  # far apart it is biased
    # At a distance d from the reference the KL is of order d^2 and the bias of order d^3: a tenth of the
    # distance leaves a hundredth of the KL, and a thousandth of the bias.
    tokens, biases = torch.arange(4), []
    for distance in (0.2, 0.02):
        near = [r + distance * (a - r) for a, r in zip(POLICY, REFERENCE, strict=True)]
        weights = tensor(categorical(near))
        found = kl_per_token(
            logprobs_of(near, tokens), logprobs_of(REFERENCE, tokens), mask[:, :4], KLEstimator.K2
        )
        biases.append(float((weights * found[0]).sum()) - categorical_kl(categorical(near), q))
    assert abs(biases[1]) < abs(biases[0]) / 500


def test_estimators_by_hand() -> None:
    # log_ratio = 2: k1 = 2, k2 = 2, k3 = e^-2 - 1 + 2.  log_ratio = -1: k1 = -1, k2 = 1/2, k3 = e - 1 - 1.
    logprobs, ref_logprobs = tensor([[-1.0, -3.0, NAN]]), tensor([[-3.0, -2.0, -1.0]])
    mask = tensor([[True, True, False]])
    expected = {"k1": [2.0, -1, 0], "k2": [2, 0.5, 0], "k3": [exp(-2) + 1, exp(1) - 2, 0]}
    for estimator in KLEstimator:
        kl = kl_per_token(logprobs, ref_logprobs, mask, estimator)
        torch.testing.assert_close(kl, tensor([expected[estimator.value]]))


def test_k3_is_never_negative_and_keeps_its_digits_near_zero() -> None:
    log_ratio = torch.linspace(-10, 10, 2001)[None]
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    zero = torch.zeros_like(log_ratio)
    assert (kl_per_token(log_ratio, zero, mask, KLEstimator.K3) >= 0).all()
    # k3 = x^2 / 2 - x^3 / 6 + ..., so x^2 / 2 to a relative x / 3 = 3e-4; exp(-x) - 1 + x has no digits left.
    small = kl_per_token(tensor([[1e-3]]), tensor([[0.0]]), tensor([[True]]), KLEstimator.K3)
    torch.testing.assert_close(small, tensor([[5e-7]]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_masked_tokens_give_neither_kl_nor_gradient(estimator: KLEstimator) -> None:
    logprobs = tensor([[-1.0, -INF, NAN]], requires_grad=True)
    kl = kl_per_token(logprobs, tensor([[-2.0, -1.0, -1.0]]), tensor([[True, False, False]]), estimator)
    kl.sum().backward()
    assert kl[0, 1:].tolist() == [0, 0]
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 1:].tolist() == [0, 0]


def test_approx_kl_on_old_samples_is_the_exact_kl_from_old_to_new() -> None:
    # Ten samples in exactly the old policy's proportions, so that their mean is its expectation.
    old, new = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    ids = tensor([0] * 5 + [1] * 3 + [2] * 2)
    computed = approx_kl(tensor(new).log()[ids][None], tensor(old).log()[ids][None], torch.ones(1, 10).bool())
    torch.testing.assert_close(computed, tensor(categorical_kl(old, new)), rtol=1e-5, atol=0)


def test_approx_kl_is_zero_before_the_first_step_and_ignores_padding() -> None:
    logprobs = tensor([[-1.0, -2.0, -3.0]])
    mask = tensor([[True, True, False]])
    assert approx_kl(logprobs, logprobs, mask) == 0
    # Ratios 2 and 1/2: (2 - 1 - log 2 + 1/2 - 1 + log 2) / 2 = 1/4.
    new = logprobs + tensor([[2.0, 0.5, 7.0]]).log()
    torch.testing.assert_close(approx_kl(new, logprobs, mask), tensor(0.25))


def test_sequence_kl_sums_each_completion() -> None:
    kl = tensor([[0.1, 0.2, 0.3], [0.4, NAN, NAN]])
    mask = tensor([[True, True, True], [True, False, False]])
    torch.testing.assert_close(sequence_kl(kl, mask), tensor([0.6, 0.4]))


def test_following_the_kl_penalty_alone_lowers_the_exact_kl(ids: Tensor) -> None:
    # One-token completions with score 0, so that -kl_coef * k1 is all there is to gain; the signs of the
    # estimate, the reward and the loss have to agree for the policy to move towards the reference.
    logits = tensor(POLICY, requires_grad=True)
    logprobs = logprobs_of(POLICY, ids).T
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    kl = kl_per_token(logprobs, logprobs_of(REFERENCE, ids).T, mask, KLEstimator.K1)
    rewards = token_rewards(torch.zeros_like(kl), kl, mask, kl_coef=0.1)
    loss, _ = ppo_policy_loss(
        logprobs_of(logits, ids).T, logprobs, masked_whiten(rewards, mask), mask, 0.2, NUM_SAMPLES
    )
    loss.backward()
    assert logits.grad is not None
    moved = (logits - 0.1 * logits.grad).tolist()
    reference = categorical(REFERENCE)
    assert categorical_kl(categorical(moved), reference) < categorical_kl(categorical(POLICY), reference)


def loss_gradient(estimator: KLEstimator) -> Tensor:
    """The expected gradient of an estimate as a loss: every token, weighed by the policy that sampled it."""
    logits = tensor(POLICY, requires_grad=True)
    tokens, weights = torch.arange(4), tensor(categorical(POLICY))
    kl = kl_per_token(
        logprobs_of(logits, tokens), logprobs_of(REFERENCE, tokens), torch.ones(1, 4).bool(), estimator
    )
    (weights * kl[0]).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_as_a_loss_k2_alone_has_the_gradient_of_the_kl() -> None:
    q = categorical(REFERENCE)
    exact = tensor(gradient(lambda x: categorical_kl(categorical(x[0]), q), [POLICY])[0])
    reverse = tensor(gradient(lambda x: categorical_kl(q, categorical(x[0])), [POLICY])[0])
    assert exact.abs().max() > 0.1 and (exact - reverse).abs().max() > 0.05
    torch.testing.assert_close(loss_gradient(KLEstimator.K2), exact, rtol=1e-5, atol=1e-6)
    # The gradient of a log-probability is zero on average, and k1 has no other: it pulls nowhere.
    torch.testing.assert_close(loss_gradient(KLEstimator.K1), torch.zeros(4), rtol=0, atol=1e-6)
    # k3's gradient is E_p[(1 - q/p) grad log p] = -E_q[grad log p]: of KL(reference || policy), reversed.
    torch.testing.assert_close(loss_gradient(KLEstimator.K3), reverse, rtol=1e-5, atol=1e-6)
