"""Rewards that a rule decides from the completion alone: the right answer, a pattern found, a length kept."""

import re
from itertools import islice
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.records import Completion
from rlhf_core.rewards.scores import PerCompletion
from rlhf_core.settings import Settings


def _compilable(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} does not compile: {error}.") from error
    return pattern


class ExactMatch(Settings):
    """1 for a completion that is the answer, 0 for any other."""

    type: Literal["exact_match"] = "exact_match"
    """The name of this reward."""
    answer: str = Field(min_length=1)
    """The text that is right."""
    strip: bool = True
    """Leave out white space around the answer and around the completion."""
    ignore_case: bool = False
    """Take upper and lower case as the same."""

    @model_validator(mode="after")
    def _says_something(self) -> "ExactMatch":
        if not self._normal(self.answer):
            raise ValueError(
                f"the answer {self.answer!r} is empty once stripped: every blank completion would be right. "
                "Give an answer, or set `strip: false`."
            )
        return self

    def build(self) -> PerCompletion:
        """The reward source."""
        answer = self._normal(self.answer)
        return PerCompletion(lambda item: float(self._normal(item.text) == answer))

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class RegexMatch(Settings):
    """1 for a completion that a regular expression matches, else 0; or how often it matches."""

    type: Literal["regex"] = "regex"
    """The name of this reward."""
    pattern: Annotated[str, AfterValidator(_compilable)] = Field(min_length=1)
    """A regular expression in Python's syntax; flags go in front, as in `(?i)yes`."""
    mode: Literal["search", "fullmatch", "count"] = "search"
    """`search` looks anywhere, `fullmatch` at the whole text, `count` counts matches that are not empty."""
    max_count: int = Field(default=10, ge=1)
    """The most that `count` gives, so that repeating the pattern without end does not pay."""

    def build(self) -> PerCompletion:
        """The reward source."""
        pattern = re.compile(self.pattern)

        def count(item: Completion) -> float:
            matches = (match for match in pattern.finditer(item.text) if match.group())
            return float(sum(1 for _ in islice(matches, self.max_count)))

        return PerCompletion(
            {
                "search": lambda item: float(pattern.search(item.text) is not None),
                "fullmatch": lambda item: float(pattern.fullmatch(item.text) is not None),
                "count": count,
            }[self.mode]
        )


class LengthWindow(Settings):
    """1 for a completion of a wanted number of tokens, falling to 0 outside.

    d tokens outside the window give max(0, 1 - d / soft_margin); without a margin, 0.
    """

    type: Literal["length_window"] = "length_window"
    """The name of this reward."""
    min_tokens: int = Field(ge=1)
    """The shortest completion that gets 1, in response tokens, the end token included."""
    max_tokens: int = Field(ge=1)
    """The longest completion that gets 1."""
    soft_margin: int = Field(default=0, ge=0)
    """Tokens outside the window over which the reward falls to 0; 0 ends it at once."""

    @model_validator(mode="after")
    def _window(self) -> "LengthWindow":
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: no completion could "
                "get 1. Give a window that holds a length."
            )
        return self

    def build(self) -> PerCompletion:
        """The reward source."""

        def rule(item: Completion) -> float:
            length = len(item.response_ids)
            outside = max(self.min_tokens - length, length - self.max_tokens, 0)
            # Lengths are whole numbers, so that a margin of 1 already reaches 0 at the first token outside.
            return max(0.0, 1.0 - outside / max(self.soft_margin, 1))

        return PerCompletion(rule)
