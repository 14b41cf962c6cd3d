"""A policy small enough to enumerate: a table of logits, a row for each prefix of up to 2 tokens.

It stands where a trunk stands, so that PPO's own code runs on it, and its every expectation is a finite sum.
Its tokens have probabilities 1/4, 1/4 and 1/2 after every prefix, so that 64 completions hold each possible
one exactly as often as its probability says: a mean over them is an expectation, without sampling error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import exp, log

import torch
from torch import Tensor

from rlhf_core.batch import TextBatch
from rlhf_core.generation import Sample
from rlhf_core.records import Prompt, StopReason
from rlhf_core.tensors import logprobs_from_logits, zero_masked

END, PAD, VOCABULARY, LENGTH = 0, 3, 3, 3
PREFIXES = [p for n in range(LENGTH) for p in product(range(1, VOCABULARY), repeat=n)]
COMPLETIONS = [(*p, END) for p in PREFIXES] + [
    (*p, token) for p in PREFIXES if len(p) == LENGTH - 1 for token in range(1, VOCABULARY)
]
Table = Sequence[Sequence[float]]


def quarters(seed: int, temperature: float) -> Tensor:
    """[prefixes, V] logits of 1/4, 1/4 and 1/2 at a temperature, the half on a token that the seed picks."""
    likely = torch.randint(VOCABULARY, (len(PREFIXES),), generator=torch.Generator().manual_seed(seed))
    p = torch.full((len(PREFIXES), VOCABULARY), 0.25)
    p[torch.arange(len(PREFIXES)), likely] = 0.5
    return temperature * p.log()


def log_probabilities(table: Table, temperature: float) -> list[list[float]]:
    """The table's log-probabilities, by definition."""
    rows = [[logit / temperature for logit in row] for row in table]
    return [[logit - log(sum(exp(other) for other in row)) for logit in row] for row in rows]


def steps(completion: tuple[int, ...]) -> list[tuple[int, int]]:
    """(row of the table, token) of each step."""
    return [(PREFIXES.index(completion[:t]), token) for t, token in enumerate(completion)]


def objective(
    table: Table,
    reference: Table,
    score: Callable[[tuple[int, ...]], float],
    kl_coef: float,
    temperature: float,
) -> float:
    """E[score] - kl_coef * KL(policy || reference), summed over every possible completion."""
    policy, ref = log_probabilities(table, temperature), log_probabilities(reference, temperature)
    total = 0.0
    for completion in COMPLETIONS:
        logprob = sum(policy[row][token] for row, token in steps(completion))
        log_ratio = logprob - sum(ref[row][token] for row, token in steps(completion))
        total += exp(logprob) * (score(completion) - kl_coef * log_ratio)
    return total


def values_by_definition(
    table: Table,
    reference: Table,
    score: Callable[[tuple[int, ...]], float],
    kl_coef: float,
    temperature: float,
) -> list[float]:
    """The expected reward still to come after each prefix."""
    policy, ref = log_probabilities(table, temperature), log_probabilities(reference, temperature)

    def after(prefix: tuple[int, ...]) -> float:
        row = PREFIXES.index(prefix)
        total = 0.0
        for token in range(VOCABULARY):
            whole = (*prefix, token)
            ends = token == END or len(whole) == LENGTH
            rest = score(whole) if ends else after(whole)
            total += exp(policy[row][token]) * (rest - kl_coef * (policy[row][token] - ref[row][token]))
        return total

    return [after(prefix) for prefix in PREFIXES]


class ToyCodec:
    """Ids for a prompt of one token."""

    pad_id, context_length = PAD, 100

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return [1]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(str(token) for token in ids)


class ToyTrunk:
    """Tables in the place of roles: logits for policy and reference, a number for each prefix for value."""

    def __init__(self, policy: Tensor, reference: Tensor, values: Tensor) -> None:
        self.tables = {"policy": policy.clone().requires_grad_(), "reference": reference, "value": values}
        self.roles = ["policy", "value"]
        self.codec, self.device = ToyCodec(), torch.device("cpu")
        self._active = ""

    @contextmanager
    def role(self, role: str) -> Iterator[None]:
        assert not self._active
        self._active = role
        yield
        self._active = ""

    def logprobs(
        self, batch: TextBatch, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        logits = self.tables[self._active][self._rows(batch)]
        ids = batch.response_ids.masked_fill(~batch.response_mask, 0)
        logprobs, entropy = logprobs_from_logits(logits, ids, temperature, with_entropy)
        mask = batch.response_mask
        return zero_masked(logprobs, mask), zero_masked(entropy, mask) if entropy is not None else None

    def values(self, batch: TextBatch) -> Tensor:
        return zero_masked(self.tables[self._active][self._rows(batch)], batch.response_mask)

    def _rows(self, batch: TextBatch) -> Tensor:
        """[B, T] the row of the table before each token; any where the mask is False."""
        found = torch.zeros_like(batch.response_ids)
        for b, ids in enumerate(batch.response_ids.tolist()):
            for t in range(int(batch.response_mask[b].sum())):
                found[b, t] = PREFIXES.index(tuple(ids[:t]))
        return found


class EveryCompletion:
    """A `Generator` whose 64 samples are in exactly the proportions of a policy made of quarters."""

    def sample(
        self, trunk: ToyTrunk, role: str, prompts: Sequence[Sequence[int]], *rest: object
    ) -> list[Sample]:
        p = (trunk.tables[role].detach() / self.temperature).softmax(-1).tolist()
        found = []
        for completion in COMPLETIONS:
            share = 64.0
            for row, token in steps(completion):
                share *= p[row][token]
            assert abs(share - round(share)) < 1e-4
            stop = StopReason.EOS if completion[-1] == END else StopReason.LENGTH
            found += [Sample(list(completion), stop)] * round(share)
        assert len(found) == len(prompts) == 64
        return found

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
