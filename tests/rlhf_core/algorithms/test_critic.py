"""Where the critic starts, and that the policy keeps every bit while it warms up."""

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.critic import CriticKnobs
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.generation import Sampling
from rlhf_core.metrics import Spool, read_lines
from rlhf_core.trunk import Lora, Trunk

Make = Callable[..., Trunk]
SETTINGS = {"num_steps": 4, "rollouts_per_step": 10, "num_epochs": 1, "learning_rate": 1e-2}


@pytest.fixture
def roles(make_trunk: Make, stir: Callable[..., None]) -> Trunk:
    """A policy and a reward of unlike adapters, both trained."""
    trunk = make_trunk()
    trunk.add_role("policy", Lora(rank=2, alpha=4.0), seed=1)
    trunk.add_role("reward", Lora(rank=4, alpha=8.0), seed=2, head="mean")
    for role in trunk.roles:
        stir(trunk, role, 3)
    return trunk


def adapter(trunk: Trunk, role: str) -> dict[str, torch.Tensor]:
    return {n: w.detach().clone() for n, w in trunk.parameters(role).items() if not n.startswith("head.")}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("critic", "copied", "zero"),
    [
        ("reward_model", "reward", False),
        ("zero_head", "reward", True),
        ("policy", "policy", True),
        ("shared", "policy", True),
    ],
)
def test_a_critic_starts_with_the_weights_and_the_head_it_is_named_by(
    roles: Trunk, critic: str, copied: str, zero: bool
) -> None:
    knobs = CriticKnobs.model_validate({"critic": critic})
    knobs.start_critic(roles)
    role = knobs.critic_role
    assert equal(adapter(roles, role), adapter(roles, copied))
    head, reward = roles.heads[role].state_dict(), roles.heads["reward"].state_dict()
    if zero:
        assert {name: float(tensor.abs().sum()) for name, tensor in head.items()} == {
            "weight": 0, "bias": 0, "shift": 0, "scale": 1
        }  # fmt: skip
    else:
        assert equal(head, reward)


def train(trunk: Trunk, data: PolicyData, sink: Spool, **changed: object) -> None:
    settings = PPO.model_validate({**SETTINGS, **changed})
    settings.start_critic(trunk)
    PPOAlgorithm(settings, Sampling(max_new_tokens=8)).train(trunk, data, sink)


@pytest.mark.parametrize("critic", ["reward_model", "zero_head", "policy", "shared"])
def test_every_critic_learns(
    roles: Trunk, make_data: Callable[..., PolicyData], sink: Spool, critic: str
) -> None:
    data = make_data(from_reference=False)
    train(roles, data, sink, critic=critic, num_steps=6, value_learning_rate=2e-2, kl_coef=0.0)
    errors = [line["metrics"]["value/error"] for line in read_lines(sink.metrics_path)]  # type: ignore[index]
    assert sum(errors[-2:]) < sum(errors[:2])


def test_no_bit_of_the_policy_changes_while_the_critic_warms_up(
    roles: Trunk, make_data: Callable[..., PolicyData], sink: Spool
) -> None:
    policy, seen = adapter(roles, "policy"), []

    class Watching(Spool):
        """Looks at the policy as each step is told."""

        def log(self, step: int, metrics: object) -> None:  # type: ignore[override]
            """Whether the policy is as it was, step by step."""
            seen.append(equal(adapter(roles, "policy"), policy))
            super().log(step, metrics)  # type: ignore[arg-type]

    watching = Watching(sink.metrics_path.parent)
    train(roles, make_data(from_reference=False), watching, critic_warmup_steps=2)
    assert seen == [True, True, False, False]
    logged = [line["metrics"] for line in read_lines(sink.metrics_path)]
    assert [("policy/loss" in m, m["policy/minibatches"]) for m in logged] == [  # type: ignore[operator,index]
        (False, 0.0), (False, 0.0), (True, 2.0), (True, 2.0)
    ]  # fmt: skip
    # The policy's rate falls over the steps that are its own: the first of four is the whole of it.
    assert logged[2]["optim/policy_lr"] == pytest.approx(1e-2 * (1 + 0.75) / 2)  # type: ignore[index]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"critic_warmup_steps": 4}, "the policy would never learn"),
        ({"critic": "shared", "critic_warmup_steps": 1}, "neither can move alone"),
    ],
)
def test_a_warm_up_that_cannot_be_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PPO.model_validate({**SETTINGS, **wrong})
