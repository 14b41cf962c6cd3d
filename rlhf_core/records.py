"""The rows that a round reads and writes: prompts, completions, comparisons, preferences, measurements."""

from enum import StrEnum

from pydantic import Field, field_validator, model_validator

from rlhf_core.settings import Settings


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    """The policy gave one of the model's end tokens; it is the last response token."""
    LENGTH = "length"
    """The token limit was reached; the completion is cut, not finished."""


class Choice(StrEnum):
    """What an annotator said of a comparison."""

    A = "a"
    """The first completion is better."""
    B = "b"
    """The second completion is better."""
    TIE = "tie"
    """Neither is better."""

    def swap(self) -> "Choice":
        """The same judgement of the swapped comparison."""
        return {Choice.A: Choice.B, Choice.B: Choice.A, Choice.TIE: Choice.TIE}[self]


class Message(Settings):
    """One turn of a conversation."""

    role: str = Field(min_length=1)
    """Who speaks, in the words of the chat template: system, user, assistant."""
    content: str
    """What is said; control tokens in it stay text."""


class Prompt(Settings):
    """What a policy is asked to continue or to answer: plain text, or messages."""

    id: str = Field(min_length=1)
    """Unique within a project; it decides the pool, for ever."""
    kind: str = ""
    """A label for slices of the metrics."""
    text: str | None = None
    """A plain opening that the model continues."""
    messages: tuple[Message, ...] | None = None
    """A conversation that the model answers through its chat template."""

    @model_validator(mode="after")
    def _one_form(self) -> "Prompt":
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.id!r} needs `text` or `messages`, and not both")
        last = self.messages[-1] if self.messages else Message(role="user", content=self.text or "")
        if not last.content.strip():
            raise ValueError(f"prompt {self.id!r} is empty: there is nothing to continue or to answer")
        if last.role == "assistant":
            raise ValueError(f"prompt {self.id!r} ends with the assistant's turn: there is nothing to answer")
        return self

    @property
    def shown(self) -> str:
        """The prompt as a person reads it."""
        if self.text is not None:
            return self.text
        return "\n".join(f"{message.role}: {message.content}" for message in self.messages or ())


class Completion(Settings):
    """One sample from a policy, with the token ids it was sampled with: nothing is ever tokenised again."""

    id: str
    """`<prompt id>/<number of the sample>`."""
    prompt_id: str
    """The prompt it continues or answers."""
    prompt_text: str
    """The prompt as a person reads it."""
    prompt_ids: list[int] = Field(min_length=1)
    """The prompt's tokens as the model saw them."""
    response_ids: list[int] = Field(min_length=1)
    """The sampled tokens, the end token included where there is one."""
    text: str
    """The response decoded, without special tokens."""
    stop: StopReason
    """Why it ended."""


class Token(Settings):
    """One response token of a completion that is looked at."""

    text: str
    """Decoded by itself; empty for an end token."""
    kl: float
    """Estimate of KL to the reference."""
    advantage: float
    """What it was learned with."""
    value: float
    """Expected return of the state before it."""


class LookedAt(Settings):
    """One completion of a policy update, kept for people to look at."""

    step: int
    prompt: str
    text: str
    score: float
    """Of the reward source, before any shaping."""
    kl: float
    """Summed over its tokens; nats."""
    length: int
    """Response tokens."""
    stop: StopReason
    tokens: list[Token]
    """Empty for those that are looked at as a whole."""


class Comparison(Settings):
    """Two completions of one prompt, to be judged."""

    id: str
    """`<first completion>|<second completion>`."""
    prompt_id: str
    """The prompt both answer."""
    completion_a: str
    """Id of the completion shown first."""
    completion_b: str
    """Id of the completion shown second."""

    def swap(self) -> "Comparison":
        """The same pair in the other order."""
        return compare(self.prompt_id, self.completion_b, self.completion_a)


def compare(prompt_id: str, completion_a: str, completion_b: str) -> Comparison:
    """The comparison of two completions of one prompt, in the order given."""
    return Comparison(
        id=f"{completion_a}|{completion_b}",
        prompt_id=prompt_id,
        completion_a=completion_a,
        completion_b=completion_b,
    )


class Preference(Settings):
    """One label: what one annotator said of one comparison."""

    comparison_id: str
    """The comparison judged."""
    prompt_id: str
    """Its prompt; held-out labels are split off by it."""
    completion_a: str
    """Id of the completion shown first."""
    completion_b: str
    """Id of the completion shown second."""
    choice: Choice
    """Which is better."""
    annotator: str
    """Who said so."""
    round: int = Field(ge=1)
    """The round the label was given in."""

    def swap(self) -> "Preference":
        """The same judgement of the swapped comparison."""
        swapped = compare(self.prompt_id, self.completion_b, self.completion_a)
        return self.model_copy(
            update={
                "comparison_id": swapped.id,
                "completion_a": swapped.completion_a,
                "completion_b": swapped.completion_b,
                "choice": self.choice.swap(),
            }
        )

    @property
    def chosen(self) -> str | None:
        """Id of the better completion, None for a tie."""
        return {Choice.A: self.completion_a, Choice.B: self.completion_b, Choice.TIE: None}[self.choice]

    @property
    def rejected(self) -> str | None:
        """Id of the worse completion, None for a tie."""
        return {Choice.A: self.completion_b, Choice.B: self.completion_a, Choice.TIE: None}[self.choice]


class Measurement(Settings):
    """One number about one item of one policy, so that two policies can be compared item by item."""

    metric: str
    """What was measured, without its area."""
    item: str
    """What it was measured on: a completion's id; equal for all policies measured on one spec."""
    prompt_id: str
    """The prompt of the item: items of one prompt are one cluster of an interval."""
    value: float
    """The number."""


class Demonstration(Settings):
    """A prompt with a response to learn from by imitation."""

    prompt: Prompt
    """What was asked."""
    response: str
    """How it was answered, or went on."""

    @field_validator("response")
    @classmethod
    def _says_something(cls, text: str) -> str:
        return _not_empty(text)


class ImportedPreference(Settings):
    """A judgement that came from elsewhere, with its completions as text: no policy of ours sampled them."""

    prompt: Prompt
    """What both completions answer."""
    completion_a: str
    """The first completion; where the source says only which is better, the better one."""
    completion_b: str
    """The second completion."""
    choice: Choice
    """Which is better."""
    annotator: str = Field(default="unnamed", min_length=1)
    """Who said so, where the source says it."""
    margin: float | None = Field(default=None, ge=0)
    """By how much the better one is better, on the source's own scale."""
    file: str
    """The file it came from, as seen from the source."""
    row: int
    """Its row there."""

    @field_validator("completion_a", "completion_b")
    @classmethod
    def _says_something(cls, text: str) -> str:
        return _not_empty(text)

    @model_validator(mode="after")
    def _differs(self) -> "ImportedPreference":
        if self.completion_a == self.completion_b:
            raise ValueError("both completions are the same text: nothing can be learned from them")
        return self

    def swap(self) -> "ImportedPreference":
        """The same judgement of the completions in the other order."""
        return self.model_copy(
            update={
                "completion_a": self.completion_b,
                "completion_b": self.completion_a,
                "choice": self.choice.swap(),
            }
        )


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("empty: there is nothing to learn from")
    return text
