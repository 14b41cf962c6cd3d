"""Others' text in the terminal is text and nothing else."""

from flows.terminal import safe


def test_sequences_that_steer_a_terminal_are_shown_by_their_codes() -> None:
    # ESC ]0;...BEL sets the title, ESC [2J clears the screen, CR writes over the line, U+202E turns it round.
    hostile = "a\x1b]0;title\x07b\x1b[2Jc\rd\u202ee\x9b1mf"
    assert safe(hostile) == "a⟨U+001B⟩]0;title⟨U+0007⟩b⟨U+001B⟩[2Jc⟨U+000D⟩d⟨U+202E⟩e⟨U+009B⟩1mf"


def test_what_people_write_stays_as_it_is() -> None:
    assert (
        safe("Tabs\tand\nlines\r\nand ümlauts, 漢字 [bold]") == "Tabs\tand\nlines\nand ümlauts, 漢字 [bold]"
    )
