"""Steps made by hand: experiences of a few rows whose every number is known, for monitors to look at."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rlhf_core.alarms import Alarm
from rlhf_core.algorithms.experience import Experience
from rlhf_core.algorithms.monitors import Watcher
from rlhf_core.algorithms.monitors.looking import Monitor
from rlhf_core.batch import RolloutBatch, collate_completions
from rlhf_core.records import Completion, StopReason

Step = tuple[Experience, Mapping[str, float]]
PAD = 256
TEXTS = tuple(f"{word} thing" for word in ("red", "blue", "green", "old", "new", "tall", "small", "odd"))


def said(number: int, text: str) -> Completion:
    """A completion whose tokens are the bytes of its text."""
    return Completion(
        id=f"p{number}/0",
        prompt_id=f"p{number}",
        prompt_text="?",
        prompt_ids=[30],
        response_ids=list(text.encode()),
        text=text,
        stop=StopReason.LENGTH,
    )


def a_step(
    metrics: Mapping[str, float] | None = None,
    *,
    texts: Sequence[str] = TEXTS,
    scores: Sequence[float] | None = None,
    log_ratio: Sequence[float] | float = 0.0,
    returns: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Step:
    """A step whose rows say `texts`; `log_ratio` is each row's at each of its tokens; values are 0."""
    completions = [said(number, text) for number, text in enumerate(texts)]
    text = collate_completions(completions, PAD)
    mask = text.response_mask
    each = torch.as_tensor(log_ratio).expand(len(texts))[:, None] * mask
    batch = RolloutBatch(
        **vars(text),
        group_ids=torch.arange(len(texts)),
        logprobs=-2.0 * mask + each,
        ref_logprobs=-2.0 * mask,
        scores=torch.tensor(scores if scores is not None else [0.0] * len(texts)),
        values=torch.zeros(mask.shape),
        returns=returns,
        advantages=advantages,
    )
    return Experience(completions, batch, torch.zeros(mask.shape)), metrics or {}


def series(name: str, *values: float, **more: Sequence[float]) -> list[Step]:
    """Steps that differ in one metric, and in those of `more` (their first `_` is a `/`)."""
    others = {key.replace("_", "/", 1): those for key, those in more.items()}
    return [
        a_step({name: value, **{other: those[i] for other, those in others.items()}})
        for i, value in enumerate(values)
    ]


def play(monitor: Monitor, steps: Iterable[Step]) -> list[Alarm]:
    """Everything that a monitor says of the steps."""
    watcher = Watcher({"it": monitor})
    return [
        alarm
        for number, (found, metrics) in enumerate(steps)
        for alarm in watcher.step(number, found, metrics)
    ]


def begins(monitor: Monitor, steps: Iterable[Step]) -> list[int]:
    """The steps at which its alarms begin."""
    return [alarm.step for alarm in play(monitor, steps) if not alarm.over]
