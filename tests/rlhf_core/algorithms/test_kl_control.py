"""A coefficient is steered as Ziegler et al. say, KL is paid for once, and a reference moves on time."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.kl_control import KLController, KLKnobs
from rlhf_core.kl import KLEstimator
from rlhf_core.trunk import Trunk

Make = Callable[..., Trunk]


def test_three_updates_of_the_coefficient_by_hand() -> None:
    controller = KLController(KLKnobs(kl_coef=0.1, kl_target=6.0, kl_horizon=1000))
    # 12 / 6 - 1 = 1, held at 0.2: 0.1 * (1 + 0.2 * 100 / 1000) = 0.102.
    controller.update(12.0, 100)
    assert controller.coef == pytest.approx(0.102)
    # 6.6 / 6 - 1 = 0.1: 0.102 * (1 + 0.1 * 500 / 1000) = 0.1071.
    controller.update(6.6, 500)
    assert controller.coef == pytest.approx(0.1071)
    # 0 / 6 - 1 = -1, held at -0.2: 0.1071 * (1 - 0.2 * 1000 / 1000) = 0.08568.
    controller.update(0.0, 1000)
    assert controller.coef == pytest.approx(0.08568)
    assert controller.in_reward == controller.coef and controller.in_loss == 0


def test_without_a_target_the_coefficient_stays() -> None:
    controller = KLController(KLKnobs(kl_coef=0.1))
    controller.update(100.0, 1000)
    assert controller.coef == 0.1


def test_a_coefficient_in_the_loss_costs_nothing_in_the_reward() -> None:
    controller = KLController(KLKnobs(kl_coef=0, kl_loss_coef=0.3, kl_estimator=KLEstimator.K2))
    assert (controller.in_reward, controller.in_loss) == (0.0, 0.3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kl_loss_coef": 0.1, "kl_estimator": "k2"}, "KL would be paid for twice"),
        ({"kl_coef": 0, "kl_loss_coef": 0.1}, "k1 in the loss: its gradient is zero on average"),
        ({"kl_coef": 0, "kl_target": 6}, "steers a coefficient of 0"),
        ({"kl_target": 0}, "greater than 0"),
        ({"kl_horizon": 0}, "greater than or equal to 1"),
    ],
)
def test_penalties_that_cannot_be_meant_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        KLKnobs.model_validate(wrong)


def weights(trunk: Trunk, role: str) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trunk.parameters(role).items()}


def test_the_champion_as_reference_is_a_copy_that_stays_when_the_policy_moves(
    make_roles: Make, stir: Callable[..., None], tmp_path: Path
) -> None:
    trunk = make_roles(policy_moved=True)
    before = weights(trunk, "policy")
    KLKnobs(reference="champion").start_reference(trunk, tmp_path, starts_as_initial=False)
    stir(trunk, "policy", 9)
    found = weights(trunk, "reference")
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert "start" not in trunk.roles  # the reference is where the stage began


def test_a_reference_that_is_the_bare_trunk_needs_no_weights(make_roles: Make, tmp_path: Path) -> None:
    trunk = make_roles()
    KLKnobs().start_reference(trunk, tmp_path, starts_as_initial=True)
    assert not {"reference", "start"} & set(trunk.roles)
    moved = make_roles(policy_moved=True)
    KLKnobs().start_reference(moved, tmp_path, starts_as_initial=False)
    assert "reference" not in moved.roles and "start" in moved.roles


def test_a_refreshed_reference_starts_as_the_initial_policy_and_moves_on_time(
    make_roles: Make, tmp_path: Path
) -> None:
    initial = make_roles()
    folder = tmp_path / "initial"
    folder.mkdir()
    initial.save_role("policy", folder)
    trunk = make_roles(policy_moved=True)
    knobs = KLKnobs(refresh_steps=3, refresh_mixing=0.25)
    knobs.start_reference(trunk, folder, starts_as_initial=False)
    first, policy = weights(trunk, "reference"), weights(trunk, "policy")
    assert all(torch.equal(first[name], weight) for name, weight in weights(initial, "policy").items())
    for step in (1, 2):
        knobs.refresh(step, trunk)
    unmoved = weights(trunk, "reference")
    assert all(torch.equal(unmoved[name], first[name]) for name in first)
    knobs.refresh(3, trunk)
    for name, weight in weights(trunk, "reference").items():
        torch.testing.assert_close(weight, 0.75 * first[name] + 0.25 * policy[name], rtol=1e-5, atol=1e-8)
