"""The pretraining mix of PPO-ptx (Ouyang et al., 2022, eq. 2).

Beside the reward the policy goes on predicting text that nobody labelled, so that it does not forget how to:

maximise  PPO's objective + ptx_coef * mean log-probability a token of the texts
"""

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from rlhf_core.algorithms.optimize import Diagnostics, Pass
from rlhf_core.artifacts import derive_seed
from rlhf_core.batch import RolloutBatch, collate
from rlhf_core.records import Prompt
from rlhf_core.settings import Settings
from rlhf_core.trunk import Trunk


class PtxKnobs(Settings):
    """The knobs of the pretraining mix."""

    ptx_coef: float = Field(default=0.0, ge=0)
    """Weight of the pretraining loss beside PPO's, both a token; 0 is PPO without the mix."""
    ptx_rows: int = Field(default=8, ge=1)
    """Texts in each minibatch of the mix."""
    ptx_max_tokens: int = Field(default=128, ge=2)
    """Tokens of a text that are learned from; what comes after them is left out."""
    ptx_held_out_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the texts that only measures; a text's place follows from its id, for ever."""

    def mix(self, trunk: Trunk, texts: Sequence[Prompt], seed: int) -> "PretrainingMix | None":
        """The mix, if it has any weight."""
        return PretrainingMix(self, trunk, texts, seed) if self.ptx_coef else None


class PretrainingMix:
    """Texts as rows of tokens: each token after the first is predicted from those before it."""

    def __init__(self, knobs: PtxKnobs, trunk: Trunk, texts: Sequence[Prompt], seed: int) -> None:
        self.knobs = knobs
        self.seed = seed
        longest = min(knobs.ptx_max_tokens, trunk.codec.context_length)
        rows = {text.id: trunk.codec.encode_prompt(text)[:longest] for text in texts}
        rows = {name: ids for name, ids in rows.items() if len(ids) > 1}
        aside = {n for n in rows if derive_seed("held_out", n) / 2**63 < knobs.ptx_held_out_share}
        self.rows = [ids for name, ids in rows.items() if name not in aside]
        if len(self.rows) < knobs.ptx_rows or not aside:
            raise ValueError(
                f"the pretraining mix has {len(self.rows)} texts to learn from and {len(aside)} to measure "
                f"on, of {len(texts)} given: {knobs.ptx_rows} and 1 are needed. Give more texts by "
                "`pretraining_source`, or set ptx_coef to 0."
            )
        self._aside = _as_batch([rows[name] for name in sorted(aside)], trunk)

    def learned_from(self, trunk: Trunk, first: int) -> Pass[RolloutBatch]:
        """The policy's pass over the mix, in an update that begins with the stage's minibatch `first`."""
        return Pass(
            "policy",
            lambda part, denom: _loss(trunk, part, denom),
            coef=self.knobs.ptx_coef,
            name="ptx",
            batch=lambda number: _as_batch(self.minibatch(first + number), trunk),
        )

    def minibatch(self, number: int) -> list[list[int]]:
        """The rows of a minibatch, a pure function of its number: a new order in every turn through them."""
        places = range(number * self.knobs.ptx_rows, (number + 1) * self.knobs.ptx_rows)
        return [self._at(*divmod(place, len(self.rows))) for place in places]

    @torch.no_grad()
    def held_out(self, trunk: Trunk, when: str) -> dict[str, float]:
        """The policy's perplexity on texts it does not learn from."""
        with trunk.role("policy"):
            logprobs, _ = trunk.logprobs(self._aside, temperature=1.0)
        return {f"ptx/perplexity_{when}": math.exp(-float(logprobs.sum()) / self._aside.weight)}

    def _at(self, turn: int, place: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "texts", turn))
        return self.rows[int(torch.randperm(len(self.rows), generator=generator)[place])]


def _as_batch(rows: Sequence[Sequence[int]], trunk: Trunk) -> RolloutBatch:
    """Each text as its own group: its first token as the prompt of the others."""
    text = collate([ids[:1] for ids in rows], [ids[1:] for ids in rows], trunk.codec.pad_id, trunk.device)
    return RolloutBatch(**vars(text), group_ids=torch.arange(len(rows), device=trunk.device))


def _loss(trunk: Trunk, part: RolloutBatch, denom: int) -> tuple[Tensor, Diagnostics]:
    logprobs, _ = trunk.logprobs(part, temperature=1.0)
    return -logprobs.sum() / denom, {"count": part.response_mask.sum()}
