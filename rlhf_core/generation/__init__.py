"""The door to sampling: token ids in, token ids out. Knows nothing of rewards or rounds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from pydantic import Field, model_validator

from rlhf_core.models import TextCodec
from rlhf_core.records import Completion, Prompt, StopReason
from rlhf_core.settings import Settings
from rlhf_core.trunk import Trunk

PROMPTS_AT_ONCE = 1000
FILTERS = ("top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty")
"""What other samplers change the distribution by, as transformers names it."""


class Sampling(Settings):
    """Pure sampling from the policy: no top-k, no top-p, no penalty, nothing of the model's own defaults.

    A filter would sample from another distribution than the one whose log-probabilities are trained on.
    """

    max_new_tokens: int = Field(default=32, ge=1, le=32768)
    """A completion without an end token is cut here."""
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Divides the logits, here and in every log-probability of the stage."""
    batch_size: int = Field(default=64, ge=1)
    """Rows decoded together. It is recipe: padded to another longest prompt, a row rounds differently."""

    @model_validator(mode="before")
    @classmethod
    def _unfiltered(cls, given: object) -> object:
        filters = [name for name in FILTERS if isinstance(given, Mapping) and name in given]
        if filters:
            raise ValueError(
                f"{', '.join(filters)}: samples would come from another distribution than the one whose "
                "log-probabilities are trained on, so ratios and KL would be wrong, and KL even negative. "
                "Leave it out; for less varied text lower `temperature`, which enters every log-probability."
            )
        return given


@dataclass(frozen=True)
class Sample:
    """One sampled response."""

    ids: list[int]
    """Up to and including the end token, where there is one."""
    stop: StopReason
    """Why it ended."""


Progress = Callable[[int, int], None]


class Generator(Protocol):
    """Samples from a role of a trunk."""

    def sample(
        self,
        trunk: Trunk,
        role: str,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        progress: Progress = ...,
    ) -> list[Sample]:
        """One response for each prompt, drawn with that row's own seed."""


def check_lengths(codec: TextCodec, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
    """The ids of prompts that leave room for a response; raises for those that do not."""
    encoded = [codec.encode_prompt(prompt) for prompt in prompts]
    limit = codec.context_length - max_new_tokens
    long = [
        f"{p.id} ({len(ids)} tokens)" for p, ids in zip(prompts, encoded, strict=True) if len(ids) > limit
    ]
    if long:
        raise ValueError(
            f"{len(long)} prompts leave no room for {max_new_tokens} new tokens in a context of "
            f"{codec.context_length}: {', '.join(long[:5])}. Shorten them or lower max_new_tokens."
        )
    return encoded


def fitting(codec: TextCodec, prompts: Iterable[Prompt], max_new_tokens: int) -> Iterator[Prompt]:
    """The prompts, one after the other; raises at the first few that leave no room for a response."""
    coming = iter(prompts)
    while some := list(islice(coming, PROMPTS_AT_ONCE)):
        check_lengths(codec, some, max_new_tokens)
        yield from some


def complete(
    generator: Generator,
    trunk: Trunk,
    role: str,
    prompts: Sequence[Prompt],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    progress: Progress = lambda done, total: None,
) -> list[Completion]:
    """`len(seeds[i])` completions of each prompt, each with its own seed, in the order of the prompts."""
    encoded = check_lengths(trunk.codec, prompts, sampling.max_new_tokens)
    rows = [(i, k) for i in range(len(prompts)) for k in range(len(seeds[i]))]
    samples = generator.sample(
        trunk, role, [encoded[i] for i, _ in rows], [seeds[i][k] for i, k in rows], sampling, progress
    )
    return [
        Completion(
            id=f"{prompts[i].id}/{k}",
            prompt_id=prompts[i].id,
            prompt_text=prompts[i].shown,
            prompt_ids=encoded[i],
            response_ids=sample.ids,
            text=trunk.codec.decode(sample.ids),
            stop=sample.stop,
        )
        for (i, k), sample in zip(rows, samples, strict=True)
    ]
