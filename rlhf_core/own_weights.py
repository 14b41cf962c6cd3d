"""`weights: full`: each role has all weights of the base as its own, and is switched to by its parameters.

Copies are made late: a role that nobody trains keeps no tensor that the base, or the role it was copied
from, has already. Copying, like training, never touches the base.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlhf_core.roles import Lora, OwnWeightsFile, Pooling, read_role, read_weights, write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OwnWeights:
    """Sets of parameters by role, one of which is in the model at a time; tied weights are one parameter."""

    def __init__(self, model: "PreTrainedModel") -> None:
        module: nn.Module = model
        self._base = dict(module.named_parameters())
        names = {id(parameter): name for name, parameter in self._base.items()}
        self._places = [
            (names[id(parameter)], part, key)
            for part in module.modules()
            for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._weights: dict[str, dict[str, nn.Parameter]] = {}
        self._trained: set[str] = set()  # whose parameters somebody may hold, and change
        self._active: str | None = None

    @property
    def roles(self) -> list[str]:
        """All roles that were added."""
        return list(self._weights)

    def add(self, role: str, lora: Lora, seed: int) -> None:
        """A role with the base's weights; there is nothing to set and nothing to draw."""
        self._weights[role] = self._base

    def copy(self, source: str, target: str) -> None:
        """`target` with the weights of `source` as they are now."""
        weights = self._weights[source]
        self._weights[target] = (
            {n: _copy(p) for n, p in weights.items()} if source in self._trained else weights
        )

    def remove(self, role: str) -> None:
        """Take a role out, if it is there."""
        self._weights.pop(role, None)
        self._trained.discard(role)

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """All weights of the role; from now on no other role shares one of them."""
        if role not in self._weights:
            return {}
        self._make_own(role)
        return dict(self._weights[role])

    def is_initial(self, role: str) -> bool:
        """Whether every weight is the base's, to the bit."""
        return not self._changed(role)

    def activate(self, role: str | None) -> None:
        """Put the role's parameters into the model, or the base's; only the active ones receive gradients.

        Where gradients are on, a role may be trained inside: it gets parameters of its own first.
        """
        self._active = role
        if role is not None and torch.is_grad_enabled():
            self._make_own(role)
        self._place()

    @contextmanager
    def merged(self, role: str) -> Iterator[None]:
        """Nothing to do: the weights are plain already."""
        yield

    @torch.no_grad()
    def merge_into(self, role: str, bare: nn.Module) -> None:
        """The role's weights in the place of a bare model's."""
        for name, parameter in bare.named_parameters():
            parameter.copy_(self._weights[role][name])

    def save(self, role: str, folder: Path, trunk: str, head: Pooling | None) -> None:
        """The weights that differ from the base's, whole, and what they are."""
        changed = self._changed(role)
        write_weights(folder, OwnWeightsFile(trunk=trunk, weights=tuple(sorted(changed)), head=head), changed)

    def load(self, role: str, folder: Path, trunk: str) -> Pooling | None:
        """Weights as `save` wrote them, the rest the base's; what the role's head reads."""
        said = read_role(folder, OwnWeightsFile, trunk)
        found = read_weights(folder, said, self._base)
        own = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in found.items()}
        self._weights[role] = {**self._base, **own}
        return said.head

    def _place(self) -> None:
        weights = self._base if self._active is None else self._weights[self._active]
        for name, part, key in self._places:
            setattr(part, key, weights[name])
        for role in self._trained:
            for parameter in self._weights[role].values():
                parameter.requires_grad_(role == self._active)

    def _make_own(self, role: str) -> None:
        """Copy what the role shares with the base or with another role."""
        if role in self._trained:
            return
        others = [self._base, *(held for other, held in self._weights.items() if other != role)]
        shared = {id(parameter) for held in others for parameter in held.values()}
        self._weights[role] = {
            name: _copy(parameter) if id(parameter) in shared else parameter
            for name, parameter in self._weights[role].items()
        }
        self._trained.add(role)
        if role == self._active:
            self._place()

    def _changed(self, role: str) -> Mapping[str, Tensor]:
        weights = self._weights[role]
        return {name: p for name, p in weights.items() if not _same_bits(p, self._base[name])}


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=False)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    # As bytes: 0.0 equals -0.0 as a number, and a role is its bits.
    return one is other or torch.equal(
        one.detach().contiguous().view(-1).view(torch.uint8),
        other.detach().contiguous().view(-1).view(torch.uint8),
    )
