"""Supervised fine-tuning: the base learns to answer as was demonstrated (Ouyang et al., 2022, section 3.5).

    loss = - sum over demonstrations x, y and tokens t of log pi(y_t | x, y_<t) / number of response tokens

Prompts are read and not learned. A minibatch is a number of demonstrations, and its loss the mean a response
token: a long answer weighs as much as its tokens. Left out: choosing the epoch by a reward model's score.
"""

from dataclasses import replace
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from rlhf_core.algorithms.demonstrations import Split, TokenRows
from rlhf_core.algorithms.optimize import Diagnostics, Optimizer, Pass, RoleOptimizer, optimize, stepped
from rlhf_core.batch import collate, padded_width
from rlhf_core.metrics import MetricSink
from rlhf_core.packing import PackedBatch
from rlhf_core.settings import Settings
from rlhf_core.sources import RowSource
from rlhf_core.trunk import Lora, Trunk

ROLE = "sft"
WITHIN = ("filled", "computed", "max_tokens")
"""Diagnostics of the loss that are logged under other names."""
PACKED_AS_ALONE = {torch.float32: 1e-3, torch.bfloat16: 0.02}
"""How far packed log-probabilities may be from those alone, on average, in deviations among tokens."""


class SFT(Settings):
    """Supervised fine-tuning of the base model, merged into the trunk."""

    demonstrations: RowSource
    """Prompts with responses, in columns that are recognised or named; `rlhf data PATH` shows what is."""
    responses_end: bool = True
    """Whether a plain response ends with the model's end token. That of a chat always ends with its turn."""
    max_length: int = Field(default=1024, ge=8, le=1_048_576)
    """Most tokens of prompt and response together; the model's context, where that is less."""
    drop_too_long: bool = False
    """Leave longer demonstrations out, counted, instead of refusing to start. None is ever cut."""
    held_out_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of prompts, by the hash of their ids, that are measured on and not learned; 0 measures none."""
    num_epochs: int = Field(default=2, ge=1, le=50)
    """Times every demonstration is learned from; more mostly memorises."""
    demonstrations_per_minibatch: int = Field(default=16, ge=1)
    """Demonstrations in one optimiser step."""
    packing: bool = False
    """Lay several demonstrations into a row as wide as the longest, none attending to another: less padding,
    the same gradients up to rounding. Faster where lengths are alike, slower where a few are far longer."""
    lora: Lora = Lora(rank=32, alpha=64)
    """The adapter that learns; it is merged into the trunk and no policy's."""
    optimizer: Optimizer = Optimizer(learning_rate=2e-4, schedule="linear")
    """Its optimiser."""


def fine_tune(trunk: Trunk, data: Split, settings: SFT, seed: int, sink: MetricSink) -> dict[str, float]:
    """Train the trunk's role `sft`; returns the closing numbers."""
    train = laid_out(data.train, trunk, settings.packing)
    size = settings.demonstrations_per_minibatch
    steps_per_epoch = len(train) // size
    steps = settings.num_epochs * steps_per_epoch
    optimizers = {ROLE: RoleOptimizer(trunk, ROLE, settings.optimizer, max(1, steps))}
    walk = optimize(
        trunk,
        train,
        [Pass(ROLE, partial(response_loss, trunk))],
        optimizers,
        num_epochs=settings.num_epochs,
        minibatch_size=size,
        seed=seed,
    )
    held_out = laid_out(data.held_out, trunk, packing=False)
    before = after = held_out_loss(trunk, ROLE, held_out)
    _log_held_out(sink, 0, before)
    for step, found in enumerate(stepped(walk), start=1):
        metrics = _renamed(found)
        sink.log(step, metrics)
        if step % steps_per_epoch == 0:
            after = held_out_loss(trunk, ROLE, held_out)
            _log_held_out(sink, step, after)
        sink.progress(step, steps, _said(metrics["sft/loss"], before, after))
    if before is None or after is None:
        return {}
    if after > before:
        sink.alarm(
            f"the held-out loss rose from {before:.3f} to {after:.3f}: the demonstrations were memorised, or "
            "the rate was too high. Use fewer epochs or a lower rate."
        )
    return {"sft/held_out_loss_before": before, "sft/held_out_loss_after": after}


def response_loss(trunk: Trunk, part: TokenRows, denom: int) -> tuple[Tensor, Diagnostics]:
    """Gives minus the summed log-probability of the response tokens of a part, over `denom`.

    Diagnostics: `computed` and `filled`, positions of the forward pass and those that hold a token.
    """
    batch = part.batch()
    logprobs, _ = trunk.logprobs(batch, temperature=1.0)
    return -logprobs.sum() / denom, {
        "computed": torch.tensor(batch.computed(trunk.bucket)),
        "filled": batch.lengths.sum(),
        "max_tokens": torch.tensor(denom),
        "count": batch.response_mask.sum(),
    }


@torch.no_grad()
def held_out_loss(trunk: Trunk, role: str, rows: TokenRows) -> float | None:
    """Mean negative log-likelihood a response token of these rows in a role; None where there are none."""
    if not len(rows):
        return None
    total = 0.0
    with trunk.role(role):
        for part in rows.parts(trunk.bucket, trunk.micro_batch_tokens):
            total -= float(trunk.logprobs(part.batch(), temperature=1.0)[0].cpu().double().sum())
    return total / rows.weight


def laid_out(rows: TokenRows, trunk: Trunk, packing: bool) -> TokenRows:
    """The rows on the trunk's device, each by itself or to be packed in rows as wide as the longest needs."""
    width = 0
    if packing:
        refuse_unpackable(trunk)
        width = min(padded_width(rows.longest, trunk.bucket), trunk.codec.context_length)
    return replace(rows, row_width=width, device=trunk.device)


@torch.no_grad()
def refuse_unpackable(trunk: Trunk) -> None:
    """Raise for a base whose attention would carry one packed row's tokens or positions into the next."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(256, trunk.codec.vocab_size), (4, 4), generator=generator).tolist()
    plain = collate(ids[:2], ids[2:], trunk.codec.pad_id, trunk.device)
    packed = PackedBatch(**vars(plain), row_width=16)
    with trunk.role("reference"):
        alone = trunk.logprobs(plain, temperature=1.0)[0]
        try:
            together = trunk.logprobs(packed, temperature=1.0)[0]
        except TypeError:  # a model that takes no positions
            together = torch.full_like(alone, torch.inf)
    off = float((alone - together).abs().mean() / alone.std())
    if not off <= PACKED_AS_ALONE[trunk.model.dtype]:
        raise ValueError(
            f"packed demonstrations have log-probabilities {off:.2g} deviations from those they have alone: "
            f"a {type(trunk.model).__name__} cannot keep them apart by their positions. Set packing: false."
        )


def _log_held_out(sink: MetricSink, step: int, loss: float | None) -> None:
    if loss is not None:
        sink.log(step, {"sft/held_out_loss": loss})


def _said(loss: float, before: float | None, after: float | None) -> str:
    held_out = "" if before is None else f"  held out {before:.3f} -> {after:.3f}"
    return f"loss {loss:.3f}{held_out}"


def _renamed(found: dict[str, float]) -> dict[str, float]:
    """A minibatch's numbers as they are logged: sums of the whole minibatch, and a share in place of two."""
    kept = {name: value for name, value in found.items() if name.partition("/")[2] not in WITHIN}
    filled, computed, tokens = (found[f"{ROLE}/{name}"] for name in WITHIN)
    return {**kept, "sft/tokens": tokens, "sft/padding_share": 1 - filled / computed}
