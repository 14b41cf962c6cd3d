"""PPO-ptx: what the mix learns from, what it leaves alone, and that it keeps a policy from forgetting."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_core.algorithms.on_policy import PolicyData, Trained
from rlhf_core.algorithms.optimize import Optimizer, RoleOptimizer, optimize
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.algorithms.pretraining import PretrainingMix, PtxKnobs
from rlhf_core.generation import Sampling
from rlhf_core.metrics import Spool, read_lines
from rlhf_core.models import TinyModel
from rlhf_core.records import Prompt
from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.trunk import Lora, Trunk

Make = Callable[..., Trunk]
TEXTS = [Prompt(id=f"t{n}", text=f"{n}: " + "abab" * 6) for n in range(40)]
KNOBS = PtxKnobs(ptx_coef=1.0, ptx_rows=4, ptx_max_tokens=16)


@pytest.fixture
def trunk(make_roles: Make) -> Trunk:
    return make_roles(policy_moved=True)


def test_every_text_is_learned_from_once_a_turn_and_held_out_ones_never(trunk: Trunk) -> None:
    mix = PretrainingMix(KNOBS, trunk, TEXTS, seed=1)
    number = len(mix.rows) // 4 * 4
    turn = [tuple(row) for n in range(number // 4) for row in mix.minibatch(n)]
    assert len(set(turn)) == len(turn) == number
    assert set(turn) <= {tuple(row) for row in mix.rows}
    cut = {text.id: tuple(trunk.codec.encode_prompt(text)[:16]) for text in TEXTS}
    aside = set(cut.values()) - {tuple(row) for row in mix.rows}
    # Binomial with n = 40 and a share of 0.2: 8, within four deviations of 2.5.
    assert 1 <= len(aside) <= 18
    assert mix.minibatch(3) == PretrainingMix(KNOBS, trunk, TEXTS, seed=1).minibatch(3)
    assert mix.minibatch(3) != PretrainingMix(KNOBS, trunk, TEXTS, seed=2).minibatch(3)


def test_more_texts_move_none_to_the_other_side(trunk: Trunk) -> None:
    fewer = PretrainingMix(KNOBS, trunk, TEXTS[:30], seed=1)
    more = PretrainingMix(KNOBS, trunk, TEXTS, seed=1)
    assert {tuple(row) for row in fewer.rows} <= {tuple(row) for row in more.rows}


def test_the_loss_is_the_mean_negative_log_probability_of_every_token_after_the_first(trunk: Trunk) -> None:
    mix = PretrainingMix(KNOBS, trunk, TEXTS, seed=1)
    found = mix.learned_from(trunk, first=0)
    assert found.batch is not None
    batch = found.batch(0)
    with trunk.role("policy"), torch.no_grad():
        loss, diagnostics = found.loss(batch, batch.weight)
        expected = []
        for row in mix.minibatch(0):
            logits = trunk.model(input_ids=torch.tensor([row])).logits[0].float().log_softmax(-1)
            expected += [-float(logits[place - 1, token]) for place, token in enumerate(row) if place]
    assert len(expected) == int(diagnostics["count"])
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_held_out_perplexity_is_the_exponential_of_the_mean_loss(trunk: Trunk) -> None:
    mix = PretrainingMix(KNOBS, trunk, TEXTS, seed=1)
    learned = {tuple(row) for row in mix.rows}
    rows = [row for text in TEXTS if tuple(row := trunk.codec.encode_prompt(text)[:16]) not in learned]
    losses = []
    with trunk.role("policy"), torch.no_grad():
        for row in rows:
            logits = trunk.model(input_ids=torch.tensor([row])).logits[0].float().log_softmax(-1)
            losses += [-float(logits[place - 1, token]) for place, token in enumerate(row) if place]
    found = mix.held_out(trunk, "after")
    assert found == {"ptx/perplexity_after": pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)}


def test_too_few_texts_are_refused_with_their_numbers(trunk: Trunk) -> None:
    with pytest.raises(ValueError, match=r"has \d texts to learn from and \d to measure on, of 3 given"):
        PretrainingMix(KNOBS, trunk, TEXTS[:3], seed=1)


def read(trunk: Trunk, mix: PretrainingMix) -> None:
    """Let the policy learn the texts, so that it has something to forget."""
    texts = mix.learned_from(trunk, first=0)
    assert texts.batch is not None
    steps = {"policy": RoleOptimizer(trunk, "policy", Optimizer(learning_rate=2e-2), total_steps=40)}
    list(optimize(trunk, texts.batch(0), [texts], steps, num_epochs=40, minibatch_size=4, seed=0))


def learn(trunk: Trunk, data: PolicyData, sink: Spool, **changed: object) -> Trained:
    fast = {"num_steps": 16, "rollouts_per_step": 64, "num_epochs": 2, "kl_coef": 0.0, "kl_budget": 1e3}
    fast |= {"schedule": "constant", "learning_rate": 1e-2, "target_kl": 1.0, "value_learning_rate": 2e-2}
    fast |= {"ptx_rows": 4, "ptx_max_tokens": 16}
    settings = PPO.model_validate({**fast, **changed})
    return PPOAlgorithm(settings, Sampling(max_new_tokens=8)).train(trunk, data, sink)


@pytest.mark.slow
def test_the_mix_keeps_a_policy_from_forgetting_for_three_seeds(
    make_trunk: Make, make_data: Callable[..., PolicyData], counting: PerCompletion, tmp_path: Path
) -> None:
    """A reward for tokens that the texts are not of makes a policy worse at them; the mix does not let it."""
    after: dict[tuple[float, int], float] = {}
    for seed in range(3):
        for coef in (0.0, 0.3):
            trunk = make_trunk(model=TinyModel(hidden_size=32, num_layers=2, seed=seed), bucket=32)
            for role in ("policy", "value"):
                trunk.add_role(role, Lora(rank=4, alpha=8.0), seed, head="last" if role == "value" else None)
            trunk.heads["value"].weight.data.zero_()
            mix = PretrainingMix(KNOBS, trunk, TEXTS, seed)
            read(trunk, mix)
            before = mix.held_out(trunk, "now")["ptx/perplexity_now"]
            data = make_data(seed=seed, texts=TEXTS, from_reference=False)
            sink = Spool(tmp_path / f"{coef}-{seed}")
            trained = learn(trunk, data, sink, ptx_coef=coef)
            after[coef, seed] = mix.held_out(trunk, "now")["ptx/perplexity_now"] / before
            told = read_lines(sink.metrics_path)
            scores = [line["metrics"]["objective/scores"] for line in told]  # type: ignore[index]
            # Both learn what they are paid for; by 0.08 to 0.29, and a mean of three steps scatters by 0.02.
            assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.04
            assert trained.metrics == ({} if coef == 0 else trained.metrics)
            if coef:
                assert trained.metrics["ptx/perplexity_before"] == pytest.approx(before, rel=0.1)
    for seed in range(3):  # as they ran: 60 to 210 times the perplexity without the mix, 1.04 to 1.16 with it
        assert after[0.0, seed] > 10
        assert after[0.3, seed] < 1.4
