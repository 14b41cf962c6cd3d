"""The label pool: split by prompt for ever, each completion encoded once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_core.records import Choice
from rlhf_core.rewards.model import ModelReward
from rlhf_core.stages.labels import LabelledGroup, is_held_out, read_groups, split_groups, to_batch
from rlhf_core.trunk import Lora, Trunk
from tests.rlhf_core.stages.chain import Chain, completion, label

CPU = torch.device("cpu")


def group(prompt_id: str, pairs: list[tuple[int, int]], round: int = 1) -> LabelledGroup:
    completions = [completion(prompt_id, k, f"{prompt_id}{'abcd'[k]}") for k in range(4)]
    return LabelledGroup(prompt_id, round, completions, pairs, ties=0)


def test_groups_hold_chosen_and_rejected_whichever_was_shown_first(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    preferences = [
        label("p", 0, 1, Choice.A),
        label("p", 2, 0, Choice.A),
        label("p", 1, 2, Choice.B),
        label("p", 3, 0, Choice.TIE),
        label("o", 0, 1, Choice.B, round=1),
    ]
    completions = [completion(prompt, k, f"{prompt}{k}") for prompt in "po" for k in range(4)]
    ref = chain.rows({"preferences": preferences, "completions": completions}, "preferences")
    first, second = read_groups(chain.open(ref))
    assert (first.prompt_id, first.pairs, first.ties) == ("o", [(1, 0)], 0)
    # 0 over 1, 2 over 0, 2 over 1 (the second shown was chosen), and a tie that is no pair.
    assert (second.prompt_id, second.pairs, second.ties) == ("p", [(0, 1), (2, 0), (2, 1)], 1)
    assert [c.id for c in second.completions] == ["p/0", "p/1", "p/2", "p/3"]


def test_a_prompt_is_on_the_same_side_in_every_round() -> None:
    groups = [group(f"p{n}", [(0, 1)], round) for round in (1, 2) for n in range(100)]
    train, held_out = split_groups(groups, 0.25)
    assert not {g.prompt_id for g in train} & {g.prompt_id for g in held_out}
    assert len(train) + len(held_out) == 200
    # Binomial with n = 100: 25 prompts, and a standard deviation of 4.3, four of them to each side.
    assert len({g.prompt_id for g in held_out}) == pytest.approx(25, abs=18)
    alone, _ = split_groups(groups[:50], 0.25)
    assert alone == train[: len(alone)]


def test_a_larger_share_holds_out_more_and_lets_none_go() -> None:
    for n in range(100):
        sides = [is_held_out(f"p{n}", share) for share in (0.1, 0.25, 0.5, 0.9)]
        assert sides == sorted(sides)


def test_groups_without_a_decided_pair_are_left_out() -> None:
    groups = [group(f"p{n}", [(0, 1)] if n % 2 else []) for n in range(60)]
    assert {g.prompt_id for side in split_groups(groups, 0.5) for g in side} == {
        f"p{n}" for n in range(1, 60, 2)
    }


def test_a_split_with_an_empty_side_is_refused_with_its_numbers() -> None:
    groups = [group(f"p{n}", [(0, 1)]) for n in range(5)]
    with pytest.raises(
        ValueError, match=r"5 prompts with decided pairs split into 5 for training and 0 held"
    ):
        split_groups(groups, 1e-9)
    with pytest.raises(ValueError, match=r"0 prompts with decided pairs"):
        split_groups([group("p", [])], 0.5)


def test_a_reward_model_scores_the_very_rows_that_it_is_trained_on(
    make_trunk: Callable[..., Trunk], stir: Callable[..., None]
) -> None:
    trunk = make_trunk()
    trunk.add_role("reward", Lora(rank=2), 0, head="last")
    stir(trunk, "reward")
    groups = [group("p", [(0, 1), (2, 0)]), group("a longer prompt", [(3, 1)])]
    rows = to_batch(groups, trunk.codec.pad_id, CPU).completions
    used = [groups[0].completions[k] for k in (0, 1, 2)] + [groups[1].completions[k] for k in (1, 3)]
    for row, one in zip(rows.sequences(64, trunk.codec.pad_id).tolist(), used, strict=True):
        ids = [*one.prompt_ids, *one.response_ids]
        assert row == ids + [trunk.codec.pad_id] * (64 - len(ids))
    with torch.no_grad(), trunk.role("reward"):
        in_training = trunk.scores(rows)
    assert torch.equal(ModelReward(trunk).score(used).total, in_training)


def test_a_batch_has_each_completion_once_and_its_pairs_point_at_them() -> None:
    groups = [group("p", [(0, 1), (2, 0), (2, 1)]), group("q", [(3, 1)])]
    batch = to_batch(groups, 256, CPU)
    rows = [bytes(row).decode() for row in batch.completions.response_ids.tolist()]
    # p: a, b and c are in pairs; q: b and d are; nothing else is encoded.
    assert rows == ["pa", "pb", "pc", "qb", "qd"]
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1]
    assert [(rows[c], rows[r]) for c, r in zip(batch.chosen, batch.rejected, strict=True)] == [
        ("pa", "pb"),
        ("pc", "pa"),
        ("pc", "pb"),
        ("qd", "qb"),
    ]
    assert (len(batch), batch.weight) == (2, 4)
