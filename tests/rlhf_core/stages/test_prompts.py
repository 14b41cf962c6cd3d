"""Three pools that never share a prompt, whatever is drawn from them."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.records import Prompt
from rlhf_core.sources import read_rows
from rlhf_core.stages.prompts import POOLS, PromptDraw, pool_of, split
from tests.rlhf_core.stages.chain import Chain

PROMPTS = [Prompt(id=f"p{n}", text=f"The number {n} is") for n in range(200)]
DRAW = PromptDraw(labelling=20, policy=10, held_out=15)


def ids(prompts: list[Prompt]) -> dict[str, list[str]]:
    pools = split([prompt.id for prompt in prompts], DRAW)
    return {pool: [prompts[place].id for place in places] for pool, places in pools.items()}


def drawn(tmp_path: Path, seed: int) -> dict[str, list[str]]:
    chain = Chain(tmp_path)
    source = chain.rows({"prompts": PROMPTS}, "prompt_source")
    made = chain.run("prompts", DRAW, {"source": source}, seed=seed)
    return {
        pool: [p.id for p in read_rows(chain.open(made[f"{pool}_prompts"]) / "prompts.parquet", Prompt)]
        for pool in POOLS
    }


def test_each_prompt_is_in_one_pool() -> None:
    pools = ids(PROMPTS)
    assert sorted(name for pool in pools.values() for name in pool) == sorted(p.id for p in PROMPTS)
    assert list(pools) == list(POOLS)
    # Binomial with n = 200: shares 0.4, 0.3 and 0.3 within four standard deviations, below 0.035 each.
    assert [len(pools[pool]) / 200 for pool in POOLS] == pytest.approx([0.4, 0.3, 0.3], abs=0.14)


@settings(max_examples=10)
@given(st.integers(1, 100), st.randoms(use_true_random=False))
def test_more_prompts_move_none_and_their_order_is_nothing(num_more: int, random: Random) -> None:
    more = [Prompt(id=f"q{n}", text="And") for n in range(num_more)] + PROMPTS
    random.shuffle(more)
    found, before = ids(more), ids(PROMPTS)
    assert {pool: [name for name in names if name[0] == "p"] for pool, names in found.items()} == before


def test_no_pool_share_leaves_a_prompt_out() -> None:
    # The labelling pool takes [0, 0.9), held out [0.9, 0.95): a larger share only ever takes in more.
    wider = PromptDraw(labelling_share=0.9, held_out_share=0.05)
    assert all(
        pool_of(p.id, wider) == "labelling"
        for p in PROMPTS
        if pool_of(p.id, DRAW) in ("labelling", "held_out")
    )


def test_every_round_measures_on_the_same_prompts_and_labels_others(tmp_path: Path) -> None:
    one, other = drawn(tmp_path, 1), drawn(tmp_path, 2)
    assert one["held_out"] == other["held_out"]
    assert one["policy"] == other["policy"]
    assert set(one["labelling"]) != set(other["labelling"])
    assert {pool: len(set(names)) for pool, names in one.items()} == {
        "labelling": 20,
        "policy": 10,
        "held_out": 15,
    }
    assert all(pool_of(name, DRAW) == pool for pool, names in one.items() for name in names)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (
            PromptDraw(labelling=150),
            r"the labelling pool has \d+ of the source's 200 prompts, and a round wants 150",
        ),
        (PromptDraw(labelling=1, held_out=101), r"the held_out pool has \d+ .* wants 101"),
        (
            PromptDraw(labelling=1, held_out=1, labelling_share=0.5, held_out_share=0.5),
            r"the policy pool has 0 .* wants 1",
        ),
    ],
)
def test_a_pool_that_is_too_small_is_refused_with_its_numbers(draw: PromptDraw, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split([prompt.id for prompt in PROMPTS], draw)
