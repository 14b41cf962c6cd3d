"""Intervals as one looks at them: a dot for the number, a line for its interval, a bound to compare with."""

from collections.abc import Sequence
from typing import Literal

from rlhf_core.gates import Estimate
from rlhf_core.report.html import Html, tag

WIDTH, ROW, MARGIN = 200.0, 18.0, 8.0


def whiskers(
    estimates: Sequence[Estimate],
    label: str,
    *,
    bound: float | None = None,
    allowed: Literal["above", "below"] | None = None,
    class_: str = "",
) -> Html:
    """A row for each estimate on one scale, the bound dashed and its allowed side shaded."""
    numbers = [number for e in estimates for number in (e.low, e.value, e.high)]
    numbers += [] if bound is None else [bound]
    low, high = min(numbers), max(numbers)
    scale = (WIDTH - 2 * MARGIN) / (high - low) if high > low else 0.0
    height = ROW * len(estimates)

    def x(number: float) -> float:
        return MARGIN + (number - low) * scale if scale else WIDTH / 2

    drawn = [] if bound is None else _bound(x(bound), height, allowed)
    for row, estimate in enumerate(estimates):
        y = f"{ROW * (row + 0.5):.1f}"
        drawn.append(
            tag("line", x1=f"{x(estimate.low):.1f}", x2=f"{x(estimate.high):.1f}", y1=y, y2=y, class_="range")
        )
        drawn.append(tag("circle", cx=f"{x(estimate.value):.1f}", cy=y, r="4.5"))
    return tag(
        "svg",
        tag("title", label),
        *drawn,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        class_=f"whiskers {class_}".strip(),
    )


def _bound(x: float, height: float, allowed: str | None) -> list[Html]:
    at, tall = f"{x:.1f}", f"{height:g}"
    line = tag("line", x1=at, x2=at, y1="0", y2=tall, class_="bound")
    if allowed is None:
        return [line]
    start, width = (x, WIDTH - x) if allowed == "above" else (0.0, x)
    side = tag("rect", x=f"{start:.1f}", y="0", width=f"{width:.1f}", height=tall, class_="allowed")
    return [side, line]
