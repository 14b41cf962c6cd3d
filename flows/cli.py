"""The command `rlhf`. Exit codes: 0 done (a rejected candidate is done), 2 bad input, 1 anything else."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Home = Annotated[Path, typer.Option("--home", help="The folder that holds all a project leaves.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
BAD_INPUT = 2


@app.callback()
def rlhf() -> None:
    """Iterative RLHF: sample, label, retrain, validate, improve, measure, promote or reject, again."""


@app.command()
def run(
    run_file: Annotated[Path, typer.Argument(help="A YAML run file.")],
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Until the project has had this many rounds.")
    ] = None,
    more: Annotated[int | None, typer.Option(min=1, help="This many rounds more.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="path.to.setting=value; may be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of all randomness.")] = None,
    home: Home = Path(".rlhf"),
    as_json: AsJson = False,
) -> None:
    """Play rounds of the project in RUN_FILE; what is finished is not done again."""
    with _stdout_kept_for_json(as_json):
        from flows.console import ConsoleDisplay
        from flows.loop import check
        from flows.loop import run as play
        from flows.settings import load_run_file
        from flows.summary import show

        with _refusing():
            overrides = [*(set_ or []), *([f"seed={seed}"] if seed is not None else [])]
            plan = check(load_run_file(run_file, overrides), home.resolve(), rounds, more)
        display = ConsoleDisplay()
        found = play(plan, home.resolve(), display)
        if not as_json:
            show(home, plan.settings.project, display.console)
    if as_json:
        typer.echo(json.dumps(found))


@app.command()
def status(
    project: Annotated[str, typer.Argument(help="The project's name.")],
    home: Home = Path(".rlhf"),
    as_json: AsJson = False,
) -> None:
    """What has happened in PROJECT."""
    with _stdout_kept_for_json(as_json):
        from rich.console import Console

        from flows.summary import show, summary
        from rlhf_core.ledger import Ledger

        with _refusing():
            Ledger(home / "projects", project).project()
        if as_json:
            found = summary(home.resolve(), project)
        else:
            show(home, project, Console())
    if as_json:
        typer.echo(json.dumps(found))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Bad input ends the command with its sentence and code 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(BAD_INPUT) from error


@contextlib.contextmanager
def _stdout_kept_for_json(as_json: bool) -> Iterator[None]:
    """Whatever a library prints goes to stderr while this lasts."""
    # Threads that wait asleep halve the speed of the small products of decoding; threads that spin on stand
    # still several times longer where other work shares the cores. These spin for tens of microseconds.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
