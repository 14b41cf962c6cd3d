"""The gradient of a whole PPO step: exact on a toy, REINFORCE's at ratio 1, blind to the cut."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.optimize import Optimizer, RoleOptimizer, optimize
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.batch import RolloutBatch
from rlhf_core.generation import Sampling
from rlhf_core.records import Prompt
from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.tensors import zero_masked
from rlhf_core.trunk import Trunk
from tests.reference import gae_by_definition, gradient
from tests.rlhf_core.algorithms.toy import (
    COMPLETIONS,
    PREFIXES,
    EveryCompletion,
    ToyTrunk,
    objective,
    quarters,
    values_by_definition,
)  # fmt: skip

Make = Callable[..., Trunk]
MakeData = Callable[..., PolicyData]
KL_COEF = 0.3


def score(completion: Sequence[int]) -> float:
    """A number for each completion, of either sign and without a pattern."""
    return ((7 * completion[0] + 3 * completion[-1] + 5 * len(completion)) % 11 - 4) / 2


def toy_step(
    lam: float, temperature: float, values: Tensor, **changed: object
) -> tuple[ToyTrunk, RolloutBatch, Tensor]:
    """A step of PPO on the toy: its trunk, its batch, and the gradient of its policy loss."""
    trunk = ToyTrunk(quarters(1, temperature), quarters(2, temperature), values)
    settings = PPO.model_validate(
        {
            "rollouts_per_step": 64, "completions_per_prompt": 64, "kl_coef": KL_COEF, "lam": lam, **changed,
        }
    )  # fmt: skip
    algorithm = PPOAlgorithm(settings, Sampling(max_new_tokens=3, temperature=temperature))
    data = PolicyData(
        prompts=[Prompt(id="p", text="?")],
        reward=PerCompletion(lambda item: score(item.response_ids)),
        generator=EveryCompletion(temperature),
        seed=0,
        from_reference=False,
    )
    batch = algorithm.experience(0, cast(Any, trunk), data, {}).batch
    with trunk.role("policy"):
        loss, _ = algorithm._policy_loss(cast(Any, trunk), batch, batch.weight)
    loss.backward()
    found = trunk.tables["policy"].grad
    assert found is not None
    return trunk, batch, found


def deviation(batch: RolloutBatch, lam: float) -> float:
    """The deviation of the raw advantages, which whitening divides by."""
    assert batch.rewards is not None and batch.values is not None
    mask = batch.response_mask
    raw, _ = gae_by_definition(batch.rewards.tolist(), batch.values.tolist(), mask.tolist(), 1.0, lam)
    return float(torch.tensor(raw)[mask].std(correction=0))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("lam", "critic"), [(1.0, "any"), (0.95, "exact"), (0.0, "exact")])
def test_the_gradient_of_a_step_is_that_of_the_exact_objective(
    lam: float, critic: str, temperature: float
) -> None:
    # With lam 1 the values are a baseline, and any will do; below 1 they stand for what is still to come.
    tables = [quarters(seed, temperature).tolist() for seed in (1, 2)]
    exact = values_by_definition(tables[0], tables[1], score, KL_COEF, temperature)
    values = torch.tensor(exact) if critic == "exact" else 0.7 * torch.arange(7.0) - 2
    _, batch, found = toy_step(lam, temperature, values)

    def slow(table: list[list[float]]) -> float:
        return objective(table, tables[1], score, KL_COEF, temperature)

    wanted = torch.tensor(gradient(slow, tables[0]))
    assert wanted.abs().max() > 0.1
    # The loss is a mean over tokens of advantages over their deviation; the shift of the mean costs nothing,
    # since the gradient of a log-probability is zero on average.
    per_completion = -found * batch.weight / len(batch) * deviation(batch, lam)
    torch.testing.assert_close(per_completion, wanted, rtol=1e-4, atol=1e-5)


def test_the_toy_would_see_a_wrong_critic_and_a_wrong_sign() -> None:
    tables = [quarters(seed, 1.0).tolist() for seed in (1, 2)]
    wanted = torch.tensor(gradient(lambda t: objective(t, tables[1], score, KL_COEF, 1.0), tables[0]))
    for kl_coef, lam in ((KL_COEF, 0.0), (0.0, 1.0)):  # a critic that is off below lam 1; no KL in the reward
        _, batch, found = toy_step(lam, 1.0, 0.7 * torch.arange(7.0) - 2, kl_coef=kl_coef)
        step = -found * batch.weight / len(batch) * deviation(batch, lam)
        assert (step - wanted).abs().max() > 0.05


def test_the_toys_own_definitions_agree() -> None:
    # What is expected before the first token is the objective itself.
    tables = [quarters(seed, 1.0).tolist() for seed in (1, 2)]
    values = values_by_definition(tables[0], tables[1], score, KL_COEF, 1.0)
    assert values[0] == pytest.approx(objective(tables[0], tables[1], score, KL_COEF, 1.0))
    assert (len(PREFIXES), len(COMPLETIONS)) == (7, 15)


# On the tiny trunk


def experience(trunk: Trunk, data: PolicyData, **changed: object) -> tuple[PPOAlgorithm, RolloutBatch]:
    settings = PPO.model_validate({"rollouts_per_step": 10, "num_minibatches": 1, "kl_coef": 0.5, **changed})
    algorithm = PPOAlgorithm(settings, Sampling(max_new_tokens=10, temperature=0.7))
    return algorithm, algorithm.experience(0, trunk, data, {}).batch


def gradients(trunk: Trunk, role: str, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The gradient that a loss gives to each parameter of a role."""
    with trunk.role(role):
        loss().backward()
    found = {name: p.grad for name, p in trunk.parameters(role).items() if p.grad is not None}
    for p in trunk.parameters(role).values():
        p.grad = None
    return found


