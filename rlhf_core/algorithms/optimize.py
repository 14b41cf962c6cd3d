"""The only optimiser loop: epochs, minibatches, micro-batches; per pass forward and backward inside the role.

Masters are float32 whatever the role computes in, and each role has its own optimiser, so that one role's
gradient norm never scales another's step.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, Self, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from rlhf_core.artifacts import derive_seed
from rlhf_core.settings import Settings
from rlhf_core.trunk import Trunk

MAX_SKIPPED = 3
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what torch's AdamW keeps of a parameter
Schedule = Literal["constant", "linear", "cosine"]


class Optimizer(Settings):
    """AdamW (Loshchilov and Hutter, 2019) on the parameters of one role."""

    learning_rate: float = Field(default=1e-4, ge=0, le=1)
    """Peak rate. An adapter wants about 1e-4, since B starts at zero; `weights: full` 1e-6 to 1e-5."""
    schedule: Schedule = "constant"
    """`linear` and `cosine` fall to zero over the stage."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the rate rises from zero."""
    adam_eps: float = Field(default=1e-5, gt=0)
    """Larger than Adam's 1e-8, as PPO implementations use (Huang et al., 2024)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay towards zero."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of the role are scaled down to this norm before every step."""


class NonFiniteLoss(RuntimeError):
    """Training gave numbers that are not numbers."""


class Trainable(Protocol):
    """A batch that can be cut by rows, and into parts that fit a forward pass."""

    def __len__(self) -> int:
        """The number of rows that minibatches are made of."""

    @property
    def weight(self) -> int:
        """What a loss over the whole batch is divided by: tokens or pairs."""

    def select(self, rows: Tensor) -> Self:
        """The rows named."""

    def parts(self, bucket: int, tokens: int) -> Iterator[Self]:
        """Parts of at most `tokens` padded tokens."""


BatchType = TypeVar("BatchType", bound=Trainable)
Diagnostics = dict[str, Tensor]


@dataclass(frozen=True)
class Pass(Generic[BatchType]):
    """What one role minimises."""

    role: str
    loss: Callable[[BatchType, int], tuple[Tensor, Diagnostics]]
    """(part, the minibatch's weight) to (loss, sums over the part with their `count`)."""
    coef: float = 1.0
    name: str = ""
    """What its numbers are called by; the role's name if it is empty."""
    batch: Callable[[int], BatchType] | None = None
    """The minibatch of that number, of a pass that learns from other rows than those walked over."""

    @property
    def called(self) -> str:
        """What its numbers are called by."""
        return self.name or self.role


class RoleOptimizer:
    """AdamW on float32 masters of one role's parameters."""

    def __init__(self, trunk: Trunk, role: str, settings: Optimizer, total_steps: int) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self.steps = 0
        self.skipped = 0
        self.names, self.parameters = list(trunk.parameters(role)), list(trunk.parameters(role).values())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.adam = torch.optim.AdamW(
            self.masters, lr=0.0, eps=settings.adam_eps, weight_decay=settings.weight_decay
        )

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """One step from the gradients that the role's parameters hold; returns the rate and the norm."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.settings.max_grad_norm))
        rate = self._rate()
        self.steps += 1
        if not torch.isfinite(torch.tensor(norm)):
            self._skip()
            return {"lr": rate, "skipped": 1.0}
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)
        return {"lr": rate, "grad_norm": norm, "skipped": 0.0}

    def clear(self) -> None:
        """Forget gradients that were not stepped on."""
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and counts, by the names of the parameters: all that the next step depends on."""
        kept = {"steps": torch.tensor(self.steps), "skipped": torch.tensor(self.skipped)}
        for name, master in zip(self.names, self.masters, strict=True):
            kept[f"{name}.master"] = master
            kept.update({f"{name}.{part}": tensor for part, tensor in self.adam.state[master].items()})
        return kept

    @torch.no_grad()
    def load_state(self, kept: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken, parameters included; another role's state is refused."""
        left = dict(kept)
        self.steps, self.skipped = int(left.pop("steps")), int(left.pop("skipped"))
        for name, master, parameter in zip(self.names, self.masters, self.parameters, strict=True):
            master.copy_(left.pop(f"{name}.master"))
            parameter.copy_(master)
            moments = {part: left.pop(f"{name}.{part}") for part in MOMENTS if f"{name}.{part}" in left}
            self.adam.state[master] = {
                part: tensor if part == "step" else tensor.to(master.device)
                for part, tensor in moments.items()
            }
        if left:
            raise ValueError(
                f"an optimiser's state has {', '.join(sorted(left)[:3])}, which the role has not"
            )

    def _rate(self) -> float:
        warm = min(1.0, (self.steps + 1) / (self.settings.warmup_steps + 1))
        done = self.steps / self.total_steps
        match self.settings.schedule:
            case "constant":
                left = 1.0
            case "linear":
                left = 1.0 - done
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * done))
        return self.settings.learning_rate * warm * left

    def _skip(self) -> None:
        self.skipped += 1
        if self.skipped > MAX_SKIPPED:
            raise NonFiniteLoss(
                f"{self.skipped} optimiser steps had gradients that are not finite: the weights are as they "
                "were, and going on would only skip more. Lower the learning rate, or look at the scores of "
                "this stage."
            )


