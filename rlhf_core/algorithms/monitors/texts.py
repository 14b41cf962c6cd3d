"""Monitors of what the policy writes: sameness, length, cut ends, phrases that came from nowhere."""

from collections import Counter
from typing import ClassVar

from pydantic import Field

from rlhf_core.algorithms.monitors.looking import MAX_EXAMPLES, Memory, Monitor, Reading, Seen, shown
from rlhf_core.text_statistics import exploded, phrase_counts

NUM_TEXTS = " texts"
"""What the number of texts is kept as; no phrase begins with a space."""


class ModeCollapse(Monitor):
    """Completions become all the same, or say the same again and again."""

    steps: int = Field(default=2, ge=1)
    """Steps in a row that must be beyond a limit before it says so."""
    distinct_share: float = Field(default=0.7, gt=0, lt=1)
    """Of the first step's distinct-1, -2 and -3, what must be left of each."""
    self_bleu_rise: float = Field(default=0.15, gt=0, le=1)
    """What self-BLEU may rise by since the first step."""
    duplicates_rise: float = Field(default=0.2, gt=0, le=1)
    """What the share of completions that repeat another one may rise by."""
    repetition_rise: float = Field(default=0.2, gt=0, le=1)
    """What the share of trigrams that repeat an earlier one of their own completion may rise by."""

    why: ClassVar[str] = "The policy has found one thing that pays and says it to every prompt"
    advice: ClassVar[str] = (
        "raise `policy_update.algorithm.kl_coef`, lower `policy_update.algorithm.learning_rate` or "
        "`num_steps`; if the reward model likes such text, label more of it before the next round"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """Against the policy the stage began with: how same texts are depends on prompts and lengths."""
        readings = []
        for n in (1, 2, 3):
            found = seen.number(f"rollout/distinct_{n}")
            if found is not None and (first := memory.first(f"distinct_{n}", found)) > 0:
                what = f"distinct-{n} over the first step's"
                readings.append(Reading(what, found / first, self.distinct_share, "below"))
        rises = (
            ("self_bleu", "rise of self-BLEU", self.self_bleu_rise),
            ("duplicates", "rise of the share of duplicates", self.duplicates_rise),
            ("repetition", "rise of the share of repeated trigrams", self.repetition_rise),
        )
        for name, what, limit in rises:
            found = seen.number(f"rollout/{name}")
            if found is not None:
                examples = _most_common(seen) if name == "duplicates" else ()
                readings.append(Reading(what, found - memory.first(name, found), limit, examples=examples))
        return readings


def _most_common(seen: Seen) -> tuple[str, ...]:
    """The completions that came more than once, the most frequent first."""
    counts = Counter(completion.text for completion in seen.found.completions)
    total = counts.total()
    ordered = sorted((item for item in counts.items() if item[1] > 1), key=lambda item: (-item[1], item[0]))
    return tuple(f"{count} of {total}: {shown(text)}" for text, count in ordered[:MAX_EXAMPLES])


class LengthDrift(Monitor):
    """Completions become much longer or shorter."""

    steps: int = Field(default=2, ge=1)
    """Steps in a row that must be beyond a limit before it says so."""
    longer: float = Field(default=1.75, gt=1)
    """Times the first step's mean length that it may reach."""
    shorter: float = Field(default=0.5, gt=0, lt=1)
    """Times the first step's mean length that must be left."""

    why: ClassVar[str] = "Length that runs away is often what a reward model likes, or avoids, by mistake"
    advice: ClassVar[str] = (
        "look whether scores follow length (`score_length`) and label pairs of like quality and unlike "
        "length; raise `policy_update.algorithm.kl_coef`, or bound `policy_update.sampling.max_new_tokens`"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """Against the policy the stage began with."""
        found = seen.number("rollout/response_length")
        if found is None:
            return []
        ratio = found / memory.first("length", found)
        return [
            Reading("mean length, grown, over the first step's", ratio, self.longer),
            Reading("mean length, shrunk, over the first step's", ratio, self.shorter, "below"),
        ]


class Truncation(Monitor):
    """More and more completions are cut at the token limit."""

    steps: int = Field(default=2, ge=1)
    """Steps in a row that must be beyond a limit before it says so."""
    rise: float = Field(default=0.3, gt=0, le=1)
    """What the share of cut completions may rise by since the first step."""
    share: float = Field(default=1.0, gt=0, le=1)
    """The share that is too many however it began; 1 for text that is meant to be cut."""

    why: ClassVar[str] = "A completion that is cut is scored at a place where nothing ended"
    advice: ClassVar[str] = (
        "raise `policy_update.sampling.max_new_tokens` and the labelled rollouts' with it, or find out why "
        "the reward pays for not ending"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """The share now, and against the policy the stage began with."""
        found = seen.number("rollout/stop.length")
        if found is None:
            return []
        return [
            Reading("rise of the share of cut completions", found - memory.first("cut", found), self.rise),
            Reading("share of cut completions", found, self.share),
        ]


class Phrases(Monitor):
    """Phrases that hardly any completion held at first are in many now."""

    steps: int = Field(default=2, ge=1)
    """Steps in a row that must be beyond a limit before it says so."""
    growth: float = Field(default=8.0, gt=1)
    """Times the share of completions that held it at the first step, smoothed by one completion."""
    share: float = Field(default=0.3, gt=0, lt=1)
    """Phrases in a smaller share of the completions are left out."""
    min_count: int = Field(default=6, ge=2)
    """Phrases in fewer completions are left out."""

    why: ClassVar[str] = "Words that the reward model pays for replace what was asked"
    advice: ClassVar[str] = (
        "read the examples; if they are not better answers, raise `policy_update.algorithm.kl_coef` or lower "
        "`num_steps`, and let people label such completions in the next round"
    )

    def look(self, seen: Seen, memory: Memory) -> list[Reading]:
        """Against the policy the stage began with."""
        texts = [completion.text for completion in seen.found.completions]
        now = phrase_counts(texts)
        if not memory.firsts:
            memory.firsts.update({phrase: float(count) for phrase, count in now.items()})
            memory.firsts[NUM_TEXTS] = float(len(texts))
        least = max(self.min_count, self.share * len(texts))
        found = exploded(memory.firsts, int(memory.firsts[NUM_TEXTS]), now, len(texts), least)
        examples = tuple(
            f"{one.phrase!r}: in {one.before:.0%} of completions at first, in {one.now:.0%} now, such as "
            + shown(next(text for text in texts if one.phrase in phrase_counts([text])))
            for one in found[:MAX_EXAMPLES]
            if one.growth > self.growth
        )
        highest = found[0].growth if found else 0.0
        return [Reading("largest growth of a phrase", highest, self.growth, examples=examples)]
