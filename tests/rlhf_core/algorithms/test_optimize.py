"""The optimiser loop: cuts change no gradient, a bad step is not taken, each role keeps its own."""

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.optimize import MAX_SKIPPED, NonFiniteLoss, Optimizer, Pass, RoleOptimizer, optimize
from rlhf_core.batch import PreferenceBatch, RolloutBatch
from rlhf_core.losses import bradley_terry_loss
from rlhf_core.trunk import Lora, Trunk

Make = Callable[..., Trunk]
Loss = tuple[Tensor, dict[str, Tensor]]


def likelihood(trunk: Trunk, scale: float = 1.0) -> Pass[RolloutBatch]:
    """The policy imitates the responses."""

    def loss(part: RolloutBatch, denom: int) -> Loss:
        logprobs, _ = trunk.logprobs(part, 1.0)
        total = -logprobs.sum()
        return scale * total / denom, {"nll": total.detach(), "count": part.response_mask.sum()}

    return Pass("policy", loss)


def regression(trunk: Trunk, role: str = "value") -> Pass[RolloutBatch]:
    """Values come nearer to the returns."""

    def loss(part: RolloutBatch, denom: int) -> Loss:
        assert part.returns is not None
        error = (trunk.values(part) - part.returns).square()[part.response_mask].sum()
        return error / denom, {"error": error.detach(), "count": part.response_mask.sum()}

    return Pass(role, loss)


def preference(trunk: Trunk) -> Pass[PreferenceBatch]:
    """Scores order the pairs."""

    def loss(part: PreferenceBatch, denom: int) -> Loss:
        scores = trunk.scores(part.completions)
        return bradley_terry_loss(scores[part.chosen], scores[part.rejected], denom)

    return Pass("value", loss)


def optimizers(trunk: Trunk, *roles: str, **settings: object) -> dict[str, RoleOptimizer]:
    found = Optimizer.model_validate({"learning_rate": 1e-2, **settings})
    return {role: RoleOptimizer(trunk, role, found, total_steps=100) for role in roles}


def walk(
    trunk: Trunk, batch: Any, passes: Any, steps: Any, *, num_epochs: int = 1, size: int = 4, seed: int = 0
) -> Generator[dict[str, float], None, None]:
    return optimize(trunk, batch, passes, steps, num_epochs=num_epochs, minibatch_size=size, seed=seed)


def weights(trunk: Trunk, *roles: str) -> dict[str, Tensor]:
    """A copy of the named roles' parameters."""
    return {f"{r} {n}": p.detach().clone() for r in roles for n, p in trunk.parameters(r).items()}


def everything_but(trunk: Trunk, role: str) -> dict[str, Tensor]:
    """A copy of every tensor of the base, and of the other roles and their heads."""
    base = {name: t.clone() for name, t in trunk.model.state_dict().items() if ".lora_" not in name}
    heads = {
        f"{r} normaliser {n}": t.clone()
        for r, head in trunk.heads.items()
        for n, t in head.named_buffers()
        if r != role
    }
    return {**base, **heads, **weights(trunk, *(other for other in trunk.roles if other != role))}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# How a batch is cut


@pytest.mark.parametrize("kind", ["rollouts", "pairs"])
def test_micro_batches_change_neither_gradient_nor_step_nor_diagnostics(
    make: Make, rollouts: RolloutBatch, pairs: PreferenceBatch, kind: str
) -> None:
    batch = {"rollouts": rollouts, "pairs": pairs}[kind]
    found = []
    for tokens in (64, 10_000):
        trunk = make(micro_batch_tokens=tokens)
        one = regression(trunk) if kind == "rollouts" else preference(trunk)
        assert (len(list(batch.parts(64, tokens))) >= len(batch)) == (tokens == 64)
        steps_taken = walk(
            trunk, batch, [one], optimizers(trunk, "value"), num_epochs=2, size=len(batch) // 2
        )
        gradients, means = [], []
        for yielded in steps_taken:
            gradients.append({name: p.grad.clone() for name, p in trunk.parameters("value").items()})
            means.append(dict(yielded))
        found.append((gradients, means, weights(trunk, "value")))
    (small, small_means, stepped_small), (large, large_means, stepped_large) = found
    assert len(small) == 4
    assert any(g.abs().max() > 1e-3 for g in small[0].values())
    torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stepped_small, stepped_large, rtol=0, atol=1e-6)
    torch.testing.assert_close(small_means, large_means, rtol=1e-5, atol=1e-6)


