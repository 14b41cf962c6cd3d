"""What a browser would make of markup, as far as the standard library tells."""

from html.parser import HTMLParser

Event = tuple[str, str, tuple[tuple[str, str | None], ...]]
"""start, end, text or other; its name or content; its attributes."""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[Event] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(("start", tag, tuple(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(("end", tag, ()))

    def handle_data(self, data: str) -> None:
        self.found.append(("text", data, ()))

    def handle_comment(self, data: str) -> None:
        self.found.append(("other", data, ()))

    def handle_decl(self, decl: str) -> None:
        self.found.append(("other", decl, ()))


def events(markup: str) -> list[Event]:
    """Every tag and text of the markup, in order."""
    reader = _Reader()
    reader.feed(markup)
    reader.close()
    return reader.found
