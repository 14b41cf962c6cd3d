"""Figures as files and as markup: the same figure, the same bytes."""

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from rlhf_core.report.html import Html
from rlhf_core.report.plots import BLUE, FAINT, GREEN, GREY, INK, VERMILION

PALETTE = {
    BLUE: "blue",
    VERMILION: "vermilion",
    GREEN: "green",
    INK: "ink",
    GREY: "muted",
    FAINT: "line",
}
"""Colours of the figures, and the style's names for them, which differ between light and dark."""

# Numbered ids would be there once for each figure of a page; those named by a hash are what is referred to.
_NUMBERED_ID = re.compile(r' id="[A-Za-z0-9]+(?:\.[a-z]+)*_\d{1,4}"')
_STYLE = re.compile(r"<style.*?</style>", re.DOTALL)


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG."""
    figure.savefig(path, format="png", metadata={"Software": None})


def svg(figure: Figure, name: str) -> Html:
    """A figure as an `<svg>` of its page: its text is text, and its colours are the page's."""
    written = io.StringIO()
    unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # matplotlib takes these two from nowhere but its settings, which are put back after.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", transparent=True, metadata=unsaid)
    whole = written.getvalue()
    drawn = _STYLE.sub("", _NUMBERED_ID.sub("", whole[whole.index("<svg") :]))
    for colour, variable in PALETTE.items():
        drawn = drawn.replace(colour.lower(), f"var(--{variable})")
    return Html(drawn.strip())
