"""What a step learns from: its prompts are counted, its rows stay together from sampling to score."""

from collections.abc import Callable, Sequence

import pytest
import torch

from rlhf_core.algorithms.experience import Experience, PromptStream, collect_experience
from rlhf_core.algorithms.on_policy import PolicyData
from rlhf_core.batch import RolloutBatch, TextBatch
from rlhf_core.generation import Sample, Sampling
from rlhf_core.generation.hf import HFGenerator
from rlhf_core.records import Completion, Prompt, StopReason
from rlhf_core.rewards.scores import PerCompletion, Scores
from rlhf_core.trunk import Trunk

Make = Callable[..., Trunk]
MakeData = Callable[..., PolicyData]


# The stream


def ids(stream: PromptStream, *steps: int) -> list[str]:
    return [prompt.id for step in steps for prompt in stream.step(step)]


def test_every_turn_covers_the_pool_once_in_an_order_of_its_own(prompts: list[Prompt]) -> None:
    stream = PromptStream(prompts, seed=0, rollouts_per_step=8, completions_per_prompt=2)
    drawn = ids(stream, *range(5))  # 5 steps of 8 / 2 = 4 prompts: two turns through a pool of 10
    first, second = drawn[:10], drawn[10:]
    assert len(stream.step(0)) == 4
    assert sorted(first) == sorted(second) == sorted(prompt.id for prompt in prompts)
    assert first != second
    assert first != [prompt.id for prompt in prompts]


def test_the_prompts_of_a_step_depend_on_seed_and_step_alone(prompts: list[Prompt]) -> None:
    stream = PromptStream(prompts, 3, 8, 1)
    last = ids(stream, 7)
    assert ids(stream, 0, 1, 7) == ids(stream, 0) + ids(stream, 1) + last
    assert ids(PromptStream(prompts, 3, 8, 1), 7) == last
    assert ids(PromptStream(prompts, 4, 8, 1), 7) != last


def test_a_pool_smaller_than_a_step_is_gone_through_again(prompts: list[Prompt]) -> None:
    assert sorted(ids(PromptStream(prompts[:2], 0, 8, 2), 0)) == ["p0", "p0", "p1", "p1"]


def test_completions_that_do_not_divide_the_rollouts_are_refused(prompts: list[Prompt]) -> None:
    with pytest.raises(ValueError, match="8 does not split into 3 equal parts"):
        PromptStream(prompts, 0, 8, 3).step(0)


# Collecting


class Remembering(HFGenerator):
    """Samples, and keeps what it sampled."""

    def sample(self, trunk: Trunk, role: str, *args: object, **more: object) -> list[Sample]:
        """As the generator itself."""
        self.role, self.samples = role, super().sample(trunk, role, *args, **more)  # type: ignore[arg-type]
        return self.samples


def collect(trunk: Trunk, data: PolicyData, seed: int = 0, temperature: float = 1.0) -> Experience:
    sampling = Sampling(max_new_tokens=12, temperature=temperature, batch_size=5)
    return collect_experience(trunk, data.generator, data.prompts, 2, data.reward, sampling, seed, {})


def test_the_ids_trained_on_are_the_ids_sampled(make_roles: Make, make_data: MakeData) -> None:
    trunk, generator = make_roles(policy_moved=True), Remembering()
    found = collect(trunk, make_data(generator=generator))
    batch = found.batch
    assert generator.role == "policy"
    sampled = [sample.ids for sample in generator.samples]
    assert [
        row[mask].tolist() for row, mask in zip(batch.response_ids, batch.response_mask, strict=True)
    ] == (sampled)
    # Text would not have done: random bytes are not UTF-8, and come back as other tokens.
    assert any(trunk.codec.tokenizer(c.text).input_ids != c.response_ids for c in found.completions)


