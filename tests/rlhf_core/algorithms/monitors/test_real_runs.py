"""Real PPO on the tiny trunk: planted faults fire their monitors, and five clean runs fire none."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_core.alarms import MonitorsReport
from rlhf_core.algorithms.monitors import Monitors, Watcher
from rlhf_core.algorithms.monitors.updates import NegativeKL
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.algorithms.ppo import PPO, PPOAlgorithm
from rlhf_core.generation import Generator, Sample, Sampling, complete
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.kl import KLEstimator
from rlhf_core.metrics import Spool, read_lines
from rlhf_core.models import TinyModel
from rlhf_core.records import Prompt, StopReason
from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.trunk import Lora, Trunk

Make = Callable[..., Trunk]
SAMPLING = Sampling(max_new_tokens=3)
CLEAN = PPO(
    num_steps=10,
    rollouts_per_step=48,
    num_epochs=1,
    kl_coef=0.1,
    learning_rate=1e-2,
    value_learning_rate=1e-2,
)
"""Learns a little in each seed, and stays near its reference."""


def ids_from(low: int, high: int) -> PerCompletion:
    """A reward that anyone can check: the number of response ids in a range."""
    return PerCompletion(lambda item: float(sum(low <= token < high for token in item.response_ids)))


@pytest.fixture
def make_learner(make_trunk: Make) -> Callable[[int], Trunk]:
    """Makes a trunk with a fresh policy and a critic that expects nothing."""

    def make(seed: int) -> Trunk:
        trunk = make_trunk(model=TinyModel(hidden_size=32, num_layers=2, seed=seed), bucket=32)
        for role in ("policy", "value"):
            trunk.add_role(role, Lora(rank=4, alpha=8.0), seed, head="last" if role == "value" else None)
        trunk.heads["value"].weight.data.zero_()
        return trunk

    return make


def prompts(number: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", text=chr(65 + i) * (1 + i)) for i in range(number)]


def ran(
    trunk: Trunk,
    folder: Path,
    *,
    reward: PerCompletion,
    gold: PerCompletion | None = None,
    generator: Generator | None = None,
    num_prompts: int = 1,
    seed: int = 0,
    moved: bool = False,
    **changed: object,
) -> tuple[MonitorsReport, list[float]]:
    """What the monitors of a run saw, and its mean scores."""
    sink, monitors = Spool(folder), Monitors().build()
    data = PolicyData(
        prompts=prompts(num_prompts),
        reward=reward,
        generator=generator or HFGenerator(),
        seed=seed,
        from_reference=not moved,
        watched=gold,
        monitors=monitors,
    )
    settings = PPO.model_validate({**CLEAN.to_json(), "kl_budget": 100, **changed})
    assert PPOAlgorithm(settings, SAMPLING).train(trunk, data, sink).ended == "num_steps"
    scores = [line["metrics"]["objective/scores"] for line in read_lines(sink.metrics_path)]  # type: ignore[index]
    return monitors.report(), scores


def fired(report: MonitorsReport) -> set[str]:
    return {alarm.monitor for alarm in report.alarms}


@pytest.mark.slow
def test_five_clean_runs_learn_and_fire_nothing(make_learner: Callable[[int], Trunk], tmp_path: Path) -> None:
    gains = []
    for seed in range(5):
        trunk, how = make_learner(seed), {"reward": ids_from(0, 64), "gold": ids_from(0, 128)}
        report, scores = ran(trunk, tmp_path / f"{seed}", **how, seed=seed, num_prompts=2)  # type: ignore[arg-type]
        assert report.alarms == ()
        assert {record.state for record in report.monitors} == {"ok"}  # each of them looked
        gains.append(sum(scores[-3:]) / 3 - sum(scores[:3]) / 3)
    assert sum(gains) / 5 > 0.05


WILD = {"schedule": "constant", "num_epochs": 2, "target_kl": 5.0, "value_learning_rate": 2e-2}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_without_a_price_for_kl_the_policy_drifts_and_is_seen_to(
    make_learner: Callable[[int], Trunk], tmp_path: Path, seed: int
) -> None:
    report, _ = ran(
        make_learner(seed),
        tmp_path,
        seed=seed,
        reward=ids_from(0, 64),
        kl_coef=0.0,
        learning_rate=2e-2,
        **WILD,
    )
    kl = next(record for record in report.monitors if record.monitor == "kl")
    assert kl.since is not None and kl.worst[0].value > 1.5 * kl.worst[0].limit
    (said,) = [alarm.sentence for alarm in report.alarms if alarm.monitor == "kl"]  # once, not at every step
    assert "raise `policy_update.algorithm.kl_coef`" in said.lower() and kl.steps > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_reward_that_can_be_hacked_is_seen_to_be(
    make_learner: Callable[[int], Trunk], tmp_path: Path, seed: int
) -> None:
    # The proxy pays for what the gold does not want: each id is worth something to one of them.
    how = {"reward": ids_from(0, 64), "gold": ids_from(64, 260), "kl_coef": 0.0, "learning_rate": 2e-2}
    report, scores = ran(make_learner(seed), tmp_path, seed=seed, num_steps=14, **how, **WILD)  # type: ignore[arg-type]
    assert "gold" in fired(report)
    assert scores[-1] > scores[0] + 0.3


@pytest.mark.slow
def test_a_reward_for_one_thing_makes_all_completions_the_same_and_is_seen_to(
    make_learner: Callable[[int], Trunk], tmp_path: Path
) -> None:
    how = {"reward": ids_from(32, 64), "kl_coef": 0.0, "learning_rate": 3e-2, "num_steps": 14, "seed": 2}
    report, _ = ran(make_learner(2), tmp_path, **how, **WILD)  # type: ignore[arg-type]
    assert {"mode_collapse", "phrases"} <= fired(report)
    (phrases,) = [alarm for alarm in report.alarms if alarm.monitor == "phrases" and not alarm.over]
    assert "of completions at first" in phrases.examples[0]


@pytest.mark.slow
def test_thirty_times_the_learning_rate_is_seen_at_the_first_step(
    make_learner: Callable[[int], Trunk], tmp_path: Path
) -> None:
    report, _ = ran(
        make_learner(0), tmp_path, reward=ids_from(0, 64), learning_rate=30 * CLEAN.learning_rate, num_steps=2
    )
    first = [alarm for alarm in report.alarms if alarm.step == 0]
    assert "approx_kl" in {alarm.monitor for alarm in first}
    assert any("lower `policy_update.algorithm.learning_rate`" in alarm.sentence.lower() for alarm in first)


class TopOne:
    """A sampler with top-k = 1: it takes the likeliest token every time, whatever the temperature."""

    @torch.no_grad()
    def sample(
        self, trunk: Trunk, role: str, prompts: Sequence[Sequence[int]], *rest: object
    ) -> list[Sample]:
        """One response for each prompt, of three tokens or up to an end token."""
        return [self._one(trunk, role, prompt) for prompt in prompts]

    def _one(self, trunk: Trunk, role: str, prompt: Sequence[int]) -> Sample:
        ids: list[int] = []
        while len(ids) < SAMPLING.max_new_tokens:
            with trunk.role(role):
                ids.append(int(logits(trunk, [*prompt, *ids])[-1].argmax()))
            if ids[-1] in trunk.codec.eos_ids:
                return Sample(ids, StopReason.EOS)
        return Sample(ids, StopReason.LENGTH)


def logits(trunk: Trunk, ids: Sequence[int]) -> Tensor:
    found: Tensor = trunk.model(input_ids=torch.tensor([list(ids)])).logits[0]
    return found


def make_unsure(trunk: Trunk, top: TopOne) -> None:
    """Teaches the policy the reference's own distributions at twice the temperature, where it is sampled.

    A policy that has become less sure than its reference, as under an entropy bonus.
    """
    likeliest = complete(top, trunk, "reference", prompts(8), [[0]] * 8, SAMPLING)
    rows = [([*c.prompt_ids, *c.response_ids], len(c.prompt_ids) - 1) for c in likeliest]
    with torch.no_grad(), trunk.role("reference"):
        targets = [(logits(trunk, ids)[start:-1] / 2).softmax(-1) for ids, start in rows]
    adam = torch.optim.Adam(trunk.parameters("policy").values(), lr=1e-2)
    for _ in range(40):
        adam.zero_grad()
        with trunk.role("policy"):
            for (ids, start), target in zip(rows, targets, strict=True):
                (-(target * logits(trunk, ids)[start:-1].log_softmax(-1)).sum() / 24).backward()  # type: ignore[no-untyped-call]
        adam.step()
    adam.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "seen"), [(TopOne(), True), (HFGenerator(), False)])
def test_top_k_1_makes_kl_negative_and_is_seen_to(
    make_learner: Callable[[int], Trunk], tmp_path: Path, sampler: Generator, seen: bool
) -> None:
    trunk = make_learner(0)
    make_unsure(trunk, TopOne())
    trunk.copy_role("policy", "start")
    how = {"reward": ids_from(0, 64), "num_steps": 1, "num_prompts": 8, "moved": True}
    report, _ = ran(trunk, tmp_path, generator=sampler, **how)  # type: ignore[arg-type]
    # At its own likeliest tokens an unsure policy has log pi < log reference; over all tokens it never has.
    said = [alarm.sentence for alarm in report.alarms if alarm.monitor == "negative_kl"]
    assert ["top-k" in sentence for sentence in said] == [True] * seen


class Stale(HFGenerator):
    """Still samples from the reference: the policy's weights never reached it."""

    def sample(
        self, trunk: Trunk, role: str, prompts: Sequence[Sequence[int]], *rest: object
    ) -> list[Sample]:  # type: ignore[override]
        """One response for each prompt, of the wrong policy."""
        return super().sample(trunk, "reference", prompts, *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_samples_of_another_policy_are_seen_by_their_negative_kl(
    make_roles: Make, make_data: Callable[..., PolicyData], estimator: KLEstimator
) -> None:
    trunk, data = make_roles(policy_moved=True), make_data(from_reference=False, generator=Stale())
    algorithm = PPOAlgorithm(PPO(rollouts_per_step=10, kl_estimator=estimator), Sampling(max_new_tokens=10))
    # Under samples of the reference the mean of log policy - log reference is -KL(reference || policy).
    (alarm,) = Watcher({"kl": NegativeKL()}).step(2, algorithm.experience(2, trunk, data, {}), {})
    assert alarm.line.startswith("step 2: kl: mean KL to the reference in nats a token is -")