def test_losses_add_up_over_parts_means_are_over_tokens_and_maxima_stay_maxima(
    make: Make, rollouts: RolloutBatch
) -> None:
    trunk = make(micro_batch_tokens=64)  # a row a part

    def loss(part: RolloutBatch, denom: int) -> Loss:
        tokens = part.response_mask.sum()
        assert denom == 127  # 15 + 44 + 5 + 2 + 30 + 10 + 1 + 20
        rows = {"long": tokens * (tokens > 20), "max_row": part.group_ids.max(), "count": tokens}
        return 0 * trunk.values(part).sum() + tokens / denom, rows

    steps_taken = walk(trunk, rollouts, [Pass("value", loss)], optimizers(trunk, "value"), size=8)
    found = next(steps_taken)
    steps_taken.close()
    assert found["value/loss"] == pytest.approx(1.0)  # not 8: parts are divided by the minibatch's tokens
    assert found["value/long"] == pytest.approx(74 / 127)  # 44 + 30, a mean over tokens, not over parts
    assert found["value/max_row"] == 7


def rows_drawn(trunk: Trunk, batch: RolloutBatch, size: int, seed: int) -> list[list[int]]:
    """The row numbers of each minibatch of two epochs."""
    drawn: list[list[int]] = [[]]

    def loss(part: RolloutBatch, denom: int) -> Loss:
        drawn[-1].extend(part.group_ids.tolist())
        return 0 * trunk.values(part).sum(), {"count": part.response_mask.sum()}

    passes, steps = [Pass("value", loss)], optimizers(trunk, "value")
    for _ in walk(trunk, batch, passes, steps, num_epochs=2, size=size, seed=seed):
        drawn.append([])
    return [sorted(rows) for rows in drawn if rows]


def test_every_epoch_takes_every_row_once_in_a_new_order(make: Make, rollouts: RolloutBatch) -> None:
    trunk = make()
    drawn = rows_drawn(trunk, rollouts, 2, seed=0)
    first, second = drawn[:4], drawn[4:]
    for epoch in (first, second):
        assert sorted(row for rows in epoch for row in rows) == list(range(8))
    assert first != second
    assert rows_drawn(trunk, rollouts, 2, seed=0) == drawn
    assert rows_drawn(trunk, rollouts, 2, seed=1) != drawn
    first, second, *_ = rows_drawn(trunk, rollouts, 3, seed=0)
    assert len({*first, *second}) == 6  # the two rows that fill no minibatch wait


def test_too_few_rows_for_a_minibatch_are_refused(make: Make, rollouts: RolloutBatch) -> None:
    trunk = make()
    with pytest.raises(ValueError, match="8 rows do not fill a minibatch of 9: no step"):
        next(walk(trunk, rollouts, [regression(trunk)], optimizers(trunk, "value"), size=9))


# A role keeps its own


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_only_the_trained_role_moves(make: Make, rollouts: RolloutBatch) -> None:
    trunk = make()
    before, own = everything_but(trunk, "value"), weights(trunk, "value")
    list(walk(trunk, rollouts, [regression(trunk)], optimizers(trunk, "value")))
    assert same(everything_but(trunk, "value"), before)
    assert not any(torch.equal(p, own[name]) for name, p in weights(trunk, "value").items())


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_huge_gradient_of_one_role_does_not_scale_anothers_step(make: Make, rollouts: RolloutBatch) -> None:
    found = []
    for roles in (["value"], ["policy", "value"]):
        trunk = make()
        passes = [likelihood(trunk, scale=1e6), regression(trunk)][-len(roles) :]
        list(walk(trunk, rollouts, passes, optimizers(trunk, *roles), num_epochs=2))
        found.append(weights(trunk, "value"))
    assert same(*found)


