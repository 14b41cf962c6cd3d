"""What the commands of `rlhf` have in common: their options, and how they end.

Nothing heavy is imported: `--help` answers at once.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Home = Annotated[Path, typer.Option("--home", help="The folder that holds all a project leaves.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
Against = Annotated[str | None, typer.Option(help="Another policy, side by side.")]
ProjectName = Annotated[str, typer.Argument(metavar="PROJECT", help="The project's name.")]
PolicyName = Annotated[
    str, typer.Argument(metavar="PROJECT[@ALIAS|:VERSION]", help="@champion if nothing is said.")
]
NewTokens = Annotated[int, typer.Option(min=1, help="An answer is cut here.")]
Temperature = Annotated[float, typer.Option(min=0.01, max=10.0, help="1 is how policies are measured.")]
Seed = Annotated[int, typer.Option(help="Of all random numbers.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Else the last one, or any that is free.")]
BAD_INPUT = 2


class RowKind(StrEnum):
    """What the rows of a source are."""

    PROMPTS = "prompts"
    PREFERENCES = "preferences"
    DEMONSTRATIONS = "demonstrations"


@contextlib.contextmanager
def refusing(error: type[ValueError] = ValueError) -> Iterator[None]:
    """Bad input ends the command with its sentence and code 2."""
    with ending(error, BAD_INPUT):
        yield


@contextlib.contextmanager
def ending(error: type[Exception], code: int = 1) -> Iterator[None]:
    """What can be said in a sentence ends the command with it, without a traceback."""
    try:
        yield
    except error as told:
        typer.echo(str(told), err=True)
        raise typer.Exit(code) from told


@contextlib.contextmanager
def stdout_kept_for_json(as_json: bool) -> Iterator[None]:
    """Whatever a library prints goes to stderr while this lasts."""
    # Threads that wait asleep halve the speed of the small products of decoding; threads that spin on stand
    # still several times longer where other work shares the cores. These spin for tens of microseconds.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")
    # A stage tells its own progress.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield
