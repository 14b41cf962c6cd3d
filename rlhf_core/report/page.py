"""The round's pages: the decision first, then the numbers it stands on, then what there is to look at.

`report.md` with its plots beside it, for the pages of MLflow and Prefect; `report.html` all in one file.
The same view gives the same pages: no time of day, no host.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlhf_core.alarms import MonitorsReport
from rlhf_core.ledger import GateResult, StageRecord
from rlhf_core.records import LookedAt
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
    figures,
    monitor_examples,
    monitor_rows,
    policy_rows,
    reward_model_rows,
    selection_rows,
    spoken,
    watched,
)
from rlhf_core.report.drawing import save_png
from rlhf_core.report.html_page import html_page
from rlhf_core.report.markdown import code_block, escape, table
from rlhf_core.report.view import NOT_MEASURED, RoundView, Sample
from rlhf_core.selection import Selection


def write_report(view: RoundView, folder: Path) -> Path:
    """Write `report.md`, its plots and `report.html` into the folder; returns the Markdown page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = list(figures(view))
    for plot in plots:
        save_png(plot.figure, folder / f"{plot.name}.png")
    (folder / "report.html").write_text(html_page(view, plots), encoding="utf-8")
    page = folder / "report.md"
    page.write_text("\n\n".join(_sections(view, plots)) + "\n", encoding="utf-8")
    return page


def _sections(view: RoundView, plots: Sequence[Plot]) -> Iterator[str]:
    yield f"# {escape(view.project)}, round {view.round}"
    yield _decision(view.outcome, view.gates)
    if anchor := anchored(view):
        yield anchor
    yield "## The policy"
    yield _estimates(policy_rows(view))
    yield "## The reward model"
    yield _estimates(reward_model_rows(view))
    yield "## Gates"
    yield _gates(view.gates)
    if view.alarms:
        yield "## Alarms"
        yield _list(map(escape, view.alarms))
    if view.selection:
        yield "## The candidate"
        yield from _selection(view.selection)
    if view.monitors:
        yield "## Monitors"
        yield from _monitors(view.monitors)
    yield "## Plots"
    yield "\n\n".join(f"![{plot.title}]({plot.name}.png)" for plot in plots) or NOT_MEASURED
    yield "## Samples"
    yield "\n\n".join(map(_sample, range(1, NUM_SAMPLES + 1), view.samples)) or NOT_MEASURED
    if view.looked_at:
        yield "## Completions of the last step"
        yield _looked_at(view.looked_at)
    yield "## Stages"
    yield _stages(view.stages)
    if view.links:
        yield "## Where to look"
        yield _list(_link(name, target) for name, target in view.links.items())
    yield "## Settings"
    yield code_block(view.settings_yaml, "yaml")


def _decision(outcome: str, gates: Sequence[GateResult]) -> str:
    """How the round ended and why: the sentences of the gates that failed, where any did."""
    if outcome in OUTCOMES:
        name, meaning = OUTCOMES[outcome]
        said = f"**{name}**: {meaning}"
    else:
        said = f"Ended as **{escape(outcome)}**"
    failed = [escape(gate.sentence) for gate in gates if not gate.passed]
    if failed:
        return f"{said}. Gates failed, {len(failed)} of {len(gates)}:\n\n{_list(failed)}"
    return f"{said}. " + (f"All {len(gates)} gates passed." if gates else "No gate was judged.")


def _estimates(rows: Iterable[Row]) -> str:
    """A row for each number, whether it was measured or not."""
    return table(("number", "value", "95 % interval"), [(text, *spoken(found)) for text, found in rows])


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


def _selection(selection: Selection) -> Iterator[str]:
    yield escape(selection.why, len(selection.why))
    if selection.evaluations:
        yield table(SELECTION_COLUMNS, selection_rows(selection))
        yield READ_SELECTION


def _monitors(seen: MonitorsReport) -> Iterator[str]:
    yield f"{escape(watched(seen))} {READ_MONITORS}"
    yield table(MONITOR_COLUMNS, (tuple(map(escape, row)) for row in monitor_rows(seen)))
    examples = monitor_examples(seen)
    if examples:
        yield _list(f"**{escape(of)}**: {escape(example)}" for of, example in examples)


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


def _looked_at(looked_at: Sequence[LookedAt]) -> str:
    last = max(one.step for one in looked_at)
    rows = [
        (escape(one.prompt), escape(one.text), f"{one.score:+.3f}", f"{one.kl:.2f}", f"{one.length}")
        for one in looked_at
        if one.step == last
    ]
    return table(("prompt", "completion", "score", "KL", "tokens"), rows)


def _link(name: str, target: str) -> str:
    if target.startswith(("http://", "https://")):
        return f"[{escape(name)}](<{target}>)"
    return f"{escape(name)}: `{target}`"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
