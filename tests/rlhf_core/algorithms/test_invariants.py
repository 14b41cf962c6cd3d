"""Every invariant stops a run that breaks it, and lets a healthy one pass."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rlhf_core.algorithms.experience import Experience
from rlhf_core.algorithms.invariants import BrokenInvariant, Watch
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.generation import Sampling
from rlhf_core.kl import KLEstimator
from rlhf_core.metrics import Spool
from rlhf_core.tensors import last_true
from rlhf_core.trunk import Trunk

Make = Callable[..., Trunk]
MakeData = Callable[..., PolicyData]
SETTINGS = PPO(num_steps=1, rollouts_per_step=10, num_epochs=1, num_minibatches=2, kl_coef=0.5)
SAMPLING = Sampling(max_new_tokens=10)


def found(trunk: Trunk, data: PolicyData, settings: PPO = SETTINGS) -> Experience:
    return PPOAlgorithm(settings, SAMPLING).experience(0, trunk, data, {})


@pytest.fixture
def watch() -> Watch:
    return Watch("cpu")


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_a_healthy_batch_passes_without_a_word(
    make_roles: Make, make_data: MakeData, watch: Watch, moved: bool, estimator: KLEstimator
) -> None:
    trunk, data = make_roles(policy_moved=moved), make_data(from_reference=not moved)
    settings = SETTINGS.model_copy(update={"kl_estimator": estimator})
    watch.experience(0, found(trunk, data, settings), data)
    watch.first_minibatch(0, {"policy/max_log_ratio": 0.0})


def test_rows_that_were_mixed_up_are_seen(make_roles: Make, make_data: MakeData, watch: Watch) -> None:
    data = make_data()
    experience = found(make_roles(), data)
    swapped = [experience.completions[i] for i in (1, 0, *range(2, 10))]
    with pytest.raises(BrokenInvariant, match="row 0 does not hold the prompt ids of"):
        watch.experience(0, replace(experience, completions=swapped), data)


@pytest.mark.parametrize("how", ["one token early", "in another row", "twice"])
def test_a_score_that_is_not_on_the_last_token_alone_is_seen(
    make_roles: Make, make_data: MakeData, watch: Watch, how: str
) -> None:
    data = make_data(from_reference=False)
    experience = found(make_roles(policy_moved=True), data)
    batch = experience.batch
    assert batch.token_scores is not None and batch.scores is not None
    row = int(batch.scores.argmax())
    last = int(last_true(batch.response_mask)[row])
    assert batch.scores[row] > 0 and last > 0
    if how != "twice":
        batch.token_scores[row, last] -= batch.scores[row]
    if how in ("one token early", "twice"):
        batch.token_scores[row, last - 1] += batch.scores[row]
    if how == "in another row":
        batch.token_scores[row - 1, 0] += batch.scores[row]
    with pytest.raises(BrokenInvariant, match="belongs on token"):
        watch.experience(0, experience, data)


def test_a_first_policy_that_is_not_the_reference_is_seen(
    make_roles: Make, make_data: MakeData, watch: Watch
) -> None:
    data = make_data(from_reference=True)
    experience = found(make_roles(policy_moved=True), data)
    with pytest.raises(BrokenInvariant, match=r"log-probabilities differ by up to .* from the reference's"):
        watch.experience(0, experience, data)
    watch.experience(1, experience, data)  # after a step it has moved, and should have
    watch.experience(0, experience, make_data(from_reference=False))


def test_log_probabilities_that_are_not_finite_are_seen(
    make_roles: Make, make_data: MakeData, watch: Watch
) -> None:
    data = make_data()
    experience = found(make_roles(), data)
    assert experience.batch.logprobs is not None
    experience.batch.logprobs[3, 0] = torch.nan
    with pytest.raises(BrokenInvariant, match="log-probabilities are not finite"):
        watch.experience(1, experience, data)


@pytest.mark.parametrize("drift", [1e-7, float("inf"), float("nan")])
def test_a_first_ratio_that_is_not_1_is_seen(watch: Watch, drift: float) -> None:
    with pytest.raises(BrokenInvariant, match="step 4: log ratios of the first minibatch"):
        watch.first_minibatch(4, {"policy/max_log_ratio": drift})


def test_a_run_whose_update_sees_other_log_probabilities_stops_before_any_step(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    class Drifting(PPOAlgorithm):
        """Its rollouts' log-probabilities are a little off in one token."""

        def experience(self, *args: object) -> Experience:  # type: ignore[override]
            given = super().experience(*args)  # type: ignore[arg-type]
            assert given.batch.logprobs is not None
            given.batch.logprobs[:, 0] += 1e-4
            return given

    trunk, data = make_roles(policy_moved=True), make_data(from_reference=False)
    before = [p.detach().clone() for p in trunk.parameters("policy").values()]
    with pytest.raises(BrokenInvariant, match="other log-probabilities than the rollout did"):
        Drifting(SETTINGS, SAMPLING).train(trunk, data, sink)
    after = trunk.parameters("policy").values()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