# Steps


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_learning_rate_of_zero_changes_no_bit(make: Make, rollouts: RolloutBatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        trunk = make(dtype=dtype)
        before = weights(trunk, "policy", "value")
        steps = optimizers(trunk, "policy", "value", learning_rate=0.0, weight_decay=0.1)
        passes = [likelihood(trunk), regression(trunk)]
        found = list(walk(trunk, rollouts, passes, steps, num_epochs=2))
        assert all(f["policy/grad_norm"] > 0 and f["value/grad_norm"] > 0 for f in found)
        assert same(weights(trunk, "policy", "value"), before)


def test_gradients_are_clipped_before_every_step(make: Make, rollouts: RolloutBatch) -> None:
    trunk = make()
    steps = optimizers(trunk, "policy", max_grad_norm=0.5)
    steps_taken = walk(trunk, rollouts, [likelihood(trunk, 1e6)], steps, num_epochs=2)
    raw, clipped = [next(steps_taken)], []
    for _ in range(4):
        raw.append(next(steps_taken, raw[0]))  # takes the step before
        clipped.append(
            sum(m.grad.square().sum() for m in steps["policy"].masters if m.grad is not None) ** 0.5
        )
    assert clipped == pytest.approx([0.5] * 4, rel=1e-4)
    assert all(found["policy/grad_norm"] > 1e3 for found in raw)  # reported as it was


def test_a_step_with_gradients_that_are_not_finite_is_skipped_and_counted_for_its_role_alone(
    make: Make, rollouts: RolloutBatch
) -> None:
    trunk = make()
    steps = optimizers(trunk, "policy", "value")
    policy, value = weights(trunk, "policy"), weights(trunk, "value")
    passes = [likelihood(trunk, float("nan")), regression(trunk)]
    found = list(walk(trunk, rollouts, passes, steps))
    assert [(f["policy/skipped"], f["value/skipped"]) for f in found] == [(1.0, 0.0)] * 2
    assert (steps["policy"].skipped, steps["value"].skipped) == (2, 0)
    assert same(weights(trunk, "policy"), policy)
    assert not same(weights(trunk, "value"), value)


def test_too_many_skipped_steps_end_the_stage_with_the_weights_as_they_were(
    make: Make, rollouts: RolloutBatch
) -> None:
    trunk = make()
    before = weights(trunk, "policy")
    steps = optimizers(trunk, "policy")
    steps_taken = walk(trunk, rollouts, [likelihood(trunk, torch.inf)], steps, num_epochs=9, size=8)
    for _ in range(MAX_SKIPPED + 1):
        next(steps_taken)
    with pytest.raises(NonFiniteLoss, match=f"{MAX_SKIPPED + 1} optimiser steps"):
        next(steps_taken)
    assert same(weights(trunk, "policy"), before)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [0.4, 0.4, 0.4, 0.4]),
        ({"schedule": "linear"}, [0.4, 0.3, 0.2, 0.1]),  # of 4 steps, 4, 3, 2 and 1 are left
        ({"schedule": "cosine"}, [0.4, 0.34142136, 0.2, 0.05857864]),  # 0.2 (1 + cos(k pi / 4))
        ({"warmup_steps": 3}, [0.1, 0.2, 0.3, 0.4]),  # quarters, full at the fourth
        ({"schedule": "linear", "warmup_steps": 1}, [0.2, 0.3, 0.2, 0.1]),  # the first is halved
    ],
)
def test_rates_rise_and_fall_as_told(
    make_trunk: Make, settings: dict[str, object], rates: list[float]
) -> None:
    trunk = make_trunk()
    trunk.add_role("policy", Lora(rank=4), seed=0)
    told = Optimizer.model_validate({"learning_rate": 0.4, **settings})
    optimizer = RoleOptimizer(trunk, "policy", told, total_steps=4)
    assert [optimizer.step()["lr"] for _ in range(4)] == pytest.approx(rates)


def test_adam_has_the_eps_of_ppo_and_no_weight_decay(make: Make) -> None:
    (group,) = RoleOptimizer(make(), "value", Optimizer(), 1).adam.param_groups
    assert (group["eps"], group["weight_decay"]) == (1e-5, 0.0)


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_masters_add_up_steps_too_small_for_bf16(make: Make) -> None:
    trunk = make(dtype=torch.bfloat16)
    policy = list(trunk.parameters("policy").values())
    for parameter in policy:
        parameter.data.fill_(0.1)
    start = policy[0].flatten()[0].item()
    optimizer = RoleOptimizer(trunk, "policy", Optimizer(learning_rate=1e-5), 1)

    def step() -> None:
        for parameter in policy:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    # 1e-5 is a fiftieth of the distance 2^-11 between two bf16 numbers near 0.1.
    assert all((p == start).all() for p in policy)
    for _ in range(99):
        step()
    # Adam moves by the rate a step under a constant gradient: 1e-3 in all, which is 2.05 distances.
    assert all((p == start - 2 * 2**-11).all() for p in policy)


