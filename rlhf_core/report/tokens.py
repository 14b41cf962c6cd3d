"""Completions of a policy update, token by token: how much KL, advantage and value fell on each."""

from collections.abc import Callable, Sequence

from rlhf_core.records import LookedAt, Token
from rlhf_core.report.characters import shorten
from rlhf_core.report.html import Html, table, tag, text

MEASURES: tuple[tuple[str, Callable[[Token], float]], ...] = (
    ("KL", lambda token: token.kl),
    ("advantage", lambda token: token.advantage),
    ("value", lambda token: token.value),
)
READING = (
    "Deeper colour, further from 0: orange above, blue below; each line by its own largest number, which "
    "stands above it. KL that falls on a few tokens shows what the policy now insists on; an advantage that "
    "does not change along a text is a critic that tells nothing apart."
)


def pictured(looked_at: Sequence[LookedAt]) -> list[LookedAt]:
    """Those of the last step that are there token by token."""
    last = max((one.step for one in looked_at), default=0)
    return [one for one in looked_at if one.step == last and one.tokens]


def picture(one: LookedAt) -> Html:
    """A completion's text once for each measure, coloured by it."""
    lines = [_line(name, [of(token) for token in one.tokens], one.tokens) for name, of in MEASURES]
    said = f"step {one.step}, score {one.score:+.3f}, KL {one.kl:.2f}, {one.length} tokens, {one.stop.value}"
    return tag(
        "article",
        tag("p", tag("bdi", shorten(one.prompt)), class_="prompt"),
        tag("p", said, class_="muted prompt"),
        *lines,
        class_="tokens",
    )


def rollouts(looked_at: Sequence[LookedAt]) -> Html:
    """The completions of the first step that was looked at and of the last."""
    ends = {min(one.step for one in looked_at), max(one.step for one in looked_at)}
    rows = [
        (
            str(one.step),
            tag("bdi", shorten(one.prompt, 120)),
            tag("bdi", shorten(one.text, 300)) if one.text else tag("i", "(empty)"),
            f"{one.score:+.3f}",
            f"{one.kl:.2f}",
            f"{one.length} ({one.stop.value})",
        )
        for one in looked_at
        if one.step in ends
    ]
    return table(("step", "prompt", "completion", "score", "KL", "tokens"), rows, "rollouts")


def _line(name: str, numbers: Sequence[float], tokens: Sequence[Token]) -> Html:
    largest = max(map(abs, numbers), default=0.0)
    spans = [
        tag(
            "span",
            token.text or "⟨end⟩",
            class_="up" if number > 0 else "down",
            style=f"--share: {abs(number) / largest * 100 if largest else 0:.0f}%",
            title=f"{name} {number:+.3f}",
        )
        for number, token in zip(numbers, tokens, strict=True)
    ]
    return tag("div", tag("h3", name, text(f", up to {largest:.3g}")), tag("p", *spans, dir="auto"))
