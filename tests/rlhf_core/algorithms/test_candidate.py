"""Which step is the candidate: what judges it, what is kept of it, and what is never asked."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.algorithms.candidate import BestStep, CandidateKnobs, Slice
from rlhf_core.algorithms.experience import Experience
from rlhf_core.algorithms.on_policy import PolicyData, Trained
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.algorithms.shaping import ShapingKnobs
from rlhf_core.artifacts import derive_seed
from rlhf_core.checkpoints import Checkpoints
from rlhf_core.generation import Sampling
from rlhf_core.metrics import Spool, clustered_mean, read_lines
from rlhf_core.records import Completion, Prompt
from rlhf_core.rewards.scores import PerCompletion, Scores
from rlhf_core.settings import Weights
from rlhf_core.trunk import Trunk
from tests.rlhf_core.algorithms.toy import EveryCompletion, ToyTrunk, objective, quarters

Make = Callable[..., Trunk]
MakeData = Callable[..., PolicyData]
SAMPLING = Sampling(max_new_tokens=8)
POOL = [Prompt(id=f"q{i}", text=chr(65 + i) * (1 + i % 5)) for i in range(20)]
SLICE = ["q9", "q5", "q17", "q18", "q11", "q8", "q14", "q6"]
LOW_IDS = PerCompletion(lambda item: float(sum(token < 64 for token in item.response_ids)))
# A rate that rises step by step until it breaks the policy, and that knows nothing of how many are to come.
RISING = {
    "num_steps": 6, "rollouts_per_step": 10, "num_epochs": 1, "schedule": "constant", "warmup_steps": 30,
    "learning_rate": 0.2, "target_kl": 1e9, "kl_budget": 1e9, "kl_coef": 0.1,
    "candidate": "best", "candidate_every": 1, "candidate_prompts": 8,
}  # fmt: skip
RATES: dict[Weights, float] = {"lora": 0.2, "full": 0.02}


class Seeing(PPOAlgorithm):
    """Keeps the ids of the prompts that it trained on."""

    def __init__(self, settings: PPO) -> None:
        super().__init__(settings, SAMPLING)
        self.seen: set[str] = set()

    def experience(self, *args: Any) -> Experience:
        """As PPO itself."""
        found = super().experience(*args)
        self.seen |= {completion.prompt_id for completion in found.completions}
        return found


def settings(**changed: object) -> PPO:
    return PPO.model_validate({**RISING, **changed})


def train(trunk: Trunk, data: PolicyData, sink: Spool, **changed: object) -> Trained:
    return PPOAlgorithm(settings(**changed), SAMPLING).train(trunk, data, sink)


def weights_of(trunk: Trunk) -> dict[str, Tensor]:
    found = {f"{r} {n}": p for r in ("policy", "value") for n, p in trunk.parameters(r).items()}
    return {name: weight.detach().clone() for name, weight in found.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def told(sink: Spool) -> list[tuple[object, dict[str, float]]]:
    """Every line of the metrics, but for when and how long."""
    lines: Any = read_lines(sink.metrics_path)
    return [
        (line["step"], {n: v for n, v in line["metrics"].items() if not n.startswith("time/")})
        for line in lines
    ]


# The slice


def test_the_slice_follows_from_the_ids_alone_and_the_rest_keeps_its_order() -> None:
    knobs = CandidateKnobs(candidate="best", candidate_prompts=8)
    held_out, rest = knobs.set_aside(POOL)
    assert [prompt.id for prompt in held_out] == SLICE  # for ever
    assert rest == [prompt for prompt in POOL if prompt.id not in SLICE]
    shuffled = Random(0).sample(POOL, len(POOL))
    assert knobs.set_aside(shuffled)[0] == held_out
    fewer = [prompt for prompt in POOL if prompt.id not in ("q0", "q1")]
    assert knobs.set_aside(fewer)[0] == held_out


def test_the_slice_is_never_trained_on_and_no_gold_is_asked_for_it(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    class Gold:
        """Fails the test if it is asked of the slice."""

        def score(self, items: Sequence[Completion]) -> Scores:
            """1 for each."""
            assert not {item.prompt_id for item in items} & set(SLICE)
            return Scores(torch.ones(len(items)))

    algorithm = Seeing(settings(num_steps=4, learning_rate=1e-3))
    trained = algorithm.train(make_roles(), make_data(prompts=POOL, watched=Gold()), sink)
    assert algorithm.seen == {prompt.id for prompt in POOL} - set(SLICE)
    assert trained.selection.prompts == tuple(SLICE)


# The judgement


def test_a_policy_is_judged_by_exactly_the_objective_and_its_difference_to_the_start(sink: Spool) -> None:
    def score(completion: Sequence[int]) -> float:
        return sum(completion) - 2.0

    def clipped(completion: Sequence[int]) -> float:  # what is learned from
        return max(-1.5, min(1.5, score(completion))) - 0.25 * len(completion)

    tables = {seed: quarters(seed, 0.7) for seed in (1, 2, 3)}
    trunk: Any = ToyTrunk(tables[1], tables[3], torch.zeros(len(tables[1])))
    held_out = Slice(
        [Prompt(id=f"p{i}", text="?") for i in range(64)],
        PerCompletion(lambda item: score(item.response_ids)),
        ShapingKnobs(score_clip=1.5, length_penalty=0.25).shape,
        0.3,
        "reference",
        EveryCompletion(0.7),  # type: ignore[arg-type]
        Sampling(max_new_tokens=3, temperature=0.7),
        seed=5,
    )
    best = BestStep(held_out, every=1, warmup=0)
    exact, each = [], []
    for step, seed in enumerate((1, 2)):
        trunk.tables["policy"] = tables[seed]
        best.evaluate(step, trunk, [], sink)
        asked = (tables[seed].tolist(), tables[3].tolist(), clipped, 0.3, 0.7)
        exact.append(objective(*asked))
        rewards, kl = held_out.measure(trunk)
        each.append([r - 0.3 * nats for r, nats in zip(rewards, kl, strict=True)])
    found = best.evaluations
    assert [one.objective for one in found] == pytest.approx(exact, abs=1e-5)
    assert found[0].gain.low == found[0].gain.high == 0 and found[1].kl > 0
    differences = [now - before for before, now in zip(*each, strict=True)]
    ids = [prompt.id for prompt in held_out.prompts]
    wanted = clustered_mean(differences, ids, seed=derive_seed(5, "bootstrap"))
    gain = found[1].gain
    assert gain.value == pytest.approx(exact[1] - exact[0], abs=1e-5)
    assert (gain.value, gain.low, gain.high) == pytest.approx(wanted)
    assert told(sink)[1] == (
        1,
        {
            "objective/slice_reward": found[1].reward,
            "objective/slice_kl": found[1].kl,
            "objective/slice_gain": gain.value,
            "objective/slice_gain_low": gain.low,
            "objective/slice_gain_high": gain.high,
        },
    )


def test_a_nat_costs_what_is_set_in_reward_or_loss_and_a_steered_one_does_not_move_the_measure(
    make_data: MakeData,
) -> None:
    def coefficient(**changed: object) -> float:
        algorithm = PPOAlgorithm(settings(**changed), SAMPLING)
        algorithm.kl.update(100.0, 10)
        best, _ = algorithm.candidates(make_data(prompts=POOL))
        assert best is not None
        return best.slice.kl_coef

    assert coefficient(kl_coef=0.3, kl_target=1.0, kl_horizon=10) == 0.3
    assert coefficient(kl_coef=0.0, kl_loss_coef=0.7, kl_estimator="k2") == 0.7


def test_a_reference_that_moves_is_no_measure(
    make_roles: Make, make_data: MakeData, sink: Spool, tmp_path: Path
) -> None:
    trunk, folder = make_roles(), tmp_path / "initial"
    folder.mkdir()
    trunk.save_role("policy", folder)
    moving = settings(refresh_steps=1, num_steps=3)
    moving.start_reference(trunk, folder, starts_as_initial=True)
    found = PPOAlgorithm(moving, SAMPLING).train(trunk, make_data(prompts=POOL), sink).selection
    # After each step the reference is the policy itself, to the bit.
    assert [one.kl == 0 for one in found.evaluations] == [True, False, False, False]


def test_evaluations_come_every_few_steps_after_the_warm_up_and_at_the_end(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    how = {"num_steps": 7, "candidate_every": 2, "critic_warmup_steps": 2, "learning_rate": 1e-3}
    found = train(make_roles(), make_data(prompts=POOL), sink, **how).selection
    assert [one.step for one in found.evaluations] == [0, 4, 6, 7]
    lines = [step for step, metrics in told(sink) if "objective/slice_gain" in metrics]
    assert lines == [0, 4, 6, 7]


# The choice


@pytest.mark.parametrize("weights", RATES)
def test_steps_that_ruin_the_policy_are_left_out_to_the_bit(
    make_roles: Make, make_data: MakeData, sink: Spool, tmp_path: Path, weights: Weights
) -> None:
    trunk, data = make_roles(), make_data(prompts=POOL, reward=LOW_IDS)
    found = train(trunk, data, sink, learning_rate=RATES[weights]).selection
    gains = {one.step: one.gain for one in found.evaluations}
    assert 0 < found.step < 6 and found.steps == 6
    assert gains[found.step].low == max(gain.low for step, gain in gains.items() if step > 0) > 0
    assert gains[6].low < 0 and sink.alarms == []
    assert f"after {found.step} of 6 steps: of 6 evaluated on 8 held-out prompts" in found.why

    shorter, rest = make_roles(), [prompt for prompt in POOL if prompt.id not in SLICE]
    how = {"learning_rate": RATES[weights], "num_steps": found.step, "candidate": "last"}
    train(shorter, replace(data, prompts=rest), Spool(tmp_path / "shorter"), **how)
    assert_equal(weights_of(trunk), weights_of(shorter))  # the critic's are of the same step


def test_of_equal_steps_the_first_is_taken_and_none_that_is_better_is_an_alarm(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    still = {"learning_rate": 0.0, "num_steps": 3}
    found = train(make_roles(), make_data(prompts=POOL), sink, **still).selection
    # The same random numbers each time: a policy that did not move says the same.
    assert [(one.gain.low, one.gain.high) for one in found.evaluations] == [(0, 0)] * 4
    assert len({(one.reward, one.kl) for one in found.evaluations}) == 1
    assert found.step == 1 and "none was shown to be better than the start" in found.why
    (alarm,) = sink.alarms
    assert alarm.startswith("candidate: after no step was the policy shown to be better than the one it")
    assert "(the best, after 1 of 3: +0.0000, +0.0000 to +0.0000)" in alarm


def test_a_stage_that_ends_early_may_still_choose_an_earlier_step(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    trained = train(make_roles(), make_data(prompts=POOL, reward=LOW_IDS), sink, kl_budget=1.0)
    found = trained.selection
    assert trained.ended == "kl_budget" and found.steps < 6
    assert found.evaluations[-1].step == found.steps and found.step == 2 < found.steps


def test_the_last_step_is_taken_unless_it_is_asked_for_more_and_nothing_is_drawn_for_it(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    algorithm = Seeing(settings(candidate="last", num_steps=2, learning_rate=1e-3))
    assert PPO().candidate == "last"
    found = algorithm.train(make_roles(), make_data(prompts=POOL), sink).selection
    assert (found.rule, found.step, found.steps, found.evaluations) == ("last", 2, 2, ())
    assert found.why == "The candidate is the policy after 2 of 2 steps: `candidate` is set to `last`."
    assert len(algorithm.seen) == 20
    assert [step for step, _ in told(sink)] == [0, 1]
    assert not any("slice" in name for _, metrics in told(sink) for name in metrics)


# Going on after a kill


class Killed(Exception):
    """Stands for a kill."""


def test_a_killed_stage_goes_on_to_the_same_choice_to_the_bit(
    make_roles: Make, make_data: MakeData, tmp_path: Path
) -> None:
    class Dying(Seeing):
        """Is killed as its fifth step begins."""

        def experience(self, step: int, *args: Any) -> Experience:
            """As PPO itself, until it is killed."""
            if step == 4:
                raise Killed
            return super().experience(step, *args)

    data = make_data(prompts=POOL, reward=LOW_IDS)
    undisturbed, straight = make_roles(), Spool(tmp_path / "straight")
    wanted = Seeing(settings()).train(undisturbed, data, straight)
    assert wanted.selection.step == 2  # whose weights can come from the checkpoint of step 3 alone

    def checkpoints() -> Checkpoints:
        return Checkpoints(tmp_path / "checkpoints", {"key": "k"}, every=3)

    with pytest.raises(Killed):
        Dying(settings()).train(make_roles(), data, Spool(tmp_path / "killed"), checkpoints())
    found = checkpoints()
    assert found.last is not None and found.last.step == 3
    sink, trunk = Spool(tmp_path / "killed", found.last.spool), make_roles()
    assert Seeing(settings()).train(trunk, data, sink, found) == wanted
    assert told(sink) == told(straight)
    assert_equal(weights_of(trunk), weights_of(undisturbed))


# What is refused


def test_a_pool_that_is_too_small_is_refused_with_its_numbers(
    make_roles: Make, make_data: MakeData, sink: Spool
) -> None:
    with pytest.raises(ValueError, match=r"candidate_prompts 11 of 20 policy prompts: only 9 would be left"):
        train(make_roles(), make_data(prompts=POOL), sink, candidate_prompts=11)
    settings(candidate_prompts=10).check_slice(20)
    settings(candidate="last", candidate_prompts=11).check_slice(1)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"candidate_every": 6}, r"candidate_every 6 of num_steps 6, .* up in 0: only the last step would"),
        ({"candidate_every": 3, "critic_warmup_steps": 3}, "candidate_every 3 of num_steps 6, .* up in 3"),
        ({"candidate_prompts": 7}, "greater than or equal to 8"),
        ({"candidate": "first"}, "'last' or 'best'"),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        settings(**wrong)
    settings(candidate_every=3, critic_warmup_steps=2)
    settings(candidate="last", candidate_every=6)
