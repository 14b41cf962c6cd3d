"""`rlhf sample` and `rlhf chat`: talk to any policy of a project, or to two side by side."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from flows.terminal import safe
from rlhf_core.artifacts import derive_seed
from rlhf_core.generation import Sampling
from rlhf_core.records import Message, Prompt
from rlhf_core.settings import InvalidSettings, Json
from tasks.talk import Policy, Speakers, find_policy, held_out_prompts

QUIT, RESET = "/quit", "/reset"


def sample(
    home: Path, names: Sequence[str], prompt: str | None, sampling: Sampling, seed: int, number: int
) -> Iterator[dict[str, Json]]:
    """What the policies say: `number` times to the prompt, or once to each of as many held-out prompts."""
    policies = _found(home, names)
    prompts = [Prompt(id="asked", text=prompt)] * number if prompt else _own(home, policies[0], number)
    speakers = Speakers(home, policies)
    for count, one in enumerate(prompts):
        texts = speakers.answer([one] * len(policies), sampling, derive_seed(seed, "sample", count))
        yield {"prompt": one.shown, **dict(zip((p.name for p in policies), texts, strict=True))}


def _own(home: Path, policy: Policy, number: int) -> list[Prompt]:
    prompts = held_out_prompts(home, policy.project, number)
    if not prompts:
        raise InvalidSettings(f"no round of project {policy.project!r} has drawn prompts yet: give a PROMPT")
    return prompts


def _found(home: Path, names: Sequence[str]) -> list[Policy]:
    policies = [find_policy(home, name) for name in names]
    if len({policy.name for policy in policies}) < len(policies):
        raise InvalidSettings(f"{names[0]} against itself: name another policy with --against")
    return policies


def show(answer: dict[str, Json], console: Console) -> None:
    """A prompt, and what each policy says to it, side by side where there are two."""
    answer = dict(answer)
    console.print(Text(safe(str(answer.pop("prompt"))), style="bold"))
    panels = [Panel(Text(safe(str(text))), title=name, title_align="left") for name, text in answer.items()]
    width = console.width // len(panels) - 1 if len(panels) > 1 else None
    console.print(Columns(panels, width=width, expand=True))


def chat(
    home: Path,
    names: Sequence[str],
    sampling: Sampling,
    seed: int,
    read: Callable[[], str | None],
    console: Console,
) -> None:
    """A conversation until /quit or the end of the input; each policy remembers its own answers."""
    policies = _found(home, names)
    speakers = Speakers(home, policies)
    console.print(
        f"{' and '.join(p.name for p in policies)}: {RESET} starts anew, {QUIT} ends.", markup=False
    )
    histories: list[tuple[Message, ...]] = [()] * len(policies)
    turn = 0
    while (said := read()) is not None and said.strip() != QUIT:
        if said.strip() == RESET:
            histories = [()] * len(policies)
            console.print("A new conversation.")
        elif said.strip():
            turn += 1
            asked = [(*history, Message(role="user", content=said)) for history in histories]
            prompts = [Prompt(id=f"turn-{turn}", messages=messages) for messages in asked]
            try:
                answers = speakers.answer(prompts, sampling, derive_seed(seed, "chat", turn))
            except ValueError as error:  # no template, or a conversation longer than the context
                raise InvalidSettings(str(error)) from error
            histories = [
                (*messages, Message(role="assistant", content=answer))
                for messages, answer in zip(asked, answers, strict=True)
            ]
            named = dict(zip((policy.name for policy in policies), answers, strict=True))
            show({"prompt": said, **named}, console)
