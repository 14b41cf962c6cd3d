"""Every pair worth a label, in an order that favours neither side."""

from itertools import combinations
from pathlib import Path

import pytest

from rlhf_core.records import Completion
from rlhf_core.stages.pairing import Pairing, pair
from tests.rlhf_core.stages.chain import Chain, completion

GROUPS = [completion(f"p{n}", k, f"{n} and {k}") for n in range(50) for k in range(4)]


def sides(completions: list[Completion], settings: Pairing, seed: int = 0) -> list[tuple[str, str]]:
    return [(c.completion_a, c.completion_b) for c in pair(completions, settings, seed)]


def test_four_completions_give_six_pairs() -> None:
    # 4 * 3 / 2 = 6, each once, whichever side comes first.
    found = {frozenset(both) for both in sides(GROUPS[:4], Pairing())}
    assert found == {frozenset(both) for both in combinations(["p0/0", "p0/1", "p0/2", "p0/3"], 2)}
    assert len(sides(GROUPS, Pairing())) == 50 * 6


def test_no_pair_crosses_prompts_or_has_equal_texts() -> None:
    texts = [completion("p", k, text) for k, text in enumerate(["yes", " yes\n", "no", "yes"])]
    # Only "no" differs from the others, so of the six pairs three are left.
    assert {frozenset(both) for both in sides(texts, Pairing())} == {
        frozenset(("p/2", other)) for other in ("p/0", "p/1", "p/3")
    }
    assert all(c.completion_a.startswith(f"{c.prompt_id}/") for c in pair(GROUPS, Pairing(), 0))
    assert all(c.completion_b.startswith(f"{c.prompt_id}/") for c in pair(GROUPS, Pairing(), 0))


def test_both_orders_are_shown_about_equally_often() -> None:
    # 300 fair coins: 150 heads with a standard deviation of 8.7; four of them to each side.
    firsts = sum(a < b for a, b in sides(GROUPS, Pairing()))
    assert firsts == pytest.approx(150, abs=35)
    assert sides(GROUPS, Pairing(), seed=1) != sides(GROUPS, Pairing())


@pytest.mark.parametrize("wanted", [1, 4, 6, 9])
def test_pairs_per_prompt_is_the_most_a_prompt_gives(wanted: int) -> None:
    found = pair(GROUPS, Pairing(pairs_per_prompt=wanted), 0)
    by_prompt = [[c for c in found if c.prompt_id == f"p{n}"] for n in range(50)]
    assert [len(pairs) for pairs in by_prompt] == [min(wanted, 6)] * 50
    assert all(len({frozenset((c.completion_a, c.completion_b)) for c in p}) == len(p) for p in by_prompt)


def test_the_pairs_of_a_prompt_depend_on_it_alone() -> None:
    settings = Pairing(pairs_per_prompt=2)
    alone = [both for n in range(50) for both in sides(GROUPS[4 * n : 4 * n + 4], settings)]
    assert sorted(sides(GROUPS[::-1], settings)) == sorted(alone)


def test_completions_that_are_all_the_same_are_refused(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    same = chain.rows({"completions": [completion("p", k, "yes") for k in range(4)]}, "completions")
    with pytest.raises(ValueError, match="4 completions give no pair to compare"):
        chain.run("pairing", Pairing(), {"completions": same})
    assert list((tmp_path / "store" / "tmp").iterdir()) == []
