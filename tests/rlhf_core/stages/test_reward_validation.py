"""What a validation report says, by hand on a few margins, and that the stage scores what it was given."""

from math import log

import pytest

from rlhf_core.records import Completion, Preference
from rlhf_core.rewards.model import ModelReward
from rlhf_core.sources import read_rows
from rlhf_core.stages.labels import is_held_out
from rlhf_core.stages.reward_validation import RewardReport, _Pair, calibration_bins, report
from tests.rlhf_core.stages.chain import Chain

# Sure with 3/4 and right, as sure and wrong, undecided, sure with 19/20 and right.
PAIRS = [
    _Pair(log(3), 2, "p", 1),
    _Pair(-log(3), 1, "q", 1),
    _Pair(0.0, 0, "r", 2),
    _Pair(log(19), 5, "s", 2),
]


def values(found: RewardReport) -> dict[str, float]:
    return {name.removeprefix("reward_model/"): e.value for name, e in found.metrics.items()}


def test_a_report_by_hand() -> None:
    # Accuracy: (1 + 0 + 1/2 + 1) / 4. By length alone: (1 + 1 + 1/2 + 1) / 4.
    # Log loss: -(ln 0.75 + ln 0.25 + ln 0.5 + ln 0.95) / 4 = (0.28768 + 1.38629 + 0.69315 + 0.05129) / 4.
    # Calibration: two pairs of confidence 0.75, half of them right; 0.5 and a half right; 0.95 and right:
    # (2 * 0.25 + 0 + 0.05) / 4. Margin: ln 19 / 4.
    assert values(report(PAIRS, 5)) == pytest.approx(
        {
            "accuracy": 0.625,
            "length_accuracy": 0.875,
            "log_loss": 0.6046037,
            "calibration_error": 0.1375,
            "margin": 0.7361097,
        },
        rel=1e-6,
    )


def test_accuracy_is_told_round_by_round() -> None:
    found = report(PAIRS, 5)
    # Round 1: one of two; round 2: a half and one, of two.
    assert {number: estimate.value for number, estimate in found.accuracy_by_round.items()} == {
        1: 0.5,
        2: 0.75,
    }
    assert found.held_out_pairs == 4


def test_bins_hold_pairs_of_like_confidence() -> None:
    bins = calibration_bins([pair.margin for pair in PAIRS], 5)
    assert [(b.pairs, b.accuracy) for b in bins] == [(1, 0.5), (2, 0.5), (1, 1.0)]
    assert [b.confidence for b in bins] == pytest.approx([0.5, 0.75, 0.95])


def test_the_surest_pairs_fall_in_the_last_bin() -> None:
    (only,) = calibration_bins([1e6, -1e6, 1e6, 1e6], 2)
    assert (only.pairs, only.accuracy) == (4, 0.75)
    assert only.confidence == pytest.approx(1)


def test_pairs_of_one_prompt_widen_the_interval() -> None:
    apart = [_Pair(1.0 if n % 4 else -1.0, 0, f"p{n}", 1) for n in range(24)]
    together = [_Pair(1.0 if n >= 6 else -1.0, 0, f"p{n // 6}", 1) for n in range(24)]
    one, other = (report(pairs, 5).metrics["reward_model/accuracy"] for pairs in (apart, together))
    assert one.value == other.value == 0.75
    assert other.low < one.low


def test_the_stage_scores_the_held_out_pairs(played: Chain) -> None:
    folder = played.open(played.made["reward_validation"]["reward_report"])
    found = RewardReport.model_validate_json((folder / "reward_report.json").read_bytes())
    labels = played.open(played.made["preferences"]["preferences"])
    decided = [
        p
        for p in read_rows(labels / "preferences.parquet", Preference)
        if p.chosen and is_held_out(p.prompt_id, 0.25)
    ]
    assert found.held_out_pairs == len(decided) > 0
    # Once more through the reward's own door, pair by pair.
    job = played.jobs["reward_validation"]
    trunk = played.trunk()
    trunk.load_role("reward", played.open(job.inputs["reward_model"]))
    completions = read_rows(labels / "completions.parquet", Completion)
    scores = ModelReward(trunk).score(completions).total.tolist()
    of = {c.id: score for c, score in zip(completions, scores, strict=True)}
    right = [float(of[p.chosen] > of[p.rejected]) for p in decided if p.chosen and p.rejected]
    assert values(found)["accuracy"] == pytest.approx(sum(right) / len(right))
    # A normalised score counts deviations of the reference samples; a margin is in nats again.
    deviation = float(trunk.heads["reward"].scale)
    margins = [deviation * (of[p.chosen] - of[p.rejected]) for p in decided if p.chosen and p.rejected]
    assert values(found)["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
