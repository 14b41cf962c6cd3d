"""The round's page: the decision first, then the numbers it stands on, then what there is to look at.

Markdown with its plots beside it. The same view gives the same page: no time of day, no host.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from rlhf_core.gates import Estimate
from rlhf_core.ledger import GateResult, StageRecord
from rlhf_core.report import plots
from rlhf_core.report.markdown import code_block, escape, table
from rlhf_core.report.view import NOT_MEASURED, RoundView, Sample

NUM_SAMPLES = 10
SHORT_DIGEST = 12

OUTCOMES = {
    "promoted": "**Promoted**: the candidate is the new champion",
    "rejected": "**Rejected**: the champion stays in service",
    "reward_model_rejected": (
        "**Reward model rejected**: no policy was trained, and the champion stays in service"
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


def write_report(view: RoundView, folder: Path) -> Path:
    """Write `report.md` and its plots into the folder; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    for name, caption, figure in _plots(view):
        plots.save(figure, folder / name)
        images.append(f"![{caption}]({name})")
    page = folder / "report.md"
    page.write_text("\n\n".join(_sections(view, images)) + "\n", encoding="utf-8")
    return page


def _plots(view: RoundView) -> Iterator[tuple[str, str, Figure]]:
    """File name, caption and figure of every plot that there are numbers for."""
    if view.update_steps:
        yield "reward.png", "Proxy reward and gold over steps", plots.gold_and_proxy(view.update_steps)
        yield "kl.png", "KL over steps", plots.kl(view.update_steps)
    if view.calibration:
        yield (
            "calibration.png",
            "How right the reward model is when it is sure",
            plots.calibration(view.calibration),
        )


def _sections(view: RoundView, images: Sequence[str]) -> Iterator[str]:
    yield f"# {escape(view.project)}, round {view.round}"
    yield _decision(view.outcome, view.gates)
    yield "## The policy"
    yield _estimates((text, view.comparison.get(name)) for name, text in POLICY_ROWS.items())
    yield "## The reward model"
    overall = [(text, view.reward_model_metrics.get(name)) for name, text in REWARD_MODEL_ROWS.items()]
    by_round: list[tuple[str, Estimate | None]] = [
        (f"accuracy on labels of round {number}", found)
        for number, found in sorted(view.accuracy_by_round.items())
    ]
    yield _estimates(overall + by_round)
    yield "## Gates"
    yield _gates(view.gates)
    if view.alarms:
        yield "## Alarms"
        yield _list(map(escape, view.alarms))
    yield "## Plots"
    yield "\n\n".join(images) or NOT_MEASURED
    yield "## Samples"
    yield "\n\n".join(map(_sample, range(1, NUM_SAMPLES + 1), view.samples)) or NOT_MEASURED
    yield "## Stages"
    yield _stages(view.stages)
    if view.links:
        yield "## Where to look"
        yield _list(_link(name, target) for name, target in view.links.items())
    yield "## Settings"
    yield code_block(view.settings_yaml, "yaml")


def _decision(outcome: str, gates: Sequence[GateResult]) -> str:
    """How the round ended and why: the sentences of the gates that failed, where any did."""
    said = OUTCOMES.get(outcome, f"Ended as **{escape(outcome)}**")
    failed = [escape(gate.sentence) for gate in gates if not gate.passed]
    if failed:
        return f"{said}. Gates failed, {len(failed)} of {len(gates)}:\n\n{_list(failed)}"
    return f"{said}. " + (f"All {len(gates)} gates passed." if gates else "No gate was judged.")


def _estimates(rows: Iterable[tuple[str, Estimate | None]]) -> str:
    """A row for each number, whether it was measured or not."""
    return table(("number", "value", "95 % interval"), [(text, *_cells(estimate)) for text, estimate in rows])


def _cells(estimate: Estimate | None) -> tuple[str, str]:
    if estimate is None:
        return NOT_MEASURED, ""
    exact = estimate.low == estimate.value == estimate.high
    return f"{estimate.value:.4g}", "" if exact else f"{estimate.low:.4g} to {estimate.high:.4g}"


def _gates(gates: Sequence[GateResult]) -> str:
    rows = [
        (
            escape(gate.name),
            NOT_MEASURED if gate.value is None else f"{gate.value:.4g}",
            "passed" if gate.passed else "**failed**",
        )
        for gate in gates
    ]
    return table(("gate", "at the interval's bad end", "result"), rows) if rows else "No gate was judged."


def _stages(stages: Sequence[StageRecord]) -> str:
    rows = [
        (
            escape(record.stage),
            "yes" if record.cached else "no",
            f"{record.seconds:.1f}",
            ", ".join(
                f"{escape(name)} {ref.digest[:SHORT_DIGEST]}" for name, ref in sorted(record.outputs.items())
            ),
        )
        for record in stages
    ]
    return table(("stage", "cached", "seconds", "artifacts"), rows) if rows else "No stage is finished."


def _sample(number: int, sample: Sample) -> str:
    prompt, before, after = (
        escape(text) or "*(empty)*" for text in (sample.prompt, sample.before, sample.after)
    )
    return f"**{number}.** {prompt}\n\n{_list((f'before: {before}', f'after: {after}'))}"


def _link(name: str, target: str) -> str:
    if target.startswith(("http://", "https://")):
        return f"[{escape(name)}](<{target}>)"
    return f"{escape(name)}: `{target}`"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