def optimize(
    trunk: Trunk,
    batch: BatchType,
    passes: Sequence[Pass[BatchType]],
    optimizers: Mapping[str, RoleOptimizer],
    *,
    num_epochs: int,
    minibatch_size: int,
    seed: int,
) -> Generator[dict[str, float], None, None]:
    """Walk epochs and minibatches; yields `role/name` means after each minibatch's passes, before its steps.

    The caller may stop between minibatches: what was yielded has not been stepped on yet. The rate and the
    norm of the step are added to what was yielded once it is taken. Rows are drawn in a new order every
    epoch; those that do not fill a last minibatch wait for the next, since a short one would get a larger
    step.
    """
    if len(batch) < minibatch_size:
        raise ValueError(
            f"{len(batch)} rows do not fill a minibatch of {minibatch_size}: no step would be taken. "
            "Use a smaller minibatch, or collect more."
        )
    try:
        yield from _walk(trunk, batch, passes, optimizers, num_epochs, minibatch_size, seed)
    finally:
        for optimizer in optimizers.values():
            optimizer.clear()


def stepped(walk: Iterable[dict[str, float]]) -> Iterator[dict[str, float]]:
    """What `optimize` yields, each once its step is taken and its rate and norm are in it."""
    previous: dict[str, float] | None = None
    for found in walk:
        if previous is not None:
            yield previous
        previous = found
    if previous is not None:
        yield previous


def _walk(
    trunk: Trunk,
    batch: BatchType,
    passes: Sequence[Pass[BatchType]],
    optimizers: Mapping[str, RoleOptimizer],
    num_epochs: int,
    size: int,
    seed: int,
) -> Iterator[dict[str, float]]:
    number = 0
    for epoch in range(num_epochs):
        generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
        order = torch.randperm(len(batch), generator=generator)
        for start in range(0, len(batch) - size + 1, size):
            minibatch = batch.select(order[start : start + size])
            found: dict[str, float] = {}
            for one in passes:
                means = _accumulate(trunk, one.batch(number) if one.batch else minibatch, one)
                found.update({f"{one.called}/{name}": value for name, value in means.items()})
            yield found
            for role in dict.fromkeys(one.role for one in passes):
                for name, value in optimizers[role].step().items():
                    found[f"{role}/{name}"] = value
            number += 1


def _accumulate(trunk: Trunk, minibatch: BatchType, one: Pass[BatchType]) -> dict[str, float]:
    """Gradients of one pass over a minibatch, part by part, and the means of its diagnostics."""
    sums: dict[str, float] = {}
    total = 0.0
    with trunk.role(one.role):
        for part in minibatch.parts(trunk.bucket, trunk.micro_batch_tokens):
            loss, diagnostics = one.loss(part, minibatch.weight)
            (one.coef * loss).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            for name, value in diagnostics.items():
                if name.startswith("max_"):
                    known = torch.tensor(sums.get(name, value.item()))
                    sums[name] = float(torch.maximum(known, value.cpu()))  # a NaN stays one
                else:
                    sums[name] = sums.get(name, 0.0) + value.item()
    count = sums.pop("count")
    means = {name: value if name.startswith("max_") else value / count for name, value in sums.items()}
    return {"loss": total, **means}
