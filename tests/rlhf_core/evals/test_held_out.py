"""What is measured of a policy: sums of log-probabilities, rows for each item, means that can be paired."""

from collections.abc import Callable
from math import exp

import pytest
import torch

from rlhf_core.evals.held_out import HeldOut, Sampled, means, paired_differences, text_numbers
from rlhf_core.generation import Sampling
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.records import Measurement, Prompt, StopReason
from rlhf_core.rewards import RegexMatch
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.stages.chain import completion

GOLD = RegexMatch(pattern="a", mode="count")
PROMPTS = [Prompt(id="p", text="One"), Prompt(id="q", text="Two, and longer")]


def row(metric: str, item: str, value: float) -> Measurement:
    return Measurement(metric=metric, item=item, prompt_id=item.split("/")[0], value=value)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sums_of_log_probabilities_by_definition(
    make_trunk: Callable[..., Trunk], stir: Callable[..., None], temperature: float
) -> None:
    trunk = make_trunk()
    trunk.add_role("policy", Lora(rank=2), 0)
    stir(trunk, "policy")
    held_out = HeldOut(sampling=Sampling(max_new_tokens=6, temperature=temperature), gold=GOLD)
    sampled = held_out.sample(trunk, HFGenerator(), PROMPTS, [[1, 2], [3, 4]], lambda done, total: None)
    assert [c.id for c in sampled.completions] == ["p/0", "p/1", "q/0", "q/1"]

    def logprob(role: str, number: int, heat: float) -> float:
        c = sampled.completions[number]
        with torch.no_grad(), trunk.role(role):
            logits = trunk.model(input_ids=torch.tensor([c.prompt_ids + c.response_ids])).logits[0]
        logs = torch.log_softmax(logits.double() / heat, -1)
        return sum(logs[len(c.prompt_ids) + t - 1, i].item() for t, i in enumerate(c.response_ids))

    # float32 sums of at most 6 logs each.
    for n in range(4):
        own, initial = logprob("policy", n, temperature), logprob("reference", n, temperature)
        assert sampled.logprob[n] == pytest.approx(own, abs=1e-4)
        assert sampled.kl_to_initial[n] == pytest.approx(own - initial, abs=1e-4)
        assert sampled.base_nll[n] == pytest.approx(-logprob("reference", n, 1.0), abs=1e-4)


def test_every_metric_has_a_row_for_each_completion() -> None:
    ended = completion("q", 0, "b").model_copy(update={"stop": StopReason.EOS})
    sampled = Sampled(
        [completion("p", 0, "aab"), ended],
        logprob=[-1.0, -2.0],
        kl_to_initial=[0.5, 0.0],
        base_nll=[3.0, 2.0],
    )
    assert HeldOut(gold=GOLD).measure(sampled) == [
        *(row("base_nll", "p/0", 3), row("base_nll", "q/0", 2)),
        *(row("gold", "p/0", 2), row("gold", "q/0", 0)),
        *(row("kl_to_initial", "p/0", 0.5), row("kl_to_initial", "q/0", 0)),
        *(row("response_length", "p/0", 3), row("response_length", "q/0", 1)),
        *(row("stop_eos", "p/0", 0), row("stop_eos", "q/0", 1)),
    ]
    assert "gold" not in {r.metric for r in HeldOut(gold=None).measure(sampled)}


def test_perplexity_is_over_tokens_and_not_over_completions() -> None:
    completions = [completion("p", 0, "a b c"), completion("q", 0, "a b")]
    rows = [row("base_nll", "p/0", 9.0), row("base_nll", "q/0", 7.0), row("gold", "p/0", 100.0)]
    # 16 nats over 5 + 3 bytes: exp(2). Bigrams ab, bc, ab: 2 different of 3.
    assert text_numbers(completions, rows) == pytest.approx({"perplexity": exp(2), "distinct_2": 2 / 3})


def test_means_are_of_items_and_their_intervals_of_prompts() -> None:
    # Two prompts: any draw of two of them has mean 0, 1 or 2, so the interval spans all.
    found = means(
        [row("gold", f"{p}/{k}", value) for p, value in (("p", 0.0), ("q", 2.0)) for k in (0, 1)], 0
    )
    assert (found["gold"].value, found["gold"].low, found["gold"].high) == (1, 0, 2)


def test_differences_are_paired_by_item_whatever_the_order() -> None:
    ours = [row("gold", "p/0", 3), row("gold", "q/0", 10), row("kl", "p/0", 1)]
    theirs = [row("gold", "q/0", 9), row("gold", "p/0", 2)]
    found = paired_differences(ours, theirs, 0)
    # 3 - 2 and 10 - 9: a difference of 1 without any spread; kl is measured on one side only.
    assert {name: (e.value, e.low, e.high) for name, e in found.items()} == {"gold": (1, 1, 1)}