def test_what_is_yielded_is_not_stepped_on_when_the_consumer_stops(
    make: Make, rollouts: RolloutBatch
) -> None:
    trunk = make()
    steps = optimizers(trunk, "policy", "value")
    passes = [likelihood(trunk), regression(trunk)]
    steps_taken = walk(trunk, rollouts, passes, steps, num_epochs=2)
    first = next(steps_taken)
    assert "policy/lr" not in first
    next(steps_taken)
    assert first["policy/lr"] == 1e-2  # told once the step was taken
    after_one = weights(trunk, "policy", "value")
    steps_taken.close()
    assert same(weights(trunk, "policy", "value"), after_one)
    assert (steps["policy"].steps, steps["value"].steps) == (1, 1)
    assert all(p.grad is None for r in trunk.roles for p in trunk.parameters(r).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_to_the_same_bits(make: Make, rollouts: RolloutBatch, dtype: torch.dtype) -> None:
    def take(trunk: Trunk, steps: dict[str, RoleOptimizer], seed: int) -> None:
        passes = [likelihood(trunk), regression(trunk)]
        list(walk(trunk, rollouts, passes, steps, seed=seed))

    how = {"schedule": "cosine", "warmup_steps": 3}
    straight = make(dtype)
    steps = optimizers(straight, "policy", "value", **how)
    for seed in (0, 1):
        take(straight, steps, seed)

    first = make(dtype)
    steps = optimizers(first, "policy", "value", **how)
    take(first, steps, 0)
    kept = {role: {n: t.clone() for n, t in step.state().items()} for role, step in steps.items()}

    resumed = make(dtype)
    steps = optimizers(resumed, "policy", "value", **how)
    for role, step in steps.items():
        step.load_state(kept[role])
        assert all(
            torch.equal(a, b) for a, b in zip(step.parameters, first.parameters(role).values(), strict=True)
        )
    take(resumed, steps, 1)
    for role in ("policy", "value"):
        for name, weight in straight.parameters(role).items():
            assert torch.equal(weight, resumed.parameters(role)[name])


def test_a_state_of_another_role_is_refused(make: Make, rollouts: RolloutBatch) -> None:
    trunk = make()
    steps = optimizers(trunk, "policy", "value")
    with pytest.raises(ValueError, match=r"has head\.bias\.master, .* which the role has not"):
        steps["policy"].load_state(steps["value"].state())


def test_a_pass_of_its_own_rows_adds_its_gradient_and_its_role_steps_once(
    make: Make, rollouts: RolloutBatch
) -> None:
    """Two passes on one role are one loss: their sum."""
    other = rollouts.select(torch.arange(4))

    def together(trunk: Trunk) -> Pass[RolloutBatch]:
        one = likelihood(trunk).loss

        def loss(part: RolloutBatch, denom: int) -> Loss:
            first, diagnostics = one(part, denom)
            second, _ = one(other, other.weight)
            return first + 0.5 * second, diagnostics

        return Pass("policy", loss)

    apart, whole = make(micro_batch_tokens=100_000, bucket=256), make(micro_batch_tokens=100_000, bucket=256)
    asked: list[int] = []

    def batch(number: int) -> RolloutBatch:
        asked.append(number)
        return other

    mixed = Pass("policy", likelihood(apart).loss, coef=0.5, name="mix", batch=batch)
    found = list(walk(apart, rollouts, [likelihood(apart), mixed], optimizers(apart, "policy"), num_epochs=2))
    list(walk(whole, rollouts, [together(whole)], optimizers(whole, "policy"), num_epochs=2))
    assert asked == [0, 1, 2, 3]
    assert {"policy/nll", "mix/nll", "policy/lr"} <= set(found[0]) and "mix/lr" not in found[0]
    for name, weight in apart.parameters("policy").items():
        torch.testing.assert_close(weight, whole.parameters("policy")[name], rtol=1e-4, atol=1e-6)
