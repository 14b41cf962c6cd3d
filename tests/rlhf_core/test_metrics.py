import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.metrics import (
    Spool,
    SpoolEnds,
    WeightedMeans,
    clustered_mean,
    clustered_wilson,
    read_lines,
    timed,
    wilson,
)
from rlhf_core.records import LookedAt, StopReason


def test_wilson_by_hand() -> None:
    # z^2 = 3.84146. Centre (0.8 + 0.192073) / 1.384146 = 0.716740;
    # half 1.959964 / 1.384146 * sqrt(0.016 + 0.009604) = 0.226577. Published for 8 of 10: 0.490 to 0.943.
    interval = wilson(8, 10)
    assert interval.value == 0.8
    assert interval.low == pytest.approx(0.49016, abs=1e-5)
    assert interval.high == pytest.approx(0.94332, abs=1e-5)


def test_wilson_at_the_ends_by_hand() -> None:
    # With no success the upper end is z^2 / (n + z^2) = 3.84146 / 13.84146 = 0.277533.
    assert wilson(0, 10) == pytest.approx((0, 0, 0.277533), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((1, 1 - 0.277533, 1), abs=1e-6)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_wilsons_ends_are_where_the_score_test_just_rejects(total: int, share: float) -> None:
    interval = wilson(share * total, total)
    for end in (interval.low, interval.high):
        spread = 1.959963984540054 * math.sqrt(end * (1 - end) / total)
        assert abs(interval.value - end) == pytest.approx(spread, abs=1e-6)
    assert 0 <= interval.low <= interval.value + 1e-12 and interval.value - 1e-12 <= interval.high <= 1


@pytest.mark.parametrize(("successes", "total"), [(0, 0), (3, 2), (-1, 2), (math.nan, 2)])
def test_wilson_refuses_what_is_no_share(successes: float, total: float) -> None:
    with pytest.raises(ValueError, match="no interval"):
        wilson(successes, total)


def test_the_interval_of_a_constant_or_of_one_cluster_is_a_point() -> None:
    assert clustered_mean([0.25] * 7, list("aabbccc"), seed=0) == (0.25, 0.25, 0.25)
    assert clustered_mean([0.0, 1.0, 5.0], ["a"] * 3, seed=0) == (2.0, 2.0, 2.0)


def test_two_clusters_by_hand() -> None:
    # Draws of {0, 1} with replacement have mean 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    assert clustered_mean([0.0, 1.0, 0.0, 1.0], list("abab"), seed=1) == (0.5, 0.0, 1.0)


def test_a_cluster_counts_with_its_size() -> None:
    # Sums over counts: a alone 0/3, b alone 1/1, both 1/4.
    interval = clustered_mean([0.0, 0.0, 0.0, 1.0], list("aaab"), seed=1)
    assert interval == (0.25, 0.0, 1.0)


def test_single_item_clusters_give_the_plain_bootstrap() -> None:
    values = [random.Random(i).gauss(0, 1) for i in range(400)]
    mean = sum(values) / 400
    standard_error = math.sqrt(sum((value - mean) ** 2 for value in values)) / 400
    interval = clustered_mean(values, [str(i) for i in range(400)], seed=0)
    # The normal interval; 2000 draws know its ends to about 4 % of its half width.
    assert interval.low == pytest.approx(mean - 1.96 * standard_error, abs=0.2 * standard_error)
    assert interval.high == pytest.approx(mean + 1.96 * standard_error, abs=0.2 * standard_error)


def test_repeating_every_item_inside_its_cluster_tells_nothing_new() -> None:
    values, clusters = [0.5, 1.0, -2.0, 0.25, 3.0], list("abcde")
    assert clustered_mean(values * 4, clusters * 4, seed=3) == clustered_mean(values, clusters, seed=3)


def test_correlated_items_give_a_wider_interval_with_their_clusters() -> None:
    per_prompt = [random.Random(i).gauss(0, 1) for i in range(50)]
    values = [level for level in per_prompt for _ in range(4)]
    with_clusters = clustered_mean(values, [str(i // 4) for i in range(200)], seed=0)
    without = clustered_mean(values, [str(i) for i in range(200)], seed=0)
    # Four equal items a cluster: the standard error is sqrt(4) times as large.
    ratio = (with_clusters.high - with_clusters.low) / (without.high - without.low)
    assert ratio == pytest.approx(2, rel=0.15)


def test_the_interval_turns_with_the_sign_and_depends_on_the_seed_alone() -> None:
    values, clusters = [random.Random(i).gauss(0, 1) for i in range(20)], [str(i) for i in range(20)]
    value, low, high = clustered_mean(values, clusters, seed=5)
    assert clustered_mean([-v for v in values], clusters, seed=5) == (-value, -high, -low)
    assert clustered_mean(values[::-1], clusters[::-1], seed=5) == pytest.approx((value, low, high))
    assert low < value < high


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 0.0]])
def test_a_mean_of_nothing_or_of_no_number_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="has no interval"):
        clustered_mean(values, ["a", "b"][: len(values)], seed=0)


