"""What every algorithm behind the door promises; a new member is tested by being in its union."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_core.algorithms import AlgorithmSettings
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.generation import Sampling
from rlhf_core.metrics import Spool, read_lines
from rlhf_core.settings import Settings, Weights
from rlhf_core.trunk import Trunk
from tests.doors import members

# What a tiny trunk learns from in seconds; whatever else a member has stays as shipped.
QUICK = {"num_steps": 10, "rollouts_per_step": 32}
RATES: dict[Weights, dict[str, float]] = {
    "lora": {"learning_rate": 2e-2, "value_learning_rate": 1e-2},
    "full": {"learning_rate": 2e-3, "value_learning_rate": 1e-3},
}


@pytest.mark.parametrize("weights", RATES)
@pytest.mark.parametrize("member", members(AlgorithmSettings))
def test_an_algorithm_earns_more_reward_and_leaves_every_other_role_as_it_was(
    member: type[Settings],
    make_roles: Callable[..., Trunk],
    make_data: Callable[..., PolicyData],
    sink: Spool,
    stir: Callable[..., None],
    weights: Weights,
) -> None:
    trunk = make_roles()
    trunk.copy_role("reward", "bystander")
    stir(trunk, "bystander", 5)
    trunk.copy_role("policy", "start")
    served = {"policy", "value"}
    before = _weights(trunk, served)
    policy = {name: weight.clone() for name, weight in trunk.parameters("policy").items()}
    settings: Any = member.model_validate(
        {k: v for k, v in {**QUICK, **RATES[weights]}.items() if k in member.model_fields}
    )
    settings.build(Sampling(max_new_tokens=12)).train(trunk, make_data(), sink)

    after = _weights(trunk, served)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    changed = trunk.parameters("policy")
    assert any(not torch.equal(weight, changed[name]) for name, weight in policy.items())

    logged = [line["metrics"] for line in read_lines(sink.metrics_path)]
    assert all(math.isfinite(value) for metrics in logged for value in metrics.values())
    scores = [metrics["objective/scores"] for metrics in logged if "objective/scores" in metrics]
    assert len(scores) == QUICK["num_steps"]
    assert sum(scores[-3:]) > sum(scores[:3])


def _weights(trunk: Trunk, served: set[str]) -> dict[str, torch.Tensor]:
    """Every number of the base, and of the roles and heads but for those of the roles served."""
    everything = {
        **{n: t for n, t in trunk.model.named_parameters() if ".lora_" not in n},
        **dict(trunk.model.named_buffers()),
    }
    for role in set(trunk.roles) - served:
        everything |= {f"{role} {name}": tensor for name, tensor in trunk.parameters(role).items()}
        head = trunk.heads.get(role)
        everything |= {f"{role} {name}": tensor for name, tensor in head.named_buffers()} if head else {}
    return {name: tensor.detach().clone() for name, tensor in everything.items()}
