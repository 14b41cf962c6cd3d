"""A few completions of a step as people look at them, the most telling ones token by token."""

from rlhf_core.algorithms.experience import Experience
from rlhf_core.models import TextCodec
from rlhf_core.records import LookedAt, Token

EVERY = 4
"""Steps between two that are looked at; the first and the last are looked at always."""
NUM_DRAWN = 6


def is_looked_at(step: int, num_steps: int) -> bool:
    """Whether completions of this step are kept to be looked at."""
    return step % EVERY == 0 or step == num_steps - 1


def looks(step: int, found: Experience, codec: TextCodec) -> list[LookedAt]:
    """The first completions, which are as good as drawn, and those of highest and lowest score and most KL.

    Those three and the very first are there token by token.
    """
    batch = found.batch
    assert batch.scores is not None and batch.kl is not None
    kl = batch.kl.sum(-1)
    telling = {0, int(batch.scores.argmax()), int(batch.scores.argmin()), int(kl.argmax())}
    rows = sorted(telling | set(range(min(NUM_DRAWN, len(batch)))))
    return [
        LookedAt(
            step=step,
            prompt=found.completions[row].prompt_text,
            text=found.completions[row].text,
            score=float(batch.scores[row]),
            kl=float(kl[row]),
            length=len(found.completions[row].response_ids),
            stop=found.completions[row].stop,
            tokens=_tokens(found, row, codec) if row in telling else [],
        )
        for row in rows
    ]


def _tokens(found: Experience, row: int, codec: TextCodec) -> list[Token]:
    batch = found.batch
    assert batch.kl is not None and batch.advantages is not None and batch.values is not None
    numbers = zip(
        batch.kl[row].tolist(), batch.advantages[row].tolist(), batch.values[row].tolist(), strict=True
    )
    ids = found.completions[row].response_ids
    return [
        Token(text=codec.decode([token]), kl=kl, advantage=advantage, value=value)
        for token, (kl, advantage, value) in zip(ids, numbers, strict=False)
    ]