def test_every_value_needs_its_cluster() -> None:
    with pytest.raises(ValueError, match="shorter"):
        clustered_mean([1.0, 2.0], ["a"], seed=0)


def test_clustered_wilson_by_hand() -> None:
    # p = 6/10; the clusters' residuals 2 - 1.2, 1 - 2.4, 3 - 2.4 have squares 0.64 + 1.96 + 0.36 = 2.96,
    # so the clustered variance is 2.96 / 10^2 * 3/2 = 0.0444; the independent one 0.24 / 10; deff = 1.85.
    successes, clusters = [1, 1, 0, 0, 0, 1, 1, 1, 1, 0], list("aabbbbcccc")
    assert clustered_wilson(successes, clusters) == pytest.approx(wilson(6 / 1.85, 10 / 1.85))


def test_repeating_every_item_inside_its_cluster_leaves_the_clustered_share_alone() -> None:
    successes, clusters = [1, 0, 0, 1, 1, 0], list("abcdef")
    once = clustered_wilson(successes, clusters)
    assert clustered_wilson(successes * 5, clusters * 5) == pytest.approx(once)
    assert once.high - once.low > 1.5 * (wilson(15, 30).high - wilson(15, 30).low)


def test_items_that_disagree_inside_their_clusters_count_one_by_one() -> None:
    # Every cluster has the mean of all: no variance between them, and deff stays at 1.
    assert clustered_wilson([1, 0, 1, 0, 1, 0], list("aabbcc")) == pytest.approx(wilson(3, 6))


@pytest.mark.parametrize(
    ("successes", "clusters", "items"),
    [([1] * 6, "aabbcc", 3), ([0] * 6, "aabbcc", 3), ([1, 1, 1, 0], "aaaa", 1), ([1], "a", 1)],
)
def test_a_cluster_counts_once_where_its_spread_is_unknown(
    successes: list[float], clusters: str, items: int
) -> None:
    share = sum(successes) / len(successes)
    assert clustered_wilson(successes, list(clusters)) == pytest.approx(wilson(share * items, items))


@pytest.mark.parametrize("successes", [[], [2.0], [math.nan]])
def test_a_clustered_share_of_nothing_or_of_no_share_is_refused(successes: list[float]) -> None:
    with pytest.raises(ValueError, match="no interval"):
        clustered_wilson(successes, ["a"] * len(successes))


def test_weighted_means_by_hand() -> None:
    means = WeightedMeans()
    means.add({"policy/loss": 1.0, "value/loss": 4.0}, weight=3)
    means.add({"policy/loss": 5.0})
    # (3 * 1 + 1 * 5) / 4 = 2
    assert means.means() == {"policy/loss": 2.0, "value/loss": 4.0}


