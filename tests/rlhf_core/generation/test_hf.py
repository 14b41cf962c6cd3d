"""Samples are drawn from the role's own distribution, row by row, and end where the model ends them."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import GenerationConfig

from rlhf_core.artifacts import derive_seed
from rlhf_core.generation import Sample, Sampling, check_lengths, complete
from rlhf_core.generation.hf import HFGenerator, InverseTransform
from rlhf_core.models import TinyModel
from rlhf_core.records import Message, Prompt, StopReason
from rlhf_core.trunk import Lora, Trunk

MakeTrunk = Callable[..., Trunk]
PROMPTS = [[65 + (7 * i + j) % 60 for j in range(1 + (11 * i) % 37)] for i in range(40)]  # 1 to 37 tokens
SEEDS = [derive_seed("row", i) for i in range(40)]


@pytest.fixture
def trunk(make_trunk: MakeTrunk, stir: Callable[..., None]) -> Trunk:
    """A trunk whose policy has moved."""
    made = make_trunk()
    made.add_role("policy", Lora(rank=4, alpha=8.0), seed=0)
    stir(made, "policy")
    return made


def sample(
    trunk: Trunk, prompts: Sequence[Sequence[int]], seeds: Sequence[int], role: str = "policy", **how: float
) -> list[Sample]:
    return HFGenerator().sample(trunk, role, prompts, seeds, Sampling.model_validate(how))


def equal_share(found: Sequence[Sample], wanted: Sequence[Sample]) -> float:
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)


# Ends


def test_a_sample_ends_with_its_first_end_token_or_is_cut_without_one(trunk: Trunk) -> None:
    samples = sample(trunk, PROMPTS * 3, [derive_seed("end", i) for i in range(120)], max_new_tokens=48)
    ends = set(trunk.codec.eos_ids)
    assert len(ends) == 2
    finished = [s for s in samples if s.stop is StopReason.EOS]
    cut = [s for s in samples if s.stop is StopReason.LENGTH]
    assert {s.ids[-1] for s in finished} == ends  # each of the model's end tokens ends a sample, and is kept
    assert not any(ends & set(s.ids[:-1]) for s in finished)
    assert len(cut) > 10
    assert all(len(s.ids) == 48 and not ends & set(s.ids) for s in cut)


def test_an_end_token_at_the_very_limit_is_an_end(trunk: Trunk) -> None:
    samples = sample(trunk, PROMPTS, SEEDS, max_new_tokens=48)
    row = next(i for i, s in enumerate(samples) if s.stop is StopReason.EOS and len(s.ids) > 2)
    ids = samples[row].ids
    at_limit, before = (
        sample(trunk, [PROMPTS[row]], [SEEDS[row]], max_new_tokens=n)[0] for n in (len(ids), len(ids) - 1)
    )
    assert at_limit == Sample(ids, StopReason.EOS)
    assert before == Sample(ids[:-1], StopReason.LENGTH)


# A row's randomness is its own


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_sample_does_not_depend_on_what_is_decoded_beside_it(trunk: Trunk) -> None:
    together = sample(trunk, PROMPTS, SEEDS, max_new_tokens=24)
    alone = [sample(trunk, [PROMPTS[i]], [SEEDS[i]], max_new_tokens=24)[0] for i in range(0, 40, 2)]
    assert equal_share(alone, together[::2]) >= 0.99
    assert equal_share(sample(trunk, PROMPTS, SEEDS, max_new_tokens=24, batch_size=7), together) >= 0.99


def test_a_sample_does_not_depend_on_its_place(trunk: Trunk) -> None:
    together = sample(trunk, PROMPTS, SEEDS, max_new_tokens=24, batch_size=8)
    order = random.Random(0).sample(range(40), 40)
    moved = sample(
        trunk, [PROMPTS[i] for i in order], [SEEDS[i] for i in order], max_new_tokens=24, batch_size=8
    )
    assert equal_share(moved, [together[i] for i in order]) >= 0.99


def test_another_seed_gives_another_sample(trunk: Trunk) -> None:
    samples = sample(trunk, [PROMPTS[7]] * 20, SEEDS[:20], max_new_tokens=24)
    assert len({tuple(s.ids) for s in samples}) == 20


def test_a_shorter_limit_gives_the_beginning_of_the_same_sample(trunk: Trunk) -> None:
    long, short = (sample(trunk, PROMPTS, SEEDS, max_new_tokens=n) for n in (24, 9))
    assert sum(a.ids[:9] == b.ids for a, b in zip(long, short, strict=True)) / 40 >= 0.99


def test_the_global_generator_is_left_alone(trunk: Trunk) -> None:
    before = torch.get_rng_state()
    first = sample(trunk, PROMPTS[:4], SEEDS[:4], max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert sample(trunk, PROMPTS[:4], SEEDS[:4], max_new_tokens=8) == first


# The distribution


@torch.no_grad()
def next_token(trunk: Trunk, prompt: list[int], temperature: float, role: str = "policy") -> torch.Tensor:
    """The exact distribution of the token after the prompt, by a plain forward pass of a role."""
    with trunk.role(role):
        logits = trunk.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    return (logits.double() / temperature).softmax(-1)


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; tokens expected fewer than five times are one class."""
    expected = p * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return ((observed - expected).square() / expected).sum().item(), len(expected) - 1


