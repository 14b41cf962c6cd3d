"""What the pages of a round have in common: the names of its numbers, its sentences, its figures."""

from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure

from rlhf_core.alarms import MonitorsReport
from rlhf_core.gates import Estimate
from rlhf_core.report import plots
from rlhf_core.report.view import NOT_MEASURED, RoundView
from rlhf_core.selection import Selection

NUM_SAMPLES = 10
SHORT_DIGEST = 12

OUTCOMES = {
    "promoted": ("Promoted", "the candidate is the new champion"),
    "rejected": ("Rejected", "the champion stays in service"),
    "reward_model_rejected": (
        "Reward model rejected",
        "no policy was trained, and the champion stays in service",
    ),
}

POLICY_ROWS = {
    "eval/gold_before": "gold, champion (before)",
    "eval/gold_after": "gold, candidate (after)",
    "eval/gold_minus_champion": "gold, candidate minus champion, paired",
    "eval/gold_minus_initial": "gold, candidate minus initial policy, paired",
    "eval/win_rate": "win rate against the champion",
    "eval/kl_to_initial": "KL to the initial policy, nats a completion",
    "eval/kl_to_champion": "KL to the champion, nats a completion",
    "eval/perplexity_over_initial": "perplexity of its text, over the initial policy's",
    "eval/perplexity_over_champion": "perplexity of its text, over the champion's",
    "eval/distinct_2_over_initial": "distinct-2, over the initial policy's",
    "eval/distinct_2_over_champion": "distinct-2, over the champion's",
    "eval/response_length": "response length, tokens",
    "eval/response_length_over_initial": "response length, over the initial policy's",
    "eval/proxy_before": "proxy, champion (before)",
    "eval/proxy_after": "proxy, candidate (after)",
}
REWARD_MODEL_ROWS = {
    "reward_model/accuracy": "accuracy on held-out pairs",
    "reward_model/length_accuracy": "the same pairs, the longer one taken",
    "reward_model/log_loss": "log loss",
    "reward_model/calibration_error": "calibration error",
}

Row = tuple[str, Estimate | None]
"""What a number is, and the number where it was measured."""


MONITOR_COLUMNS = ("monitor", "action", "state", "worst seen", "what to change")
READ_MONITORS = (
    "What looked at every step of the policy update. An alarm is said once when it begins and once when it "
    "is over; beside it stands what to change."
)
SELECTION_COLUMNS = ("after steps", "reward", "KL", "gain over the start", "95 % interval", "")
READ_SELECTION = (
    "The policy after some steps on prompts it is not trained on, with the same random numbers each time. "
    "Gain: reward less what its KL costs, minus the same of the start. The highest lower end is chosen, and "
    "no gold is asked. It is no measurement: the best of several looks a little better than it is."
)


@dataclass(frozen=True)
class Plot:
    """A figure with its words."""

    name: str
    """Of its file, without the ending."""
    title: str
    reading: str
    """How it is read, and what a bad one looks like."""
    figure: Figure


def anchored(view: RoundView) -> str:
    """What the initial policy is, where it is not the project's first one; else nothing."""
    if view.rebased_after is None:
        return ""
    return (
        f"The project was rebased after round {view.rebased_after}: the initial policy is the champion of "
        "then, merged into a new trunk, and every number against it starts anew from there."
    )


def policy_rows(view: RoundView) -> list[Row]:
    """The numbers of the candidate."""
    return [(text, view.comparison.get(name)) for name, text in POLICY_ROWS.items()]


def reward_model_rows(view: RoundView) -> list[Row]:
    """The numbers of the reward model, the labels of each round by themselves at the end."""
    overall: list[Row] = [
        (text, view.reward_model_metrics.get(name)) for name, text in REWARD_MODEL_ROWS.items()
    ]
    by_round = sorted(view.accuracy_by_round.items())
    return overall + [(f"accuracy on labels of round {number}", found) for number, found in by_round]


def monitor_rows(seen: MonitorsReport) -> list[tuple[str, ...]]:
    """A row for each monitor, with what to change where it had an alarm; those that had one come first."""
    ordered = sorted(seen.monitors, key=lambda one: (one.since is None, one.first is None))
    return [
        (
            one.monitor,
            one.action.value,
            one.state,
            "; ".join(worst.spoken for worst in one.worst),
            one.advice if one.first is not None else "",
        )
        for one in ordered
    ]


def monitor_examples(seen: MonitorsReport) -> list[tuple[str, str]]:
    """Texts that show what an alarm means, each with the alarm it belongs to."""
    return [(f"{one.monitor}, step {one.step}", example) for one in seen.alarms for example in one.examples]


def watched(seen: MonitorsReport) -> str:
    """How many steps were watched, and whether a monitor ended them."""
    end = f" The monitor {seen.ended_by} ended the stage." if seen.ended_by else ""
    alarmed = sum(one.first is not None for one in seen.monitors)
    return f"{seen.steps} steps watched by {len(seen.monitors)} monitors; {alarmed} raised an alarm.{end}"


def selection_rows(selection: Selection) -> list[tuple[str, ...]]:
    """A row for each evaluation, the chosen one marked."""
    return [
        (
            str(one.step),
            f"{one.reward:+.4g}",
            f"{one.kl:.4g}",
            f"{one.gain.value:+.4g}",
            f"{one.gain.low:+.4g} to {one.gain.high:+.4g}",
            "start" if one.step == 0 else "chosen" if one.step == selection.step else "",
        )
        for one in selection.evaluations
    ]


def spoken(estimate: Estimate | None) -> tuple[str, str]:
    """A number and its interval; the interval is empty where there is none."""
    if estimate is None:
        return NOT_MEASURED, ""
    exact = estimate.low == estimate.value == estimate.high
    return f"{estimate.value:.4g}", "" if exact else f"{estimate.low:.4g} to {estimate.high:.4g}"


def figures(view: RoundView) -> Iterator[Plot]:
    """Every plot that there are numbers for."""
    if view.update_steps:
        yield from _over_steps(view)
    if view.scores:
        yield Plot(
            "scores",
            "Scores before and after",
            "Each held-out completion counts once. A shifted hill is a better policy; a few far bars on "
            "the right, above all of the proxy alone, are answers that please the reward model only.",
            plots.histograms(view.scores),
        )
    if view.calibration:
        yield Plot(
            "calibration",
            "How right the reward model is when it is sure",
            "On the dashed line it is as sure as it is right; below it, it claims too much. A point on "
            "few pairs says little.",
            plots.calibration(view.calibration),
        )


def _over_steps(view: RoundView) -> Iterator[Plot]:
    yield Plot(
        "reward",
        "Proxy reward and gold over steps",
        "Both should rise. A proxy that goes on rising while gold falls is over-optimised.",
        plots.gold_and_proxy(view.update_steps),
    )
    yield Plot(
        "sqrt_kl",
        "Proxy reward and gold over √KL",
        "What was gained for the distance gone from the reference (Gao et al., 2023): a dot for each step, "
        "its number at the last. Where gold bends down and the proxy does not, an earlier stop would have "
        "been better.",
        plots.over_sqrt_kl(view.update_steps),
    )
    yield Plot(
        "kl",
        "KL over steps",
        "Distance from the reference and from the policy the round began with. A jump is an unstable update.",
        plots.kl(view.update_steps),
    )
    yield Plot(
        "text",
        "Entropy and length over steps",
        "Entropy that falls to nothing is a policy that says one thing; length that runs away is often what "
        "the reward model likes by mistake.",
        plots.entropy_and_length(view.update_steps),
    )