def test_a_mean_over_nothing_changes_no_other() -> None:
    means = WeightedMeans()
    means.add({"policy/loss": math.nan, "value/loss": math.nan}, weight=0)
    means.add({"policy/loss": 1.0}, weight=2)
    assert means.means() == {"policy/loss": 1.0}


def test_the_spool_keeps_every_line_with_its_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "work")
    spool.log(0, {"policy/loss": 0.5})
    spool.log(1, {"policy/loss": 0.25, "optim/lr": 1e-4})
    lines = read_lines(spool.metrics_path)
    assert [(line["step"], line["metrics"]) for line in lines] == [
        (0, {"policy/loss": 0.5}),
        (1, {"policy/loss": 0.25, "optim/lr": 1e-4}),
    ]
    assert 1_600_000_000_000 < lines[0]["t"] <= lines[1]["t"]


def test_progress_and_alarms_share_a_file_and_keep_any_text(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.progress(1, 4, "step 1\u2028of 4")
    spool.alarm("ratios left\ntheir range")
    shown = [
        {key: value for key, value in line.items() if key != "t"} for line in read_lines(spool.progress_path)
    ]
    assert shown == [
        {"done": 1, "total": 4, "text": "step 1\u2028of 4"},
        {"alarm": "ratios left\ntheir range"},
    ]
    assert spool.alarms == ["ratios left\ntheir range"]
    assert read_lines(spool.metrics_path) == []


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.log(0, {"policy/loss": 0.5})
    whole = spool.metrics_path.read_bytes()
    for torn in range(1, len(whole)):
        spool.metrics_path.write_bytes(whole + whole[:torn])
        assert [line["step"] for line in read_lines(spool.metrics_path)] == [0]
    Spool(tmp_path).log(1, {"policy/loss": 0.25})
    assert [line["step"] for line in read_lines(spool.metrics_path)] == [0, 1]


def test_a_file_with_nothing_but_a_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"t": 1, "st')
    assert read_lines(path) == []
    Spool(tmp_path).log(0, {"a": 1.0})
    assert [line["step"] for line in read_lines(path)] == [0]


def test_a_number_that_is_not_finite_goes_through_the_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.log(0, {"policy/loss": math.inf, "value/loss": math.nan})
    metrics = read_lines(spool.metrics_path)[0]["metrics"]
    assert json.dumps(metrics) == '{"policy/loss": Infinity, "value/loss": NaN}'


def test_timed_adds_up_and_counts_what_failed() -> None:
    times = {"time/sample": 5.0}
    with timed(times, "time/sample"), timed(times, "time/score"):
        pass
    with pytest.raises(KeyError), timed(times, "time/score"):
        raise KeyError
    assert 5 < times["time/sample"] < 6 and 0 < times["time/score"] < 1


def test_a_spool_goes_on_from_where_it_was(tmp_path: Path) -> None:
    first = Spool(tmp_path)
    first.log(0, {"a": 1.0})
    first.alarm("early")
    early = LookedAt(step=0, prompt="p", text="t", score=1, kl=0, length=1, stop=StopReason.EOS, tokens=[])
    first.samples([early])
    ends = first.ends()
    first.log(1, {"a": 2.0})
    first.samples([early.model_copy(update={"step": 1})])
    first.alarm("late")
    again = Spool(tmp_path, ends)
    again.log(1, {"a": 3.0})
    assert [line["metrics"] for line in read_lines(again.metrics_path)] == [{"a": 1.0}, {"a": 3.0}]
    assert again.alarms == ["early"]
    assert [line["step"] for line in read_lines(again.samples_path)] == [0]
    assert Spool(tmp_path, SpoolEnds()).alarms == []
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_spool_that_is_shorter_than_it_was_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 0 bytes, and had 10 .* Delete .*checkpoints to start"):
        Spool(tmp_path, SpoolEnds(metrics=10))
