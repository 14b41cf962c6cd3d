"""The round's page as one HTML file: no script, no network, light, dark and on paper."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rlhf_core.alarms import NOTHING_SEEN, MonitorsReport
from rlhf_core.gates import Estimate
from rlhf_core.ledger import GateResult, StageRecord
from rlhf_core.report.characters import shorten
from rlhf_core.report.contents import (
    MONITOR_COLUMNS,
    NUM_SAMPLES,
    OUTCOMES,
    READ_MONITORS,
    READ_SELECTION,
    SELECTION_COLUMNS,
    SHORT_DIGEST,
    Plot,
    Row,
    anchored,
    monitor_examples,
    monitor_rows,
    policy_rows,
    reward_model_rows,
    selection_rows,
    spoken,
    watched,
)
from rlhf_core.report.differences import marked
from rlhf_core.report.drawing import svg
from rlhf_core.report.html import Html, join, link, table, tag, text
from rlhf_core.report.style import STYLE
from rlhf_core.report.tokens import READING, picture, pictured, rollouts
from rlhf_core.report.view import NOT_MEASURED, RoundView, Sample
from rlhf_core.report.whiskers import whiskers
from rlhf_core.selection import Selection

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

KEY_NUMBERS: tuple[tuple[str, tuple[str, ...], float | None], ...] = (
    ("Gold, champion to candidate", ("eval/gold_before", "eval/gold_after"), None),
    ("Gold, candidate minus champion", ("eval/gold_minus_champion",), 0.0),
    ("Win rate against the champion", ("eval/win_rate",), 0.5),
    ("KL to the initial policy, nats", ("eval/kl_to_initial",), 0.0),
    ("Proxy, champion to candidate", ("eval/proxy_before", "eval/proxy_after"), None),
    ("Reward model's accuracy", ("reward_model/accuracy",), 0.5),
)
"""What a round is judged by at a glance: title, metrics, and the value that would mean no difference."""

READ_CARDS = (
    "Dot: the number. Line: its 95 % interval. Dashed: no difference, or chance. "
    "Of two, the champion's is above. Each card has its own scale."
)
READ_GATES = (
    "Shaded: where the whole interval must lie, so that a gate is judged at the interval's bad end. "
    "Each gate has its own scale."
)


def html_page(view: RoundView, plots: Sequence[Plot]) -> str:
    """The whole document."""
    title = text(f"{view.project}, round {view.round}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        + "\n".join(_sections(view, plots))
        + "\n</body>\n</html>\n"
    )


def _sections(view: RoundView, plots: Sequence[Plot]) -> Iterator[Html]:
    measured = {**view.reward_model_metrics, **view.comparison}
    yield _decision(view.outcome, view.gates)
    if anchor := anchored(view):
        yield tag("p", anchor, class_="muted")
    cards = (_card(*key, measured) for key in KEY_NUMBERS)
    yield _section("Key numbers", *cards, class_="cards", reading=READ_CARDS)
    yield _section("Gates", _gates(view.gates, measured), reading=READ_GATES if view.gates else "")
    if view.alarms:
        yield _section("Alarms", tag("ul", *(tag("li", alarm) for alarm in view.alarms)))
    if view.selection:
        reading = READ_SELECTION if view.selection.evaluations else ""
        yield _section("The candidate", *_selection(view.selection), reading=reading)
    if view.monitors:
        yield _section("Monitors", *_monitors(view.monitors), reading=READ_MONITORS)
    yield _section("Plots", *(map(_plot, plots) if plots else [_missing()]), class_="plots")
    samples = [_sample(number, sample) for number, sample in enumerate(view.samples[:NUM_SAMPLES], 1)]
    yield _section("Samples", *(samples or [_missing()]), class_="samples")
    if view.looked_at:
        pictures = map(picture, pictured(view.looked_at))
        yield _section("Token by token", *pictures, class_="samples", reading=READING)
        yield _section("Completions of the first step and of the last", rollouts(view.looked_at))
    yield _section("The policy", _estimates(policy_rows(view)))
    yield _section("The reward model", _estimates(reward_model_rows(view)))
    yield _section("Stages", _stages(view.stages))
    if view.links:
        links = (tag("li", link(name, target)) for name, target in view.links.items())
        yield _section("Where to look", tag("ul", *links))
    yield tag("details", tag("summary", "Settings"), tag("pre", view.settings_yaml))


def _section(title: str, *children: str, class_: str = "", reading: str = "") -> Html:
    note = tag("p", reading, class_="muted reading") if reading else ""
    return tag("section", tag("h2", title), note, tag("div", *children, class_=class_))


def _missing() -> Html:
    return tag("p", NOT_MEASURED, class_="muted")


def _decision(outcome: str, gates: Sequence[GateResult]) -> Html:
    """How the round ended and why: the sentences of the gates that failed, where any did."""
    name, meaning = OUTCOMES.get(outcome, (f"Ended as {outcome}", ""))
    failed = [tag("li", gate.sentence) for gate in gates if not gate.passed]
    if failed:
        why = [tag("p", f"Gates failed, {len(failed)} of {len(gates)}:"), tag("ul", *failed)]
    else:
        why = [tag("p", f"All {len(gates)} gates passed." if gates else "No gate was judged.")]
    said = tag("p", tag("strong", name), f": {meaning}." if meaning else ".", class_="said")
    return tag("header", said, *why, class_=f"decision {'good' if outcome == 'promoted' else 'bad'}")


def _card(
    title: str, metrics: Sequence[str], neutral: float | None, measured: Mapping[str, Estimate]
) -> Html:
    found = [measured[metric] for metric in metrics if metric in measured]
    if len(found) < len(metrics):
        return tag("div", tag("h3", title), _missing(), class_="card")
    values, intervals = zip(*map(spoken, found), strict=True)
    said = " to ".join(intervals) if len(found) == 1 else "; ".join(intervals)
    return tag(
        "div",
        tag("h3", title),
        tag("p", " → ".join(values), class_="value"),
        tag("p", said or "no interval", class_="muted"),
        whiskers(found, f"{title}: {' → '.join(values)}, {said}", bound=neutral),
        class_="card",
    )


def _gates(gates: Sequence[GateResult], measured: Mapping[str, Estimate]) -> Html:
    if not gates:
        return tag("p", "No gate was judged.")
    rows = [_gate(gate, measured) for gate in gates]
    return table(("gate", "value", "95 % interval", "against the bound", "result"), rows, "gates")


def _gate(gate: GateResult, measured: Mapping[str, Estimate]) -> tuple[str, ...]:
    metric, sign, _ = gate.name.rsplit(" ", 2)
    allowed: Literal["above", "below"] = "above" if sign == ">" else "below"
    estimate = measured.get(metric)
    value, interval = spoken(estimate)
    if estimate is None and gate.value is not None:
        value = f"{gate.value:.4g}"
    result = "passed" if gate.passed else "failed"
    drawn = (
        whiskers([estimate], gate.sentence, bound=gate.bound, allowed=allowed, class_=result)
        if estimate
        else Html()
    )
    return gate.name, value, interval, drawn, tag("span", result, class_=f"result {result}")


def _selection(selection: Selection) -> Iterator[Html]:
    yield tag("p", selection.why)
    if selection.evaluations:
        yield table(SELECTION_COLUMNS, selection_rows(selection), "selection")


def _monitors(seen: MonitorsReport) -> Iterator[Html]:
    yield tag("p", watched(seen))
    rows = [
        (name, action, tag("span", state, class_=f"result {_tone(state)}"), worst, advice)
        for name, action, state, worst, advice in monitor_rows(seen)
    ]
    yield table(MONITOR_COLUMNS, rows, "monitors")
    examples = monitor_examples(seen)
    if examples:
        shown = (tag("li", tag("b", of), ": ", tag("bdi", shorten(example))) for of, example in examples)
        yield tag("h3", "Examples")
        yield tag("ul", *shown)


def _tone(state: str) -> str:
    """The colour of a monitor's state: good, bad, or none where it did not look."""
    return "passed" if state == "ok" else "" if state in ("off", NOTHING_SEEN) else "failed"


