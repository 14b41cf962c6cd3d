"""Plays rounds until a project has had enough of them, and says what happened."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from flows.console import ConsoleDisplay
from flows.server import prefect_server
from flows.settings import RunSettings
from rlhf_core.ledger import Ledger, ProjectRecord
from rlhf_core.records import Prompt
from rlhf_core.settings import Execution, InvalidSettings, Json
from rlhf_core.sources import demonstrations, prompts
from rlhf_core.stages.bootstrap import Bootstrap, check_demonstrations, fingerprint_of, resolve
from rlhf_core.stages.prompts import split
from tasks.home import check_format, check_writable, open_home, saying_what_the_disk_did
from tasks.mlflow_store import quiet_environment
from tasks.reports import unfinished, untold

if TYPE_CHECKING:
    from tasks.project import Project


class Refused(ValueError):
    """What was asked for cannot be played; no round was touched."""


@dataclass(frozen=True)
class Plan:
    """A run that was checked: nothing in it can be refused for what the user gave."""

    settings: RunSettings
    bootstrap: Bootstrap
    """Without `auto`."""
    execution: Execution
    """Without `auto`."""
    fingerprint: str
    rounds: int
    """Rounds the project shall have had."""


def decided(ledger: Ledger) -> int:
    """Rounds the project has had."""
    return sum(ledger.decision(number) is not None for number in ledger.rounds())


def check(settings: RunSettings, home: Path, rounds: int | None, more: int | None) -> Plan:
    """Everything that can be refused is refused here, before anything is written."""
    if rounds is not None and more is not None:
        raise InvalidSettings(
            "--rounds says how many rounds the project shall have had, --more adds: give one of them"
        )
    check_format(home)
    check_writable(home)
    split([prompt.id for prompt in prompts(settings.prompt_source)], settings.prompts)
    if settings.policy_update.algorithm.ptx_coef:
        _check_texts(settings)
    fingerprint = settings.bootstrap.base.fingerprint()
    bootstrap, execution = resolve(settings.bootstrap, settings.execution)
    ledger = Ledger(home / "projects", settings.project)
    if ledger.exists:
        check_same(ledger.project(), bootstrap, fingerprint)
    else:
        check_demonstrations(bootstrap)
    wanted = decided(ledger) + more if more is not None else (1 if rounds is None else rounds)
    return Plan(settings, bootstrap, execution, fingerprint, wanted)


def _check_texts(settings: RunSettings) -> None:
    """Refuse a pretraining mix that has no plain texts to learn from."""
    source = settings.pretraining_source
    if source is None:
        raise InvalidSettings(
            f"policy_update.algorithm.ptx_coef is {settings.policy_update.algorithm.ptx_coef}, with no "
            "`pretraining_source`: name a file, a folder or a dataset of plain texts, or set ptx_coef to 0"
        )
    chats = [text.id for text in prompts(source) if text.text is None]
    if chats:
        raise InvalidSettings(
            f"pretraining_source: {len(chats)} rows are conversations ({', '.join(chats[:3])} ...), and a "
            "pretraining mix predicts plain text. Map a column of texts: `columns: {text: COLUMN}`"
        )


def check_same(record: ProjectRecord, bootstrap: Bootstrap, fingerprint: str) -> None:
    """Refuse to play a project on another trunk than the one it was opened with."""
    if record.base != fingerprint or Bootstrap.model_validate(record.settings["bootstrap"]) != bootstrap:
        raise InvalidSettings(
            f"project {record.name!r} was opened on another base model, adapter, kind of weights or "
            "fine-tuning: its policies mean nothing on this one. Use the `bootstrap` it was opened with, or "
            "name a new project."
        )
    if bootstrap.sft is not None:
        source = bootstrap.sft.demonstrations
        if record.demonstrations != fingerprint_of(demonstrations(source)):
            raise InvalidSettings(
                f"{source.name} does not hold the demonstrations any more that the trunk of project "
                f"{record.name!r} was fine-tuned on: on these it would be another one. Put them back, or "
                "name a new project."
            )


def run(plan: Plan, home: Path, display: ConsoleDisplay, wait: bool = False) -> dict[str, Json]:
    """Play what is missing; the summary of the project.

    Raises `Refused` while another command plays the project, unless told to wait for it, and where a prompt
    does not fit the base model; `DiskFailed` where the disk refuses a write.
    """
    from flows.summary import summary

    quiet_environment()
    name = plan.settings.project
    with saying_what_the_disk_did(home):
        open_home(home)
        (home / "projects").mkdir(exist_ok=True)
        with alone(home, name, display, wait):
            ledger = Ledger(home / "projects", name)
            open_ = ledger.open_round_number() is not None or unfinished(home, ledger) or untold(home, ledger)
            if decided(ledger) >= plan.rounds and not open_:
                display.say(
                    f"project {name} has had {decided(ledger)} of {plan.rounds} rounds: nothing to do"
                )
                return summary(home, name, executed=frozenset())
            display.say(f"project {name}: {decided(ledger)} of {plan.rounds} rounds so far; home {home}")
            for doubt in plan.settings.doubts():
                display.say(f"note: {doubt}")
            with prefect_server(home, meanwhile=slow_imports) as url:
                display.say(f"Prefect: {url.removesuffix('/api')}")
                project = _opened(plan, home, display)
                _play(plan, project, display)
            return summary(home, name, executed=frozenset(project.executed))


@contextmanager
def alone(home: Path, name: str, display: ConsoleDisplay, wait: bool) -> Iterator[None]:
    """One command at a time works on a project: its rounds come one after the other."""
    lock = FileLock(home / "projects" / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise Refused(
                f"another command is playing project {name!r} in {home}, and its rounds come one after the "
                "other. Wait for it, here with --wait."
            ) from None
        display.say(f"another command is playing project {name}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def slow_imports() -> None:
    """What takes seconds to import, while the server takes as many to start."""
    import rlhf_core.trunk  # noqa: F401


def _opened(plan: Plan, home: Path, display: ConsoleDisplay) -> "Project":
    from tasks.finishing import finish_what_was_left
    from tasks.opening import open_project
    from tasks.project import Project

    project = Project(home, plan.settings.project, plan.execution, display)
    begin_telling(project, display)
    open_project(project, plan.bootstrap, plan.fingerprint, plan.settings.seed, plan.settings.to_json())
    finish_what_was_left(project)
    return project


def begin_telling(project: "Project", display: ConsoleDisplay) -> None:
    """Make MLflow level with what earlier commands left, and say which runs those left open."""
    for name in project.begin_telling():
        display.say(f"the run {name} was left by a process that is gone: closed as KILLED")


def _fitting_prompts(plan: Plan, project: "Project") -> Iterator[Prompt]:
    """The prompts; refused where one is too long for the base model, or where it has no template for it."""
    from rlhf_core.generation import fitting
    from rlhf_core.models import load_codec

    settings = plan.settings
    samplings = (
        settings.rollouts.sampling,
        settings.policy_update.sampling,
        settings.evals.held_out.sampling,
    )
    trunk = project.store.open(project.ledger.anchor()["trunk"])
    try:
        yield from fitting(
            load_codec(trunk / "model"),
            prompts(settings.prompt_source),
            max(sampling.max_new_tokens for sampling in samplings),
        )
    except ValueError as error:
        raise Refused(f"prompt_source: {error}") from error


def _play(plan: Plan, project: "Project", display: ConsoleDisplay) -> None:
    from flows.round import round_flow
    from tasks.opening import Sources, close_round, import_prompts

    drawn = import_prompts(project.store, _fitting_prompts(plan, project))
    mixed = plan.settings.pretraining_source if plan.settings.policy_update.algorithm.ptx_coef else None
    texts = import_prompts(project.store, prompts(mixed), "texts") if mixed else None
    one_round = round_flow(project)
    while (number := project.ledger.open_round_number()) or decided(project.ledger) < plan.rounds:
        number = number or len(project.ledger.rounds()) + 1
        display.say(f"round {number} of project {project.name}")
        state = one_round(number, plan.settings, Sources(drawn, texts), return_state=True)
        if not state.is_completed():
            close_round(project, number)
            state.result()
        display.say(f"{state.name}: {state.message}")
        if project.ledger.decision(number) is None:  # TrackingBehind: the same command goes on
            close_round(project, number)
            return
