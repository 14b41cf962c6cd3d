"""PPO as the documents describe it: what every batch holds, when it stops, and that it learns."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.alarms import Action
from rlhf_core.algorithms.experience import Experience
from rlhf_core.algorithms.monitors import Monitors
from rlhf_core.algorithms.monitors.updates import ClipFraction
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.generation import Sampling
from rlhf_core.kl import KLEstimator
from rlhf_core.metrics import Spool, read_lines
from rlhf_core.models import TinyModel
from rlhf_core.records import Completion, Prompt, StopReason
from rlhf_core.rewards.model import ModelReward
from rlhf_core.rewards.scores import PerCompletion, Scores
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
    return PPOAlgorithm(with_(**changed), SAMPLING).train(trunk, data, sink).ended


def logged(sink: Spool, name: str) -> list[float]:
    """The values of a metric, step by step."""
    return [line["metrics"][name] for line in read_lines(sink.metrics_path)]  # type: ignore[index]


def state(trunk: Trunk) -> dict[str, Tensor]:
    """A copy of every tensor of the base, and of each role and its head under the role's name."""
    base = {n: t for n, t in trunk.model.state_dict().items() if ".lora_" not in n}
    roles = {f"{role} {n}": p for role in trunk.roles for n, p in trunk.parameters(role).items()}
    heads = {f"{role} head.{n}": t for role, head in trunk.heads.items() for n, t in head.named_buffers()}
    return {n: t.detach().clone() for n, t in {**base, **roles, **heads}.items()}


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


def test_shaping_changes_what_is_learned_from_and_not_the_score_that_is_told(
    make_roles: Make, make_data: MakeData
) -> None:
    trunk, data = make_roles(True), make_data()
    plain = experience(trunk, data).batch
    found = experience(trunk, data, length_penalty=0.25, missing_eos_penalty=1.0)
    batch = found.batch
    assert batch.scores is not None and batch.token_scores is not None and plain.scores is not None
    assert torch.equal(batch.scores, plain.scores)
    cut = torch.tensor([c.stop is StopReason.LENGTH for c in found.completions])
    torch.testing.assert_close(
        batch.token_scores.sum(-1), batch.scores - 0.25 * batch.response_lengths - 1.0 * cut
    )


def test_whitened_rewards_keep_the_sign_of_their_mean(make_roles: Make, make_data: MakeData) -> None:
    for sign in (1.0, -1.0):
        reward = PerCompletion(lambda item, sign=sign: sign * (3.0 + len(item.response_ids)))
        batch = experience(make_roles(), make_data(reward=reward), whiten_rewards=True).batch
        assert batch.rewards is not None
        white = batch.rewards[batch.response_mask]
        assert white.std(unbiased=False).item() == pytest.approx(1, abs=1e-4)
        assert sign * white.mean() > 0.1


def test_without_whitening_advantages_are_gaes(make_roles: Make, make_data: MakeData) -> None:
    batch = experience(make_roles(True), make_data(), whiten_advantages=False).batch
    assert batch.advantages is not None and batch.returns is not None and batch.values is not None
    torch.testing.assert_close(batch.advantages, batch.returns - batch.values, rtol=1e-5, atol=1e-6)


class EachToken:
    """A reward that is earned where it is earned: 1 for every token below 64."""

    def score(self, items: Sequence[Completion]) -> Scores:
        """Ones and zeros, and their sums."""
        width = max(len(item.response_ids) for item in items)
        rows = [[float(token < 64) for token in item.response_ids] for item in items]
        per_token = torch.tensor([row + [0.0] * (width - len(row)) for row in rows])
        return Scores(per_token.sum(-1), per_token)


def test_scores_a_token_reach_the_returns_where_they_are_earned(
    make_roles: Make, make_data: MakeData
) -> None:
    found = experience(make_roles(), make_data(reward=EachToken()), lam=1.0)
    batch = found.batch
    assert batch.returns is not None
    for row, completion in enumerate(found.completions):
        # At a KL of 0 and with gamma = lam = 1, what is still to be earned from each token on.
        still = [
            float(sum(token < 64 for token in completion.response_ids[t:]))
            for t in range(batch.returns.shape[1])
        ]
        assert batch.returns[row].tolist() == pytest.approx(still, abs=1e-5)


def test_a_dense_reward_is_learned_from(make_roles: Make, make_data: MakeData, sink: Spool) -> None:
    train(
        make_roles(), make_data(reward=EachToken()), sink,
        num_steps=8, rollouts_per_step=30, learning_rate=2e-2, value_learning_rate=1e-2, kl_budget=1e3,
    )  # fmt: skip
    scores = logged(sink, "objective/scores")
    assert sum(scores[-3:]) > sum(scores[:3])


# Where KL is paid for