def _plot(plot: Plot) -> Html:
    return tag(
        "figure",
        tag("div", svg(plot.figure, plot.name), role="img", aria_label=plot.title),
        tag("figcaption", tag("strong", plot.title), ". ", plot.reading),
    )


def _sample(number: int, sample: Sample) -> Html:
    before, after = marked(shorten(sample.before), shorten(sample.after))
    return tag(
        "article",
        tag("p", tag("b", f"{number}. "), tag("bdi", shorten(sample.prompt)), class_="prompt"),
        _continuation("before", before),
        _continuation("after", after),
    )


def _continuation(name: str, written: Html) -> Html:
    shown = written or tag("i", "(empty)")
    return tag("div", tag("h3", name), tag("p", shown, dir="auto"), class_="text")


def _estimates(rows: Sequence[Row]) -> Html:
    """A row for each number, whether it was measured or not."""
    return table(("number", "value", "95 % interval"), [(name, *spoken(e)) for name, e in rows], "numbers")


def _stages(stages: Sequence[StageRecord]) -> Html:
    if not stages:
        return tag("p", "No stage is finished.")
    longest = max(record.seconds for record in stages) or 1.0
    rows = [
        (
            record.stage,
            "reused" if record.cached else join((_bar(record.seconds / longest), f" {record.seconds:.1f}")),
            ", ".join(f"{name} {ref.digest[:SHORT_DIGEST]}" for name, ref in sorted(record.outputs.items())),
        )
        for record in stages
    ]
    return table(("stage", "seconds", "artifacts"), rows, "stages")


def _bar(share: float) -> Html:
    return tag("span", class_="bar", style=f"width: {5 * share:.2f}rem")
