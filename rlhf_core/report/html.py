"""HTML's pieces: whatever is not markup already is others' text, and is escaped here and nowhere else."""

import html
from collections.abc import Iterable

from rlhf_core.report.characters import visible


class Html(str):
    """Markup that stands in the page as it is."""

    __slots__ = ()


def text(written: str) -> Html:
    """Inert text: nothing in it is markup, and what has no shape is shown by its code; line ends stay."""
    if isinstance(written, Html):
        return written
    lines = ("".join(map(visible, line)) for line in written.split("\n"))
    return Html(html.escape("\n".join(lines)))


def join(pieces: Iterable[str]) -> Html:
    """The pieces one after the other."""
    return Html("".join(map(text, pieces)))


def tag(name: str, *children: str, **attributes: str) -> Html:
    """An element; `class_` is the attribute `class`, and `stroke_width` is `stroke-width`."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{named}>{join(children)}</{name}>")


def table(head: Iterable[str], rows: Iterable[Iterable[str]], class_: str) -> Html:
    """A table; each cell knows its column's name, which the style shows where a phone stacks the cells."""
    columns = list(head)
    body = (
        tag(
            "tr",
            *(tag("td", cell, data_label=column) for column, cell in zip(columns, row, strict=True)),
        )
        for row in rows
    )
    return tag(
        "table",
        tag("thead", tag("tr", *(tag("th", column, scope="col") for column in columns))),
        tag("tbody", *body),
        class_=class_,
    )


def link(name: str, target: str) -> Html:
    """A link if the target is an address of the web; anything else is shown, never followed."""
    if target.startswith(("http://", "https://")):
        return tag("a", name, href=target, rel="noreferrer")
    return join((name, ": ", tag("code", target)))
