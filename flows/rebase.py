"""`rlhf rebase`: the champion becomes the new trunk, and the KL budget to the initial policy starts anew."""

from pathlib import Path
from typing import TYPE_CHECKING

from flows.console import ConsoleDisplay
from flows.loop import Refused, alone, begin_telling, slow_imports
from flows.server import prefect_server
from flows.summary import champion_of, champion_version, rebase_of, short
from rlhf_core.ledger import DecisionRecord, Ledger, RebaseRecord
from rlhf_core.settings import Json
from tasks.home import check_format, check_writable, saying_what_the_disk_did
from tasks.mlflow_store import quiet_environment
from tasks.reports import untold

if TYPE_CHECKING:
    from prefect import Flow, State

    from tasks.project import Project


def check(home: Path, name: str) -> None:
    """Refuse a home that is none of ours or cannot be written to, and a project that is not in it."""
    check_format(home)
    Ledger(home / "projects", name).project()
    check_writable(home)


def rebase(home: Path, name: str, display: ConsoleDisplay) -> dict[str, Json]:
    """Merge the champion and tell MLflow; or only what an interrupted rebase left to do.

    Raises `Refused` where there is nothing to merge, while a round is open and while another command plays.
    """
    ledger = Ledger(home / "projects", name)
    quiet_environment()
    with saying_what_the_disk_did(home), alone(home, name, display, wait=False):
        won = to_merge(home, ledger)
        with prefect_server(home, meanwhile=slow_imports) as url:
            display.say(f"Prefect: {url.removesuffix('/api')}")
            _carry_out(home, ledger, won, display)
        record = ledger.rebases()[-1]
        return {
            "project": name,
            "home": str(home),
            "champion": champion_of(home, name, ledger),
            "rebase": rebase_of(record),
        }


def to_merge(home: Path, ledger: Ledger) -> DecisionRecord | None:
    """The decision whose candidate shall be merged; none where only MLflow has to be told of the last one."""
    open_, won, rebased = ledger.open_round_number(), ledger.won(), ledger.rebases()
    if open_ is not None:
        raise Refused(
            f"round {open_} of project {ledger.name!r} is open, and a round ends on the trunk that it began "
            "on. Finish it with `rlhf run` and its run file, and rebase then."
        )
    if won is None and not untold(home, ledger):
        since = f"since the rebase after round {rebased[-1].round}" if rebased else "of its rounds so far"
        raise Refused(
            f"the champion of project {ledger.name!r} is its initial policy: no round {since} was promoted. "
            "Merged it would be the same trunk again, and KL to it is 0 already. Rebase once a round was "
            "promoted."
        )
    return won


def _carry_out(home: Path, ledger: Ledger, won: DecisionRecord | None, display: ConsoleDisplay) -> None:
    from tasks.finishing import finish_what_was_left
    from tasks.project import Project, execution_of

    project = Project(home, ledger.name, execution_of(ledger), display)
    try:
        begin_telling(project, display)
        finish_what_was_left(project)
        if won is not None:
            rebase_flow(project, won)(ledger.rounds()[-1], return_state=True).result()
    finally:
        project.teller.stop()


def rebase_flow(project: "Project", won: DecisionRecord) -> "Flow[[int], State[RebaseRecord]]":
    """The rebase as a Prefect flow of this project."""
    from prefect import flow
    from prefect.states import Completed

    from tasks.finishing import finish_rebase
    from tasks.rebasing import merge_champion

    @flow(
        name="rebase",
        flow_run_name=f"{project.name} rebase after round {{number}}",
        validate_parameters=False,
        persist_result=False,
    )
    def one_rebase(number: int) -> "State[RebaseRecord]":
        record = merge_champion(project, won)
        finish_rebase(project, record)
        return Completed(name="Rebased", message=f"after round {number}", data=record)

    return one_rebase


def sentence(home: Path, name: str) -> str:
    """What the last rebase of a project did, and what follows."""
    ledger = Ledger(home / "projects", name)
    record = ledger.rebases()[-1]
    completions, kl, most = (
        record.metrics[f"rebase/{what}"] for what in ("completions", "kl_to_champion", "max_log_ratio")
    )
    return (
        f"project {name}: rebased after round {record.round}. Trunk {short(record.trunk)} is champion "
        f"{short(record.champion)} merged into trunk {short(record.old_trunk)}: over {completions:.0f} "
        f"completions of that champion its KL to it is {kl:.2g} nats, and {most:.2g} at most in one.\n"
        f"From round {record.round + 1} on the initial policy is {short(record.policy)}, version "
        f"{champion_version(home, name, ledger)}: KL to it starts anew from 0, and so does its budget."
    )
