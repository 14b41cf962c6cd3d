"""Measurement sees what a policy does, and nothing of who it is."""

from math import exp

import pytest

from rlhf_core.evals.held_out import HeldOut
from rlhf_core.stages.bootstrap import BootstrapJob
from rlhf_core.stages.measurement import Numbers
from tests.rlhf_core.stages.chain import SEED, Chain


def numbers(chain: Chain, who: str) -> Numbers:
    folder = chain.open(chain.made[f"measurement.{who}"]["measurements"])
    return Numbers.model_validate_json((folder / "numbers.json").read_bytes())


def test_policies_that_do_the_same_measure_the_same(played: Chain) -> None:
    chain = Chain(played.root, played.execution)
    settings = BootstrapJob.model_validate(played.jobs["bootstrap"].settings)
    other = chain.run("bootstrap", settings, {}, seed=SEED + 1)  # another A, and B = 0: the bare trunk again
    assert other["trunk"].digest == played.made["bootstrap"]["trunk"].digest
    assert other["policy"].digest != played.made["bootstrap"]["policy"].digest

    job = played.jobs["measurement.champion"]
    inputs = {**job.inputs, "policy": other["policy"]}
    made = chain.run("measurement", _held_out(played), inputs)
    assert made["measurements"].digest == played.made["measurement.champion"]["measurements"].digest


def _held_out(played: Chain) -> HeldOut:
    return HeldOut.model_validate(played.jobs["measurement.champion"].settings)


def test_the_initial_policy_has_moved_nowhere(played: Chain) -> None:
    found = numbers(played, "champion").metrics["kl_to_initial"]
    assert (found.value, found.low, found.high) == (0, 0, 0)
    assert numbers(played, "candidate").metrics["kl_to_initial"].value != 0


def test_a_mean_lies_in_its_interval_and_a_ratio_has_none(played: Chain) -> None:
    metrics = numbers(played, "candidate").metrics
    assert set(metrics) == {
        *("kl_to_initial", "base_nll", "response_length", "stop_eos", "gold"),
        *("perplexity", "distinct_2"),
    }
    assert metrics["gold"].low < metrics["gold"].value < metrics["gold"].high
    assert metrics["perplexity"].low == metrics["perplexity"].high
    # Every completion has 8 tokens unless it ended, and a token of 260 costs about ln 260 = 5.56 nats.
    tokens = metrics["response_length"].value
    assert metrics["perplexity"].value == pytest.approx(exp(metrics["base_nll"].value / tokens))
    assert 100 < metrics["perplexity"].value < 1000
