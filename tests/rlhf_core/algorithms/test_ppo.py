"""PPO as the documents describe it: what every batch holds, when it stops, and that it learns."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.algorithms.experience import Experience
from rlhf_core.algorithms.ppo import PPO, PolicyData, PPOAlgorithm
from rlhf_core.generation import Sampling
from rlhf_core.kl import KLEstimator
from rlhf_core.metrics import Spool, read_lines
from rlhf_core.models import TinyModel
from rlhf_core.records import Prompt
from rlhf_core.rewards.model import ModelReward
from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.tensors import last_true
from rlhf_core.trunk import Lora, Trunk
from tests.reference import gae_by_definition

Make = Callable[..., Trunk]
MakeData = Callable[..., PolicyData]
SAMPLING = Sampling(max_new_tokens=10, temperature=0.7)
SETTINGS = PPO(num_steps=2, rollouts_per_step=10, num_epochs=2, num_minibatches=2)


def with_(**changed: object) -> PPO:
    return PPO.model_validate({**SETTINGS.to_json(), **changed})


def experience(trunk: Trunk, data: PolicyData, **changed: object) -> Experience:
    return PPOAlgorithm(with_(**changed), SAMPLING).experience(0, trunk, data, {})


def train(trunk: Trunk, data: PolicyData, sink: Spool, **changed: object) -> str:
    return PPOAlgorithm(with_(**changed), SAMPLING).train(trunk, data, sink)


def logged(sink: Spool, name: str) -> list[float]:
    """The values of a metric, step by step."""
    return [line["metrics"][name] for line in read_lines(sink.metrics_path)]  # type: ignore[index]


def state(trunk: Trunk) -> dict[str, Tensor]:
    """A copy of every tensor of model and heads, by name."""
    heads = {f"{role} {n}": t for role, head in trunk.heads.items() for n, t in head.state_dict().items()}
    return {n: t.detach().clone() for n, t in {**trunk.model.state_dict(), **heads}.items()}


def moved(trunk: Trunk, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in state(trunk).items() if not torch.equal(tensor, before[name])}


# What a batch holds


@pytest.mark.parametrize("was_moved", [False, True])
def test_rewards_are_the_kl_penalty_plus_the_score_on_the_last_token(
    make_roles: Make, make_data: MakeData, was_moved: bool
) -> None:
    batch = experience(make_roles(was_moved), make_data(), kl_coef=0.5).batch
    assert batch.rewards is not None and batch.scores is not None
    assert batch.logprobs is not None and batch.ref_logprobs is not None
    bonus = batch.rewards + 0.5 * (batch.logprobs - batch.ref_logprobs)
    for row, length in enumerate(batch.response_lengths.tolist()):
        assert bonus[row, length - 1].item() == pytest.approx(batch.scores[row].item(), abs=1e-5)
        bonus[row, length - 1] = 0
    torch.testing.assert_close(bonus, torch.zeros_like(bonus), rtol=0, atol=1e-6)


def test_the_critic_starts_as_the_reward_and_reads_the_state_before_each_token(
    make_roles: Make, make_data: MakeData
) -> None:
    trunk = make_roles()
    found = experience(trunk, make_data())
    values = found.batch.values
    assert values is not None
    rows = [row for row, c in enumerate(found.completions) if len(c.response_ids) > 1]
    cut = [found.completions[row] for row in rows]
    cut = [c.model_copy(update={"response_ids": c.response_ids[:-1]}) for c in cut]
    # The state before the last token is where the reward would read a completion without that token.
    before_last = values[rows, last_true(found.batch.response_mask)[rows]]
    assert torch.equal(before_last, ModelReward(trunk).score(cut).total)
    assert len(rows) > 5


def test_returns_are_raw_advantages_plus_values_and_advantages_are_whitened_over_the_batch(
    make_roles: Make, make_data: MakeData
) -> None:
    batch = experience(make_roles(True), make_data(), gamma=0.9, lam=0.8).batch
    assert batch.rewards is not None and batch.values is not None
    assert batch.advantages is not None and batch.returns is not None
    mask = batch.response_mask
    raw, returns = gae_by_definition(
        batch.rewards.tolist(), batch.values.tolist(), mask.tolist(), gamma=0.9, lam=0.8
    )
    torch.testing.assert_close(batch.returns, torch.tensor(returns), rtol=1e-5, atol=1e-5)
    white = batch.advantages[mask]
    assert white.mean().item() == pytest.approx(0, abs=1e-5)
    assert white.std(unbiased=False).item() == pytest.approx(1, abs=1e-4)
    # One shift and one scale for all rows: perfectly correlated with what was whitened.
    together = torch.stack([white, torch.tensor(raw)[mask]])
    assert torch.corrcoef(together)[0, 1].item() == pytest.approx(1, abs=1e-5)
    assert not batch.advantages[~mask].any()


# What a run says of itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_ratio_of_every_step_is_exactly_1(
    make_roles: Make, make_data: MakeData, sink: Spool, dtype: torch.dtype
) -> None:
    once = {"num_epochs": 1, "num_minibatches": 1, "num_steps": 3, "learning_rate": 1e-2}
    assert train(make_roles(dtype=dtype), make_data(), sink, **once) == "num_steps"
    assert logged(sink, "policy/max_log_ratio") == [0, 0, 0]
    assert logged(sink, "policy/approxkl") == [0, 0, 0]
    assert logged(sink, "policy/clipfrac") == [0, 0, 0]
    assert logged(sink, "policy/ratio") == [1, 1, 1]
    assert logged(sink, "objective/kl")[2] > 0  # and yet it moved


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_a_fresh_adapter_starts_at_a_kl_of_exactly_0(
    make_roles: Make, make_data: MakeData, sink: Spool, estimator: KLEstimator
) -> None:
    train(make_roles(), make_data(), sink, kl_estimator=estimator, num_steps=1)
    for name in ("kl", "kl_sequence", "kl_to_start", "non_score_reward"):
        assert logged(sink, f"objective/{name}") == [0]
    assert logged(sink, "objective/rlhf_reward") == logged(sink, "objective/scores")


def test_kl_to_the_start_is_not_kl_to_the_reference(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    trunk = make_roles(policy_moved=True)
    trunk.copy_role("policy", "start")
    train(trunk, make_data(from_initial=False), sink, learning_rate=1e-2, kl_budget=1e3)
    to_start, to_reference = logged(sink, "objective/kl_to_start"), logged(sink, "objective/kl_sequence")
    assert to_start[0] == 0 and to_reference[0] > 0
    assert 0 < to_start[1] != to_reference[1]


def test_both_rates_fall_in_a_line_to_zero_over_the_stage(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    train(make_roles(), make_data(), sink, learning_rate=8e-6, value_learning_rate=4e-6, target_kl=1e9)
    # Two steps of two epochs of two minibatches: eight rates, 8 to 1 eighths of the peak, four in each mean.
    assert logged(sink, "optim/policy_lr") == pytest.approx([6.5e-6, 2.5e-6])
    assert logged(sink, "optim/value_lr") == pytest.approx([3.25e-6, 1.25e-6])


class Keeping(PPOAlgorithm):
    """Keeps the batches that it learned from."""

    kept: ClassVar[list[Experience]] = []

    def experience(self, *args: object) -> Experience:  # type: ignore[override]
        """As PPO itself."""
        self.kept.append(super().experience(*args))  # type: ignore[arg-type]
        return self.kept[-1]


def test_kl_and_entropy_are_told_a_token_and_kl_a_completion_too(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    algorithm = Keeping(with_(num_steps=1, kl_coef=0.5), Sampling(max_new_tokens=24, temperature=0.7))
    algorithm.train(make_roles(policy_moved=True), make_data(from_initial=False), sink)
    found = algorithm.kept[-1]
    assert found.batch.logprobs is not None and found.batch.ref_logprobs is not None
    lengths = [len(completion.response_ids) for completion in found.completions]
    assert min(lengths) < max(lengths)
    # Token by token, over what was sampled and nothing else: padding enters no mean.
    log_ratio = (found.batch.logprobs - found.batch.ref_logprobs).tolist()
    kl = [sum(log_ratio[row][t] for t in range(length)) for row, length in enumerate(lengths)]
    entropy = sum(float(found.entropy[row, t]) for row, length in enumerate(lengths) for t in range(length))
    wanted = {
        "kl": sum(kl) / sum(lengths),
        "kl_sequence": sum(kl) / len(kl),
        "non_score_reward": -0.5 * sum(kl) / len(kl),
        "entropy": entropy / sum(lengths),
    }
    assert {name: logged(sink, f"objective/{name}")[0] for name in wanted} == pytest.approx(wanted, rel=1e-5)


# What moves


def test_rates_of_zero_change_no_bit_and_no_ratio(make_roles: Make, make_data: MakeData, sink: Spool) -> None:
    trunk = make_roles(policy_moved=True)
    before = state(trunk)
    train(trunk, make_data(from_initial=False), sink, learning_rate=0, value_learning_rate=0)
    assert moved(trunk, before) == set()
    assert logged(sink, "policy/max_log_ratio") == logged(sink, "policy/approxkl") == [0, 0]
    assert logged(sink, "policy/minibatches") == [4, 4]


def test_only_policy_and_critic_move_and_each_by_its_own_rate(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    rates = {"learning_rate": "policy", "value_learning_rate": "value"}
    for rate, role in rates.items():
        trunk = make_roles()
        trunk.copy_role("policy", "start")
        before = state(trunk)
        train(trunk, make_data(), sink, **{**dict.fromkeys(rates, 0), rate: 1e-3})
        found = moved(trunk, before)
        assert found
        assert all(f".{role}." in name or name.startswith(f"{role} ") for name in found)


def test_a_seed_gives_the_same_policy_and_critic_to_the_bit(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    runs = []
    for seed in (0, 0, 1):
        trunk = make_roles()
        torch.rand(3)  # the global generator plays no part
        train(trunk, make_data(seed=seed), sink, learning_rate=1e-2)
        runs.append((trunk, state(trunk)))
    (trunk, first), (_, again), (_, other) = runs
    assert all(torch.equal(first[name], again[name]) for name in first)
    for role in ("policy", "value"):
        assert any(not torch.equal(first[name], other[name]) for name in first if role in name)


# When it stops


def test_epochs_stop_before_the_next_step_once_the_update_has_drifted(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    wild = {"learning_rate": 0.5, "target_kl": 0.01, "num_epochs": 4, "num_steps": 1}
    trunk = make_roles()
    assert train(trunk, make_data(), sink, **wild) == "num_steps"
    assert logged(sink, "policy/minibatches") == [1]
    assert all(p.grad is None for role in trunk.roles for p in trunk.parameters(role).values())


def test_the_kl_budget_ends_the_stage_with_an_alarm(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    ended = train(make_roles(), make_data(), sink, num_steps=5, learning_rate=1e-2, kl_budget=1e-3)
    assert ended == "kl_budget"
    to_start = logged(sink, "objective/kl_to_start")
    assert to_start[0] == 0 and len(to_start) == 2  # seen on the first samples of a policy that moved
    assert sink.alarms == [f"KL to the round's start is {to_start[1]:.2f}, over its budget 0.001: ended"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"completions_per_prompt": 3}, "completions_per_prompt: 10 does not split into 3 equal parts"),
        ({"num_minibatches": 4}, r"num_minibatches: 10 does not split into 4 .*\(10 = 4 \* 2 \+ 2\)"),
        ({"rollouts_per_step": 4}, "greater than or equal to 8"),
        ({"value_coef": 0}, "greater than 0"),
        ({"kl_coef": -0.1}, "greater than or equal to 0"),
        ({"clip_range": 1.0}, "less than 1"),
        ({"learning_rate": float("nan")}, "finite number"),
        ({"vf_coef": 0.1}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        with_(**wrong)


# It learns


@pytest.fixture
def make_learner(make_trunk: Make) -> Callable[[int], Trunk]:
    """Makes a trunk with a fresh policy and a critic that expects nothing."""

    def make(seed: int) -> Trunk:
        trunk = make_trunk(model=TinyModel(hidden_size=32, num_layers=2, seed=seed), bucket=32)
        for role in ("policy", "value"):
            trunk.add_role(role, Lora(rank=4, alpha=8.0), seed, head="last" if role == "value" else None)
        trunk.heads["value"].weight.data.zero_()  # a random critic is noise in the first advantages
        return trunk

    return make


def learn(trunk: Trunk, data: PolicyData, sink: Spool, **changed: object) -> None:
    """A short run at high rates on short rows."""
    fast = {"num_steps": 10, "rollouts_per_step": 64, "schedule": "constant", "value_learning_rate": 2e-2}
    PPOAlgorithm(PPO.model_validate({**fast, **changed}), Sampling(max_new_tokens=2)).train(trunk, data, sink)


def test_it_raises_a_reward_that_counts_while_kl_stays_in_its_budget(
    make_learner: Callable[[int], Trunk], make_data: MakeData, prompts: list[Prompt], tmp_path: Path
) -> None:
    low = PerCompletion(lambda item: float(sum(token < 64 for token in item.response_ids)))
    gains = []
    for seed in range(3):
        sink = Spool(tmp_path / f"{seed}")
        data = make_data(seed=seed, prompts=prompts[:1], reward=low)
        learn(make_learner(seed), data, sink, kl_coef=0.02, learning_rate=2e-2, target_kl=0.3)
        scores, kl = logged(sink, "objective/scores"), logged(sink, "objective/kl_sequence")
        gains.append(sum(scores[-3:]) / 3 - sum(scores[:2]) / 2)
        assert max(kl) < 6  # nats, over 2 tokens of 260: what the gain costs, not a collapse
    # A uniform policy has 2 * 64 / 260 = 0.49, and means of 64 rows err by 0.6 / 8 = 0.08.
    assert min(gains) > 0.2
    assert sum(gains) / 3 > 0.35


def test_kl_falls_where_nothing_else_is_paid_for(
    make_learner: Callable[[int], Trunk],
    make_data: MakeData,
    prompts: list[Prompt],
    sink: Spool,
    stir: Callable[..., None],
) -> None:
    trunk = make_learner(0)
    stir(trunk, "policy")
    data = make_data(from_initial=False, prompts=prompts[:8], reward=PerCompletion(lambda item: 0.0))
    learn(
        trunk, data, sink, kl_coef=1.0, kl_budget=1e3, learning_rate=5e-3, rollouts_per_step=64, num_steps=5
    )
    kl = logged(sink, "objective/kl_sequence")
    assert 0 <= kl[-1] < kl[0] / 2


def test_the_critic_learns_what_the_prompt_foretells(
    make_learner: Callable[[int], Trunk], make_data: MakeData, prompts: list[Prompt], sink: Spool
) -> None:
    long = PerCompletion(lambda item: float(len(item.prompt_ids) > 10))  # four prompts of eight
    learn(make_learner(0), make_data(prompts=prompts[:8], reward=long), sink, learning_rate=0, num_steps=6)
    explained = logged(sink, "value/explained_variance")
    assert explained[0] == pytest.approx(0, abs=1e-6)  # a constant explains nothing
    assert explained[-1] > 0.8
