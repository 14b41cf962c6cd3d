"""What the terminal shows while rounds are played: a line for each stage, live where it is a terminal."""

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flows.terminal import safe

QUIET_SECONDS = 15.0


class ConsoleDisplay:
    """Progress on stderr; every so often a plain line where stderr is a file."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0

    def started(self, name: str) -> None:
        """A stage begins."""
        self._last_line = time.monotonic()
        if self.console.is_terminal:
            self._live = Progress(
                SpinnerColumn(),
                TextColumn("{task.description:<24}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._live.add_task(name, total=None, text="")
            self._live.start()

    def progress(self, name: str, done: int, total: int, text: str) -> None:
        """It is this far."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, total=total, text=text)
        elif time.monotonic() - self._last_line > QUIET_SECONDS:
            self._last_line = time.monotonic()
            self.console.print(f"  {name:<24} {done}/{total}  {text}", markup=False)

    def finished(self, name: str, seconds: float, cached: bool) -> None:
        """It is done."""
        self._stop()
        took = "cached" if cached else f"{seconds:.1f} s"
        self.console.print(f"[green]✓[/green] {name:<24} {took}")

    def alarm(self, name: str, sentence: str) -> None:
        """Something looks wrong."""
        self.console.print(f"! {name}: {safe(sentence)}", style="yellow", markup=False)

    def say(self, sentence: str) -> None:
        """A line for people."""
        self._stop()
        self.console.print(sentence, markup=False)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = self._task = None