def test_kl_in_the_loss_is_no_part_of_the_reward_and_pulls_back(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    data = make_data(from_reference=False, reward=PerCompletion(lambda item: 0.0))
    in_loss = {"kl_coef": 0.0, "kl_loss_coef": 1.0, "kl_estimator": "k2", "whiten_advantages": False}
    trunk = make_roles(policy_moved=True)
    trunk.heads["value"].weight.data.zero_()
    trunk.copy_role("policy", "start")
    batch = experience(trunk, data, **in_loss).batch
    assert batch.rewards is not None and not batch.rewards.any()
    train(trunk, data, sink, **in_loss, num_steps=6, learning_rate=5e-3, rollouts_per_step=30, kl_budget=1e3)
    kl = logged(sink, "objective/kl_sequence")
    assert kl[-1] < kl[0] / 2
    assert logged(sink, "objective/kl_coef") == [1.0] * 6
    assert logged(sink, "objective/non_score_reward") == [0.0] * 6
    paid = logged(sink, "policy/kl_loss")
    assert paid[-1] < paid[0]


def test_a_steered_coefficient_rises_where_kl_is_above_its_target(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    trunk = make_roles(policy_moved=True)
    steered = {"kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 100, "num_steps": 3, "learning_rate": 0}
    train(trunk, make_data(from_reference=False), sink, **steered, kl_budget=1e3)
    # Far above the target at every step: 10 rollouts of a horizon of 100 at most 0.2 each.
    assert logged(sink, "objective/kl_coef") == pytest.approx([0.1, 0.102, 0.10404])


def test_entropy_that_is_paid_for_rises(make_roles: Make, make_data: MakeData, sink: Spool) -> None:
    data = make_data(from_reference=False, reward=PerCompletion(lambda item: 0.0))
    trunk = make_roles(policy_moved=True)
    train(
        trunk, data, sink, entropy_coef=1.0, kl_coef=0.0, num_steps=6, learning_rate=1e-2, kl_budget=1e3,
        rollouts_per_step=30, value_learning_rate=0, whiten_advantages=False, value_clip_range=None,
    )  # fmt: skip
    entropy = logged(sink, "objective/entropy")
    assert entropy[-1] > entropy[0]


def test_a_refreshed_reference_is_the_policy_of_that_step(
    make_roles: Make, make_data: MakeData, sink: Spool, tmp_path: Path
) -> None:
    trunk, folder = make_roles(), tmp_path / "initial"
    folder.mkdir()
    trunk.save_role("policy", folder)
    settings = with_(refresh_steps=2, num_steps=5, learning_rate=1e-2, num_epochs=1, kl_budget=1e3)
    settings.start_reference(trunk, folder, starts_as_initial=True)
    PPOAlgorithm(settings, SAMPLING).train(trunk, make_data(), sink)
    kl, to_start = logged(sink, "objective/kl_sequence"), logged(sink, "objective/kl_to_start")
    assert [value == 0 for value in kl] == [True, False, True, False, True]
    assert (
        to_start[0] == 0 and to_start[2] != 0 and to_start[4] != 0
    )  # that goes on being measured to the start


# What a run says of itself


@pytest.mark.parametrize("weights", ["lora", "full"])
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


@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_a_fresh_policy_starts_at_a_kl_of_exactly_0(
    make_roles: Make, make_data: MakeData, sink: Spool, estimator: KLEstimator
) -> None:
    train(make_roles(), make_data(), sink, kl_estimator=estimator, num_steps=1)
    for name in ("kl", "kl_sequence", "kl_to_start", "non_score_reward"):
        assert logged(sink, f"objective/{name}") == [0]
    assert logged(sink, "objective/rlhf_reward") == logged(sink, "objective/scores")


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_kl_to_the_start_is_not_kl_to_the_reference(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    trunk = make_roles(policy_moved=True)
    trunk.copy_role("policy", "start")
    train(trunk, make_data(from_reference=False), sink, learning_rate=1e-2, kl_budget=1e3)
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
    algorithm.train(make_roles(policy_moved=True), make_data(from_reference=False), sink)
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


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_rates_of_zero_change_no_bit_and_no_ratio(make_roles: Make, make_data: MakeData, sink: Spool) -> None:
    trunk = make_roles(policy_moved=True)
    before = state(trunk)
    still = {"learning_rate": 0, "value_learning_rate": 0, "kl_budget": 1e3}
    train(trunk, make_data(from_reference=False), sink, **still)
    assert moved(trunk, before) == set()
    assert logged(sink, "policy/max_log_ratio") == logged(sink, "policy/approxkl") == [0, 0]
    assert logged(sink, "policy/minibatches") == [4, 4]


@pytest.mark.parametrize("weights", ["lora", "full"])
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
        assert all(name.startswith(f"{role} ") for name in found)


@pytest.mark.parametrize("weights", ["lora", "full"])
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
        assert any(not torch.equal(first[name], other[name]) for name in first if name.startswith(f"{role} "))


# When it stops


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_epochs_stop_before_the_next_step_once_the_update_has_drifted(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    wild = {"learning_rate": 0.5, "target_kl": 0.01, "num_epochs": 4, "num_steps": 1}
    trunk = make_roles()
    assert train(trunk, make_data(), sink, **wild) == "num_steps"
    assert logged(sink, "policy/minibatches") == [1]
    # What stopped it is told, though no step was taken on it.
    assert logged(sink, "policy/approxkl") == [0] and logged(sink, "policy/approxkl_max")[0] > 0.01
    assert all(p.grad is None for role in trunk.roles for p in trunk.parameters(role).values())


def test_the_kl_budget_ends_the_stage_with_an_alarm(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    ended = train(make_roles(), make_data(), sink, num_steps=5, learning_rate=1e-2, kl_budget=1e-3)
    assert ended == "kl_budget"
    to_start = logged(sink, "objective/kl_to_start")
    assert to_start[0] == 0 and len(to_start) == 2  # seen on the first samples of a policy that moved
    assert sink.alarms == [f"KL to the round's start is {to_start[1]:.2f}, over its budget 0.001: ended"]


def stopping() -> Monitors:
    """Monitors of which one ends the stage as soon as any token is clipped."""
    return Monitors(clip_fraction=ClipFraction(action=Action.STOP, share=1e-6))


def test_a_monitor_that_may_stop_ends_the_stage_after_the_step_it_speaks_of(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    data = make_data(monitors=stopping().build())
    how = {"num_steps": 5, "learning_rate": 5e-2, "target_kl": 5.0}
    assert train(make_roles(), data, sink, **how) == "monitor:clip_fraction"
    assert len(logged(sink, "policy/clipfrac")) == 1 and logged(sink, "policy/alarms")[0] >= 1
    (said,) = [line for line in sink.alarms if "clip_fraction" in line]
    assert said.startswith("step 0: clip_fraction: clipped share of tokens is ")
    assert said.endswith("The stage ends here, and its candidate is not promoted.")


def test_a_stage_that_is_watched_learns_the_same_bits(
    make_roles: Make, make_data: MakeData, tmp_path: Path
) -> None:
    states = []
    for name, monitors in (("watched", Monitors().build()), ("alone", None)):
        trunk, sink = make_roles(), Spool(tmp_path / name)
        assert train(trunk, make_data(monitors=monitors), sink, learning_rate=5e-2) == "num_steps"
        states.append(state(trunk))
        assert bool(sink.alarms) == (monitors is not None)  # at this rate there is something to say
    watched, alone = states
    assert all(torch.equal(watched[name], alone[name]) for name in alone)


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


@pytest.mark.slow
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
    data = make_data(from_reference=False, prompts=prompts[:8], reward=PerCompletion(lambda item: 0.0))
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


@pytest.mark.slow
def test_eight_rounds_go_on_though_the_kl_of_all_of_them_is_over_the_budget_of_one(
    make_learner: Callable[[int], Trunk], make_data: MakeData, prompts: list[Prompt], tmp_path: Path
) -> None:
    low = PerCompletion(lambda item: float(sum(token < 64 for token in item.response_ids)))
    trunk, budget = make_learner(0), 0.5
    ended, first_scores, last_kl = [], [], 0.0
    for number in range(8):
        if "start" in trunk.roles:  # the next round starts from what the last one gave
            start = trunk.parameters("start")
            for name, weight in trunk.parameters("policy").items():
                start[name].data.copy_(weight)
        else:
            trunk.copy_role("policy", "start")
        sink = Spool(tmp_path / f"{number}")
        data = make_data(seed=number, prompts=prompts[:1], reward=low, from_reference=number == 0)
        settings = with_(
            num_steps=4, rollouts_per_step=64, learning_rate=1e-2, value_learning_rate=2e-2,
            kl_coef=0.01, kl_budget=budget, schedule="constant", target_kl=0.3,
        )  # fmt: skip
        ended.append(PPOAlgorithm(settings, Sampling(max_new_tokens=2)).train(trunk, data, sink).ended)
        first_scores.append(logged(sink, "objective/scores")[0])
        last_kl = logged(sink, "objective/kl_sequence")[-1]
        assert len(logged(sink, "objective/scores")) > 1  # no round is over before it has begun
    assert last_kl > 2 * budget
    assert set(ended) <= {"num_steps", "kl_budget"} and ended[-1] == "num_steps"
    # A uniform policy has 2 * 64 / 260 = 0.49; means of 64 rows err by 0.1.
    assert min(first_scores[4:]) > first_scores[0] + 0.3