def test_rows_keep_their_prompt_their_group_and_their_score(
    make_roles: Make, make_data: MakeData, prompts: list[Prompt]
) -> None:
    trunk = make_roles()
    exact = PerCompletion(lambda item: len(item.prompt_ids) + sum(item.response_ids) / 1e4)
    found = collect(trunk, make_data(reward=exact))
    batch = found.batch
    assert batch.group_ids.tolist() == [i // 2 for i in range(20)]
    assert [c.prompt_id for c in found.completions] == [f"p{i // 2}" for i in range(20)]
    assert batch.scores is not None
    for row in range(20):
        query = batch.query_ids[row, : batch.query_lengths[row]].tolist()
        response = batch.response_ids[row][batch.response_mask[row]].tolist()
        assert query == trunk.codec.encode_prompt(prompts[row // 2])
        assert batch.scores[row].item() == pytest.approx(len(query) + sum(response) / 1e4, rel=1e-6)
    assert batch.scores.unique().numel() == 20


def test_completions_of_one_prompt_differ_and_a_seed_gives_them_again(
    make_roles: Make, make_data: MakeData
) -> None:
    trunk = make_roles()
    first, again, other = (
        [c.response_ids for c in collect(trunk, make_data(), seed).completions] for seed in (0, 0, 1)
    )
    assert first == again
    assert not any(a == b for a, b in zip(first, other, strict=True))
    assert not any(a == b for a, b in zip(first[::2], first[1::2], strict=True))


def test_a_fresh_policy_is_the_reference_to_the_bit_and_a_moved_one_is_away_from_it(
    make_roles: Make, make_data: MakeData
) -> None:
    fresh = collect(make_roles(), make_data(), temperature=0.7).batch
    assert fresh.logprobs is not None and fresh.ref_logprobs is not None
    assert torch.equal(fresh.logprobs, fresh.ref_logprobs)
    assert (fresh.logprobs[fresh.response_mask] < 0).all()
    moved = collect(make_roles(policy_moved=True), make_data(), temperature=0.7).batch
    assert moved.logprobs is not None and moved.ref_logprobs is not None
    assert (moved.logprobs - moved.ref_logprobs).sum(-1).mean() > 0  # KL, from the policy's own samples


def test_entropy_is_that_of_the_sampling_temperature(make_roles: Make, make_data: MakeData) -> None:
    hot, cold = (collect(make_roles(), make_data(), temperature=t) for t in (10.0, 0.1))
    # Logits of a few units over 10 are nearly equal: the entropy is nearly that of 260 equal tokens.
    vocabulary = torch.tensor(260.0).log()
    mask = hot.batch.response_mask
    assert (hot.entropy[mask] / vocabulary > 0.9).all() and (hot.entropy[mask] <= vocabulary + 1e-4).all()
    assert cold.entropy[cold.batch.response_mask].mean() < 0.5 * hot.entropy[mask].mean()
    assert not hot.entropy[~mask].any()


def test_a_reward_that_fails_stops_the_step(make_roles: Make, make_data: MakeData) -> None:
    class Failing:
        def score(self, items: Sequence[Completion]) -> Scores:
            raise RuntimeError("the judge is away")

    with pytest.raises(RuntimeError, match="the judge is away"):
        collect(make_roles(), make_data(reward=Failing()))


def test_stops_are_shares_and_lengths_are_tokens(make_batch: Callable[..., TextBatch]) -> None:
    text = make_batch([(3, 4), (3, 2), (3, 6), (3, 1)])
    reasons = [StopReason.EOS, StopReason.LENGTH, StopReason.EOS, StopReason.EOS]
    completions = [
        Completion(
            id=f"{i}", prompt_id="p", prompt_text="p", prompt_ids=[1], response_ids=[1], text="", stop=r
        )
        for i, r in enumerate(reasons)
    ]
    batch = RolloutBatch(**vars(text), group_ids=torch.arange(4))
    assert Experience(completions, batch, torch.zeros(4, 6)).stops() == {
        "rollout/stop.eos": 0.75,
        "rollout/stop.length": 0.25,
        "rollout/response_length": 3.25,  # (4 + 2 + 6 + 1) / 4
    }


def test_sameness_is_counted_by_token_ids_without_the_end_token(make_batch: Make) -> None:
    def completion(number: int, ids: list[int], stop: StopReason) -> Completion:
        return Completion(
            id=f"p/{number}",
            prompt_id="p",
            prompt_text="?",
            prompt_ids=[1],
            response_ids=ids,
            text="",
            stop=stop,
        )

    rows = [([1, 2, 1, 2, 9], StopReason.EOS), ([1, 2, 1, 2], StopReason.LENGTH), ([9], StopReason.EOS)]
    completions = [completion(number, ids, stop) for number, (ids, stop) in enumerate(rows)]
    batch = make_batch([(1, 5), (1, 4), (1, 1)])
    found = Experience(completions, RolloutBatch(**vars(batch), group_ids=torch.zeros(3)), torch.zeros(3, 5))
    # Without 9 two rows are 1 2 1 2 and one is empty. Unigrams: 1 2 of 8; bigrams: 12 21 of 6, trigrams:
    # 121 212 of 4.
    assert found.sameness() == {
        "rollout/distinct_1": 2 / 8,
        "rollout/distinct_2": 2 / 6,
        "rollout/distinct_3": 2 / 4,
        "rollout/self_bleu": pytest.approx(2 / 3),  # two rows are in each other, the empty one is in none
        "rollout/duplicates": pytest.approx(1 / 3),
        "rollout/repetition": 0,
    }
