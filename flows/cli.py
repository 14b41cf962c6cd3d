"""The command `rlhf`. Exit codes: 0 done (a rejected candidate is done), 2 bad input, 1 anything else.

Nothing heavy is imported before it is known that it will be used: `--help` answers at once.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import (
    Against,
    AsJson,
    Home,
    NewTokens,
    PolicyName,
    Port,
    ProjectName,
    RowKind,
    Seed,
    Temperature,
    ending,
    refusing,
    stdout_kept_for_json,
)
from rlhf_core import __version__

if TYPE_CHECKING:
    from rlhf_core.generation import Sampling

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"rlhf-rounds {__version__}")
        raise typer.Exit


@app.callback()
def rlhf(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
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
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for another command that plays this project.")
    ] = False,
    home: Home = Path(".rlhf"),
    as_json: AsJson = False,
) -> None:
    """Play rounds of the project in RUN_FILE; what is finished is not done again."""
    with stdout_kept_for_json(as_json):
        from flows.console import ConsoleDisplay
        from flows.loop import Refused, check
        from flows.loop import run as play
        from flows.settings import load_run_file
        from flows.summary import show
        from rlhf_core.ledger import Ledger
        from tasks.home import DiskFailed

        with refusing():
            overrides = [*(set_ or []), *([f"seed={seed}"] if seed is not None else [])]
            plan = check(load_run_file(run_file, overrides), home.resolve(), rounds, more)
        display = ConsoleDisplay()
        with refusing(Refused), ending(DiskFailed):
            found = play(plan, home.resolve(), display, wait=wait)
            undone = Ledger(home / "projects", plan.settings.project).open_round_number()
        if not as_json:
            show(home, plan.settings.project, display.console)
    if as_json:
        typer.echo(json.dumps(found))
    if undone is not None:  # promotion waits for MLflow
        raise typer.Exit(1)


@app.command()
def status(
    project: ProjectName,
    home: Home = Path(".rlhf"),
    as_json: AsJson = False,
) -> None:
    """What has happened in PROJECT."""
    with stdout_kept_for_json(as_json):
        from rich.console import Console

        from flows.summary import show, summary
        from rlhf_core.ledger import Ledger
        from tasks.home import check_format

        with refusing():
            check_format(home)
            Ledger(home / "projects", project).project()
        if as_json:
            found = summary(home.resolve(), project)
        else:
            show(home, project, Console())
    if as_json:
        typer.echo(json.dumps(found))


@app.command()
def rebase(
    project: ProjectName,
    home: Home = Path(".rlhf"),
    as_json: AsJson = False,
) -> None:
    """Merge PROJECT's champion into a new trunk: it is the initial policy from here on, and KL to it is 0."""
    with stdout_kept_for_json(as_json):
        from flows.console import ConsoleDisplay
        from flows.loop import Refused
        from flows.rebase import check, sentence
        from flows.rebase import rebase as merge
        from tasks.home import DiskFailed

        display = ConsoleDisplay()
        with refusing():
            check(home, project)
        with refusing(Refused), ending(DiskFailed):
            found = merge(home.resolve(), project, display)
        display.say(sentence(home.resolve(), project))
    if as_json:
        typer.echo(json.dumps(found))


@app.command()
def replay(project: ProjectName, home: Home = Path(".rlhf")) -> None:
    """Tell MLflow whatever it lacks of PROJECT, each number with its own time; a second time nothing."""
    from flows.console import ConsoleDisplay
    from flows.replay import replay as tell
    from tasks.mlflow_store import TrackingUnavailable

    with refusing(), ending(TrackingUnavailable):
        found = tell(home.resolve(), project, ConsoleDisplay())
    typer.echo(f"{found['rounds']} rounds: {found['runs_made']} runs made, {found['facts_sent']} facts sent")


@app.command()
def ui(home: Home = Path(".rlhf"), prefect_port: Port = None, mlflow_port: Port = None) -> None:
    """Prefect's and MLflow's pages over a home, on 127.0.0.1, until Ctrl-C."""
    from flows.pages import serve
    from flows.service import ServerFailed

    def say(prefect: str, mlflow: str) -> None:
        typer.echo(f"Prefect  {prefect}\nMLflow   {mlflow}\nCtrl-C ends both.")

    with refusing(), ending(ServerFailed):
        serve(home.resolve(), prefect_port, mlflow_port, say)


@app.command()
def doctor(home: Home = Path(".rlhf"), as_json: AsJson = False) -> None:
    """What this machine has, how fast it multiplies, what is missing and how to get it."""
    with stdout_kept_for_json(as_json):
        from rich.console import Console

        from flows.doctor import as_json as to_json
        from flows.doctor import examine, healthy, show

        findings = examine(home.resolve())
        if not as_json:
            show(findings, Console(highlight=False))
    if as_json:
        typer.echo(json.dumps(to_json(findings)))
    raise typer.Exit(0 if healthy(findings) else 1)


@app.command()
def data(
    place: Annotated[str, typer.Argument(metavar="PATH|hub:OWNER/NAME", help="A file, a folder, a dataset.")],
    as_: Annotated[
        RowKind | None, typer.Option("--as", help="What its rows are; else it is told from the first.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="field=column, for instance prompt=question; may be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Read no more rows than this.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a file, a folder or a dataset holds, and which of its rows are bad, before a run is given it."""
    with stdout_kept_for_json(as_json):
        from rich.console import Console

        from flows.data import describe, show, source_at

        with refusing():
            found = describe(source_at(place, columns or ()), as_.value if as_ else None, limit)
        if not as_json:
            show(found, Console(highlight=False))
    if as_json:
        typer.echo(json.dumps(found))


@app.command()
def sample(
    policy: PolicyName,
    prompt: Annotated[str | None, typer.Argument(help="Else the project's held-out prompts.")] = None,
    against: Against = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Samples, or held-out prompts.")] = 3,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    home: Home = Path(".rlhf"),
    as_json: AsJson = False,
) -> None:
    """What a policy says to a plain text that it continues."""
    with stdout_kept_for_json(as_json):
        from rich.console import Console

        from flows.talk import sample as answers
        from flows.talk import show

        names = [policy, *([against] if against else [])]
        found = []
        with refusing():
            sampling = _sampling(max_new_tokens, temperature)
            for one in answers(home.resolve(), names, prompt, sampling, seed, number):
                found.append(one)
                if not as_json:
                    show(one, Console(highlight=False))
    if as_json:
        typer.echo(json.dumps({"samples": found}))


@app.command()
def chat(
    policy: PolicyName,
    against: Against = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    home: Home = Path(".rlhf"),
) -> None:
    """Talk to a policy through its chat template, or to two at once."""
    with stdout_kept_for_json(False):
        from rich.console import Console

        from flows.talk import chat as converse

        console = Console(highlight=False)
        names = [policy, *([against] if against else [])]
        with refusing():
            sampling = _sampling(max_new_tokens, temperature)
            converse(home.resolve(), names, sampling, seed, _line, console)


def _sampling(max_new_tokens: int, temperature: float) -> "Sampling":
    from rlhf_core.generation import Sampling

    return Sampling(max_new_tokens=max_new_tokens, temperature=temperature, batch_size=1)


def _line() -> str | None:
    """What is typed; None at the end of the input or after Ctrl-C."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return None


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
