"""Candidate against champion: nothing between a policy and itself, and KL by its definition."""

from collections.abc import Callable

import pytest
import torch

from rlhf_core.evals.held_out import Sampled
from rlhf_core.records import Completion, Measurement
from rlhf_core.rewards.model import ModelReward
from rlhf_core.sources import read_rows
from rlhf_core.stages.comparison import Compare, ComparisonReport, kl_to
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.stages.chain import Chain, completion


def compared(chain: Chain) -> ComparisonReport:
    folder = chain.open(chain.made["comparison"]["comparison"])
    return ComparisonReport.model_validate_json((folder / "comparison.json").read_bytes())


def against_itself(played: Chain, who: str, policy: str) -> ComparisonReport:
    """The comparison of a policy of the played round with itself."""
    chain = Chain(played.root, played.execution)
    job = played.jobs["comparison"]
    measured = played.made[f"measurement.{who}"]["measurements"]
    inputs = {
        **job.inputs,
        "candidate": measured,
        "champion": measured,
        "champion_policy": played.made[policy]["policy"],
    }
    chain.run("comparison", Compare.model_validate(job.settings), inputs)
    return compared(chain)


def test_between_a_policy_and_itself_there_is_nothing(played: Chain) -> None:
    metrics = against_itself(played, "candidate", "policy_update").metrics
    wins = metrics["eval/win_rate"]
    assert (wins.value, wins.low, wins.high) == (0.5, 0.5, 0.5)
    assert metrics["eval/kl_to_champion"].value == 0
    differences = {name: e.value for name, e in metrics.items() if name.endswith("_minus_champion")}
    assert len(differences) == 5 and set(differences.values()) == {0.0}
    ratios = {name: e.value for name, e in metrics.items() if name.endswith("_over_champion")}
    assert len(ratios) == 3 and set(ratios.values()) == {1.0}
    assert metrics["eval/proxy_after"] == metrics["eval/proxy_before"]


def test_in_a_first_round_champion_and_initial_policy_are_one(played: Chain) -> None:
    metrics = compared(played).metrics
    # One sums differences, the other takes the difference of sums of about -45: float32 rounds both.
    to_champion, to_initial = metrics["eval/kl_to_champion"].value, metrics["eval/kl_to_initial"].value
    assert to_champion == pytest.approx(to_initial, abs=1e-4)
    assert abs(to_champion) > 1e-3
    for name in ("gold", "response_length", "kl_to_initial"):
        assert metrics[f"eval/{name}_minus_champion"] == metrics[f"eval/{name}_minus_initial"]
    before, after = metrics["eval/gold_before"].value, metrics["eval/gold_after"].value
    assert metrics["eval/gold_initial"].value == before
    assert metrics["eval/gold_minus_champion"].value == pytest.approx(after - before)


def test_every_held_out_completion_has_a_judgement(played: Chain) -> None:
    folder = played.open(played.made["comparison"]["comparison"])
    wins = read_rows(folder / "wins.parquet", Measurement)
    assert len(wins) == 12 and len({w.item for w in wins}) == 12
    assert compared(played).metrics["eval/win_rate"].value == pytest.approx(sum(w.value for w in wins) / 12)


@pytest.mark.parametrize(("end", "who"), [("before", "champion"), ("after", "candidate")])
def test_the_proxy_of_every_completion_is_kept_and_its_mean_is_the_one_told(
    played: Chain, end: str, who: str
) -> None:
    folder = played.open(played.made["comparison"]["comparison"])
    rows = [r for r in read_rows(folder / "scores.parquet", Measurement) if r.metric == f"proxy_{end}"]
    sampled = played.open(played.made[f"measurement.{who}"]["measurements"]) / "completions.parquet"
    completions = read_rows(sampled, Completion)
    trunk = played.trunk()
    trunk.load_role("reward", played.open(played.made["reward_modeling"]["reward_model"]))
    scores = ModelReward(trunk).score(completions).total.tolist()
    assert {r.item: r.value for r in rows} == pytest.approx(
        {c.id: score for c, score in zip(completions, scores, strict=True)}, rel=1e-5
    )
    assert compared(played).metrics[f"eval/proxy_{end}"].value == pytest.approx(sum(scores) / len(scores))


def by_definition(
    trunk: Trunk, role: str, prompt: list[int], response: list[int], temperature: float
) -> float:
    """log pi(response) of a role, from the model's own logits, token by token."""
    with torch.no_grad(), trunk.role(role):
        logits = trunk.model(input_ids=torch.tensor([prompt + response])).logits[0]
    logs = torch.log_softmax(logits.double() / temperature, -1)
    return sum(logs[len(prompt) + t - 1, token].item() for t, token in enumerate(response))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_to_the_champion_is_the_log_ratio_of_the_two(
    make_trunk: Callable[..., Trunk], stir: Callable[..., None], temperature: float
) -> None:
    trunk = make_trunk()
    for seed, role in enumerate(("policy", "start")):
        trunk.add_role(role, Lora(rank=2), 0)
        stir(trunk, role, seed)
    completions = [completion("p", 0, "abc"), completion("p", 1, "a longer one")]
    logs = {
        role: [by_definition(trunk, role, c.prompt_ids, c.response_ids, temperature) for c in completions]
        for role in ("policy", "start")
    }
    direct = [own - other for own, other in zip(logs["policy"], logs["start"], strict=True)]
    assert all(abs(value) > 0.1 for value in direct)
    sampled = Sampled(completions, logprob=logs["policy"], kl_to_initial=[0.0, 0.0], base_nll=[0.0, 0.0])
    # Sums of float32 logs of about -100: 1e-4 absolute is their rounding.
    assert kl_to(trunk, "start", sampled, temperature) == pytest.approx(direct, abs=1e-4)
