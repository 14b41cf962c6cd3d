"""What a monitor is: a step's numbers in, readings beside their limits out; knows no sink."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from torch import Tensor

from rlhf_core.alarms import Action
from rlhf_core.algorithms.experience import Experience
from rlhf_core.settings import Settings

MAX_EXAMPLES = 3
MAX_EXAMPLE_CHARACTERS = 160


@dataclass(frozen=True)
class Seen:
    """One step, as its monitors see it: looked at, never changed."""

    step: int
    found: Experience
    metrics: Mapping[str, float]

    def number(self, name: str) -> float | None:
        """A metric of the step; none where it was not measured or is not finite."""
        value = self.metrics.get(name)
        return value if value is not None and math.isfinite(value) else None

    def tokens(self, tensor: Tensor | None) -> Tensor | None:
        """[N] of a tensor [B, T] where tokens count; none where it was not computed or is not finite."""
        if tensor is None:
            return None
        counted = tensor[self.found.batch.response_mask].float()
        return counted if bool(counted.isfinite().all()) else None


@dataclass
class Memory:
    """What a monitor keeps of earlier steps: plain numbers, so that a checkpoint holds them as they are."""

    firsts: dict[str, float] = field(default_factory=dict)
    """By name, the value of the first step that had one."""
    lasts: dict[str, list[float]] = field(default_factory=dict)
    """By name, the last values, the oldest first."""

    def first(self, name: str, value: float) -> float:
        """The value of the first step, which is this one if there was none."""
        return self.firsts.setdefault(name, value)

    def last(self, name: str, value: float, size: int) -> list[float]:
        """The last `size` values with this one at the end."""
        kept = [*self.lasts.get(name, []), value][-size:]
        self.lasts[name] = kept
        return kept


@dataclass(frozen=True)
class Reading:
    """One number beside its limit."""

    what: str
    """The number in words, the same at every step."""
    value: float
    limit: float
    side: Literal["above", "below"] = "above"
    """Which side of the limit is wrong."""
    counts: bool = True
    """Whether all else that makes it wrong is true as well."""
    examples: tuple[str, ...] = ()

    @property
    def beyond(self) -> bool:
        """It is on the wrong side, and that counts."""
        return self.counts and self.worse_than(self.limit)

    def worse_than(self, value: float) -> bool:
        """It lies further on the wrong side than `value`."""
        return self.value > value if self.side == "above" else self.value < value

    @property
    def spoken(self) -> str:
        """The number and its limit in words."""
        return f"{self.what} is {self.value:.3g}, {self.side} {self.limit:.3g}"


class Monitor(Settings):
    """One thing to watch for."""

    action: Action = Action.WARN
    """What follows when it finds something: `warn`, `stop` (the candidate is not promoted), or `off`."""
    steps: int = Field(default=1, ge=1)
    """Steps in a row that must be beyond a limit before it says so."""

    why: ClassVar[str]
    """What it means where they are beyond their limits; a sentence."""
    advice: ClassVar[str]
    """What to change: settings and directions."""

    @field_validator("action", mode="before")
    @classmethod
    def _off_is_no_false(cls, value: object) -> object:
        return Action.OFF if value is False else value  # YAML reads a bare `off` as false

    @abstractmethod
    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """The step's readings; none of what cannot be known yet, or was not measured."""


def shown(text: str) -> str:
    """A text as an example, its line ends and spaces made visible, cut where it is long."""
    quoted = repr(text)
    return quoted if len(quoted) <= MAX_EXAMPLE_CHARACTERS else f"{quoted[:MAX_EXAMPLE_CHARACTERS]}…"


def median(values: list[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
