"""One frozen base, many roles: each has an adapter or weights of its own, and a head where it gives numbers.

The only place that switches roles. Forward *and backward* of a role happen inside its `role` block: with
another adapter active in between, the first one's gradient would silently be wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from rlhf_core.adapters import Adapters
from rlhf_core.forward import ForwardPasses
from rlhf_core.models import Base
from rlhf_core.own_weights import OwnWeights
from rlhf_core.roles import Lora, Pooling, RoleWeights, ScalarHead, fill_head, write_head
from rlhf_core.settings import Weights

__all__ = ["Lora", "Pooling", "ScalarHead", "Trunk"]

HOLDERS: dict[Weights, type[Adapters] | type[OwnWeights]] = {"lora": Adapters, "full": OwnWeights}


class Trunk(ForwardPasses):
    """The frozen base with its roles."""

    def __init__(
        self,
        base: Base,
        digest: str,
        *,
        weights: Weights = "lora",
        device: str = "cpu",
        bucket: int = 64,
        micro_batch_tokens: int = 2048,
    ) -> None:
        super().__init__(base, device, bucket, micro_batch_tokens)
        self.digest = digest
        self.weights = weights
        self._held: RoleWeights = HOLDERS[weights](self.model)

    @property
    def roles(self) -> list[str]:
        """All roles but the reference, which needs no weights."""
        return self._held.roles

    def add_role(self, role: str, lora: Lora, seed: int, *, head: Pooling | None = None) -> None:
        """A role that is still the bare trunk, and a fresh head if asked.

        `lora` is what its adapter is like, if it has one; weights of its own need no settings.
        """
        self._check_new(role)
        self._held.add(role, lora, seed)
        self._add_head(role, head, seed)

    def copy_role(self, source: str, target: str, *, head: Pooling | None = None) -> None:
        """`target` as a bit-equal copy of `source`, head included; a fresh `head` where that has none."""
        self._check_new(target)
        self._held.copy(source, target)
        self._add_head(target, self._pooling(source) or head, seed=0)
        if source in self.heads:
            self.heads[target].load_state_dict(self.heads[source].state_dict())

    def add_head(self, role: str) -> None:
        """A fresh head on a role that has none."""
        self._add_head(role, "last", seed=0)

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """What a role trains, by name: its adapter or its weights, and its head's weight and bias.

        Whoever asks may change them: weights that a role shared until now become its own.
        """
        head = self.heads.get(role)
        named = {f"head.{name}": p for name, p in head.named_parameters()} if head else {}
        return {**self._held.parameters(role), **named}

    def is_initial(self, role: str) -> bool:
        """Whether a role changes nothing: it is the bare trunk, to the bit."""
        return self._held.is_initial(role)

    @contextmanager
    def role(self, role: str) -> Iterator[None]:
        """Everything inside is done as this role; `reference`, if it was never added, is the bare trunk."""
        if self._active is not None:
            raise RuntimeError(f"role {role!r} inside {self._active!r}: finish its backward pass first")
        if role not in self.roles and role != "reference":
            raise ValueError(f"the trunk has no role {role!r}; it has {', '.join(self.roles) or 'none'}")
        self._active = role
        self._activate(role if role in self.roles else None)
        try:
            yield
        finally:
            self._activate(None)
            self._active = None

    @contextmanager
    def merged(self, role: str) -> Iterator[None]:
        """The role's weights as plain ones while inside, without gradients: faster for many forward passes.

        Numbers differ from an adapter's by rounding: log-probabilities that enter a ratio are never taken in
        here. Weights of a role's own are plain already, and say the same.
        """
        with torch.no_grad(), self.role(role), self._held.merged(role):
            yield

    def merge_into(self, role: str, bare: nn.Module) -> None:
        """Make a bare model, the trunk's own weights in float32, what the role is; its head is left out.

        Float32 because an update that is small beside its weight would be rounded away: cast afterwards.
        """
        self._held.merge_into(role, bare)

    def save_role(self, role: str, folder: Path) -> None:
        """Weights, head and settings of a role; equal roles give equal bytes."""
        self._held.save(role, folder, self.digest, self._pooling(role))
        if role in self.heads:
            write_head(folder, self.heads[role])

    def load_role(self, role: str, folder: Path) -> None:
        """A role as `save_role` wrote it, strictly: another trunk's, or one that does not fit, is refused."""
        self._check_new(role)
        try:
            pooling = self._held.load(role, folder, self.digest)
            self._add_head(role, pooling, seed=0)
            if pooling:
                fill_head(folder, self.heads[role])
        except (ValueError, OSError):
            self._held.remove(role)
            self.heads.pop(role, None)
            raise

    def _check_new(self, role: str) -> None:
        if self._active is not None:
            raise RuntimeError(
                f"role {role!r} added inside {self._active!r}, which it would switch off: do so outside"
            )
        if role in self.roles:
            raise ValueError(f"role {role!r} is already there; a second one of that name would overwrite it")

    def _pooling(self, role: str) -> Pooling | None:
        return self.heads[role].pooling if role in self.heads else None

    def _add_head(self, role: str, pooling: Pooling | None, seed: int) -> None:
        if pooling:
            generator = torch.Generator().manual_seed(seed)
            head = ScalarHead(self.model.config.hidden_size, generator, pooling)
            self.heads[role] = head.to(self.device)
        self._activate(None)

    def _activate(self, role: str | None) -> None:
        """Switch to one role, or to the bare trunk; only the active one can receive gradients."""
        self._held.activate(role)
        for name, head in self.heads.items():
            head.requires_grad_(name == role)
