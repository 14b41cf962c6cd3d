"""reward_validation: is the reward model right on labels it has never seen, of every round?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field
from torch.nn.functional import logsigmoid

from rlhf_core.gates import Estimate
from rlhf_core.metrics import clustered_wilson
from rlhf_core.settings import Settings
from rlhf_core.stages.context import StageContext
from rlhf_core.stages.labels import read_groups, split_groups, to_batch
from rlhf_core.trunk import Trunk

NAME, VERSION = "reward_validation", 1


class RewardValidation(Settings):
    """How the reward model is validated."""

    num_bins: int = Field(default=5, ge=2, le=50)
    """Bins of confidence in the calibration error."""


class RewardValidationJob(RewardValidation):
    """With the split that training used."""

    held_out_share: float = 0.25
    """Share of prompts whose labels are held out."""


class CalibrationBin(Settings):
    """Pairs of like confidence."""

    confidence: float
    """Mean probability the model gave to its own choice."""
    accuracy: float
    """Share of them in which that choice was right."""
    pairs: int


class RewardReport(Settings):
    """What is known of a reward model before it serves."""

    metrics: dict[str, Estimate]
    calibration: list[CalibrationBin]
    accuracy_by_round: dict[int, Estimate]
    held_out_pairs: int


@dataclass(frozen=True)
class _Pair:
    margin: float
    length_margin: int
    prompt_id: str
    round: int

    @property
    def correct(self) -> float:
        return _half(self.margin)


def _half(margin: float) -> float:
    """1 for the right order, 0 for the wrong one, a half for a tie."""
    return 0.5 if margin == 0 else float(margin > 0)


@torch.no_grad()
def score_pairs(context: StageContext, trunk: Trunk, share: float) -> list[_Pair]:
    """Margins of all held-out pairs, in the units of the Bradley-Terry logit."""
    groups = [group for folder in context.inputs("preferences") for group in read_groups(folder)]
    _, held_out = split_groups(groups, share)
    batch = to_batch(held_out, trunk.codec.pad_id, trunk.device)
    with trunk.role("reward"):
        scores = (trunk.scores(batch.completions) * trunk.heads["reward"].scale).tolist()
    lengths = batch.completions.response_lengths.tolist()
    group_ids = batch.group_ids.tolist()
    return [
        _Pair(
            scores[c] - scores[r],
            lengths[c] - lengths[r],
            held_out[group_ids[c]].prompt_id,
            held_out[group_ids[c]].round,
        )
        for c, r in zip(batch.chosen.tolist(), batch.rejected.tolist(), strict=True)
    ]


def report(pairs: Sequence[_Pair], num_bins: int) -> RewardReport:
    """Accuracy with its interval, log loss, calibration, and what length alone would have said."""
    clusters = [pair.prompt_id for pair in pairs]
    log_loss = -sum(float(logsigmoid(torch.tensor(pair.margin))) for pair in pairs) / len(pairs)
    bins = calibration_bins([pair.margin for pair in pairs], num_bins)
    error = sum(b.pairs * abs(b.accuracy - b.confidence) for b in bins) / len(pairs)
    rounds = sorted({pair.round for pair in pairs})
    return RewardReport(
        metrics={
            "reward_model/accuracy": Estimate.of(
                clustered_wilson([pair.correct for pair in pairs], clusters)
            ),
            "reward_model/length_accuracy": Estimate.of(
                clustered_wilson([_half(pair.length_margin) for pair in pairs], clusters)
            ),
            "reward_model/log_loss": Estimate.exactly(log_loss),
            "reward_model/calibration_error": Estimate.exactly(error),
            "reward_model/margin": Estimate.exactly(sum(pair.margin for pair in pairs) / len(pairs)),
        },
        calibration=bins,
        accuracy_by_round={
            number: Estimate.of(
                clustered_wilson(
                    [pair.correct for pair in pairs if pair.round == number],
                    [pair.prompt_id for pair in pairs if pair.round == number],
                )
            )
            for number in rounds
        },
        held_out_pairs=len(pairs),
    )


def calibration_bins(margins: Sequence[float], num_bins: int) -> list[CalibrationBin]:
    """Pairs by the probability, a half to one, that the model gives its own choice (Guo et al., 2017)."""
    binned: dict[int, list[float]] = {}
    for margin in margins:
        confidence = 1 / (1 + math.exp(-min(50.0, abs(margin))))
        place = min(num_bins - 1, int((confidence - 0.5) * 2 * num_bins))
        binned.setdefault(place, []).append(margin)
    return [
        CalibrationBin(
            confidence=sum(1 / (1 + math.exp(-min(50.0, abs(m)))) for m in members) / len(members),
            accuracy=sum(_half(m) for m in members) / len(members),
            pairs=len(members),
        )
        for _, members in sorted(binned.items())
    ]


def run(context: StageContext) -> None:
    """Score the held-out pairs and write the report."""
    settings = context.settings(RewardValidationJob)
    trunk = context.trunk()
    trunk.load_role("reward", context.input("reward_model"))
    found = report(score_pairs(context, trunk, settings.held_out_share), settings.num_bins)
    context.write_json("reward_report", "reward_report", found)
    accuracy = found.metrics["reward_model/accuracy"]
    context.summary(
        {
            **{name: estimate.value for name, estimate in found.metrics.items()},
            "reward_model/accuracy_low": accuracy.low,
            "reward_model/accuracy_high": accuracy.high,
            "reward_model/held_out_pairs": float(found.held_out_pairs),
        }
    )