def test_at_ratio_1_the_gradient_is_that_of_reinforce_with_a_baseline(
    make_roles: Make, make_data: MakeData
) -> None:
    trunk = make_roles(policy_moved=True)
    algorithm, batch = experience(trunk, make_data(from_reference=False), gamma=0.9, lam=1.0)
    ppo = gradients(trunk, "policy", lambda: algorithm._policy_loss(trunk, batch, batch.weight)[0])
    # REINFORCE (Williams, 1992): every token's log-probability times what came after it, less a baseline.
    assert batch.rewards is not None and batch.values is not None
    mask = batch.response_mask
    earned = torch.zeros(mask.shape)
    for row, length in enumerate(batch.response_lengths.tolist()):
        for t in range(length):
            earned[row, t] = sum(0.9 ** (k - t) * float(batch.rewards[row, k]) for k in range(t, length))
    better = (earned - batch.values)[mask]
    scale, baseline = better.std(correction=0), better.mean()

    def reinforce() -> Tensor:
        logprobs, _ = trunk.logprobs(batch, 0.7)
        advantage = zero_masked(earned - batch.values - baseline, mask)  # type: ignore[operator]
        return -(advantage * logprobs).sum() / scale / int(mask.sum())

    wanted = gradients(trunk, "policy", reinforce)
    assert max(float(g.abs().max()) for g in wanted.values()) > 1e-3
    torch.testing.assert_close(ppo, wanted, rtol=1e-4, atol=1e-6)


def padded(batch: RolloutBatch, more: int) -> RolloutBatch:
    """The batch with more columns after every prompt and every response: junk ids, and zeros as elsewhere."""
    junk = {"query_ids": 9, "response_ids": 9}
    columns = {
        name: torch.nn.functional.pad(tensor, (0, more), value=junk.get(name, 0))
        for name, tensor in vars(batch).items()
        if isinstance(tensor, Tensor) and tensor.dim() == 2
    }
    return RolloutBatch(**{**vars(batch), **columns})


Change = Callable[[Trunk, RolloutBatch], RolloutBatch]


def in_single_rows(trunk: Trunk, batch: RolloutBatch) -> RolloutBatch:
    trunk.micro_batch_tokens = 1
    assert len(list(batch.parts(trunk.bucket, 1))) == len(batch)
    return batch


def in_pairs(trunk: Trunk, batch: RolloutBatch) -> RolloutBatch:
    trunk.micro_batch_tokens = 2 * trunk.bucket
    return batch


def by_100_tokens(trunk: Trunk, batch: RolloutBatch) -> RolloutBatch:
    return padded(batch, 100)


def backwards(trunk: Trunk, batch: RolloutBatch) -> RolloutBatch:
    return batch.select(torch.arange(len(batch)).flip(0))


@pytest.mark.parametrize("change", [in_single_rows, in_pairs, by_100_tokens, backwards])
def test_losses_diagnostics_and_the_whole_gradient_do_not_depend_on_the_cut_the_padding_or_the_order(
    make_roles: Make, make_data: MakeData, change: Change
) -> None:
    def minibatch(change: Change) -> tuple[dict[str, float], dict[str, Tensor]]:
        """All that a first minibatch of the whole batch says, and the gradients of both roles."""
        trunk = make_roles(policy_moved=True, bucket=32)
        algorithm, batch = experience(trunk, make_data(from_reference=False))
        # Away from where the batch was sampled: ratios and clips of all sizes.
        for role, size in (("policy", 0.02), ("value", 0.1)):
            for p in trunk.parameters(role).values():
                p.data += size * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        optimizers = {role: RoleOptimizer(trunk, role, Optimizer(), 1) for role in ("policy", "value")}
        passes = algorithm.passes(0, trunk)
        walk = optimize(
            trunk, change(trunk, batch), passes, optimizers, num_epochs=1, minibatch_size=10, seed=0
        )
        found = dict(next(walk))
        grads = {
            f"{role} {name}": p.grad.clone()
            for role in optimizers
            for name, p in trunk.parameters(role).items()
            if p.grad is not None
        }
        walk.close()
        return found, grads

    plain, plain_gradient = minibatch(lambda trunk, batch: batch)
    found, found_gradient = minibatch(change)
    assert 0.05 < plain["policy/clipfrac"] < 0.95 and plain["value/clipfrac"] > 0
    assert abs(plain["policy/loss"]) > 0.01 and plain["policy/approxkl"] > 0.01
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert max(float(g.abs().max()) for g in plain_gradient.values()) > 1e-2
    torch.testing.assert_close(found_gradient, plain_gradient, rtol=1e-4, atol=1e-6)