@pytest.mark.parametrize("weights", ["lora", "full"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_as_frequent_as_the_model_says(trunk: Trunk, temperature: float) -> None:
    prompt = PROMPTS[5]
    # Beside prompts that are longer, so that the one that is counted is padded on the left.
    prompts = [prompt] * 4000 + [PROMPTS[10]] * 8
    seeds = [derive_seed("frequency", i) for i in range(len(prompts))]
    samples = sample(
        trunk, prompts, seeds, max_new_tokens=1, temperature=temperature, batch_size=len(prompts)
    )
    counts = torch.bincount(torch.tensor([s.ids[0] for s in samples[:4000]]), minlength=260)
    # Chi-square with k degrees of freedom has mean k and variance 2 k.
    statistic, freedom = chi_square(counts, next_token(trunk, prompt, temperature))
    assert freedom > 20
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
    # The test would see the other temperature, and a policy that has not moved.
    wrong = [
        next_token(trunk, prompt, 1.7 - temperature),
        next_token(trunk, prompt, temperature, "reference"),
    ]
    for statistic, freedom in (chi_square(counts, p) for p in wrong):
        assert statistic > freedom + 8 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (0.19, 1), (0.21, 2), (0.49, 2), (0.51, 4), (0.9999, 4)],
)
def test_a_uniform_number_is_inverted_and_an_impossible_token_is_never_drawn(
    uniform: float, token: int
) -> None:
    # p = 0, 0.2, 0.3, 0, 0.5, 0: cumulative 0, 0.2, 0.5, 0.5, 1, 1.
    logits = torch.tensor([[0.0, 0.2, 0.3, 0.0, 0.5, 0.0]]).log()
    draw = InverseTransform(torch.tensor([[uniform]]), prompt_width=3, temperature=1.0)
    assert draw(torch.zeros(1, 3, dtype=torch.long), logits).argmax().item() == token


def test_the_temperature_divides_the_logits() -> None:
    # Logits 0 and log 3 at T = 1/2 are 0 and 2 log 3: p = 1/10 and 9/10.
    logits = torch.tensor([[1.0, 3.0]]).log()
    found = [
        InverseTransform(torch.tensor([[uniform]]), 1, 0.5)(torch.zeros(1, 1, dtype=torch.long), logits)
        for uniform in (0.099, 0.101)
    ]
    assert [scores.argmax().item() for scores in found] == [0, 1]


def test_the_defaults_that_a_model_brings_along_change_nothing(trunk: Trunk) -> None:
    wanted = sample(trunk, PROMPTS, SEEDS, max_new_tokens=12)
    own = GenerationConfig(
        do_sample=True, top_k=1, temperature=0.1, repetition_penalty=9.0, no_repeat_ngram_size=1, 
        min_length=99, suppress_tokens=list(range(97, 123)), eos_token_id=[65], max_length=3,
    )  # fmt: skip
    trunk.model.generation_config = own
    assert sample(trunk, PROMPTS, SEEDS, max_new_tokens=12) == wanted
    assert trunk.model.generation_config is own


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_samples_come_from_the_role_that_is_asked_for(trunk: Trunk, weights: str) -> None:
    moved = sample(trunk, PROMPTS, SEEDS, max_new_tokens=12)
    still = sample(trunk, PROMPTS, SEEDS, role="reference", max_new_tokens=12)
    assert equal_share(moved, still) < 0.5
    # One weight of the role, and nothing that was sampled before is remembered.
    name = {"lora": "lora_B.weight", "full": "weight"}[weights]
    weight = trunk.parameters("policy")[f"model.layers.1.mlp.down_proj.{name}"]
    with torch.no_grad():
        weight[0, 0] += 3
    assert equal_share(sample(trunk, PROMPTS, SEEDS, max_new_tokens=12), moved) < 1
    assert sample(trunk, PROMPTS, SEEDS, role="reference", max_new_tokens=12) == still


# Completions


def test_completions_carry_the_ids_they_were_sampled_with_in_the_order_of_the_prompts(trunk: Trunk) -> None:
    prompts = [
        Prompt(id="long", text="Once upon a time there was"),
        Prompt(id="chat", messages=(Message(role="user", content="Hello"),)),
        Prompt(id="short", text="A"),
    ]
    seeds = [[1, 2], [3], [4, 5]]
    completions = complete(HFGenerator(), trunk, "policy", prompts, seeds, Sampling(max_new_tokens=9))
    assert [c.id for c in completions] == ["long/0", "long/1", "chat/0", "short/0", "short/1"]
    by_id = {prompt.id: prompt for prompt in prompts}
    flat = [seed for row in seeds for seed in row]
    for completion, seed in zip(completions, flat, strict=True):
        assert completion.prompt_ids == trunk.codec.encode_prompt(by_id[completion.prompt_id])
        (alone,) = sample(trunk, [completion.prompt_ids], [seed], max_new_tokens=9)
        assert (completion.response_ids, completion.stop) == (alone.ids, alone.stop)
        assert completion.text == trunk.codec.decode(completion.response_ids)
        assert completion.prompt_text == by_id[completion.prompt_id].shown


def test_progress_counts_all_rows(trunk: Trunk) -> None:
    seen: list[tuple[int, int]] = []
    HFGenerator().sample(
        trunk, "policy", PROMPTS[:5], SEEDS[:5], Sampling(max_new_tokens=1, batch_size=2),
        lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_prompts_that_leave_no_room_are_refused_by_name(make_trunk: MakeTrunk) -> None:
    trunk = make_trunk(model=TinyModel(hidden_size=32, num_layers=1, context_length=32))
    fits, long = Prompt(id="fits", text="x" * 22), Prompt(id="too-long", text="x" * 23)
    assert check_lengths(trunk.codec, [fits], 10) == [trunk.codec.encode_prompt(fits)]
    with pytest.raises(ValueError, match=r"1 prompts leave no room for 10 new .* 32: too-long \(23 tokens\)"):
        complete(HFGenerator(), trunk, "reference", [fits, long], [[0], [0]], Sampling(max_new_tokens=10))
