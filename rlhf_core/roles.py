"""What a role is made of beside the trunk: its adapter or weights, its head, and the files that hold it."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from pydantic import Field, TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_core.artifacts import canonical
from rlhf_core.settings import Settings, Weights

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
WEIGHTS, HEAD, ROLE = "weights.safetensors", "head.safetensors", "role.json"
PREFIX = "base_model.model."  # how peft names the model that it wraps

Pooling = Literal["last", "mean"]
"""What a head reads of a completion: the state after its last token, or the mean of those after each."""


class Lora(Settings):
    """A low-rank adapter (Hu et al., 2021) on the linear layers of the trunk."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update; more can learn more and memorise more."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    last_layers: int = Field(default=0, ge=0)
    """Adapt only this many of the last layers; 0 adapts all. Fewer are cheaper and memorise less."""


class AdapterFile(Settings):
    """What `role.json` says of an adapter, beside the files that are peft's."""

    mode: ClassVar[Weights] = "lora"
    trunk: str
    """Digest of the trunk that the adapter was trained on."""
    lora: Lora
    """The adapter's settings."""
    head: Pooling | None
    """What the role's head reads; None for a role without one: so a head's file that is lost is missed."""


class OwnWeightsFile(Settings):
    """What `role.json` says of weights of a role's own."""

    mode: ClassVar[Weights] = "full"
    trunk: str
    """Digest of the trunk that the weights began as."""
    weights: tuple[str, ...]
    """Names of those that differ from the trunk's, sorted; these are in the file, and all others are not."""
    head: Pooling | None
    """What the role's head reads; None for a role without one."""


FileType = TypeVar("FileType", AdapterFile, OwnWeightsFile)


class RoleWeights(Protocol):
    """How the weights of the roles are held beside the base's; heads are not its business."""

    @property
    def roles(self) -> list[str]:
        """All roles that were added, in their order."""

    def add(self, role: str, lora: Lora, seed: int) -> None:
        """A role that is still the bare base."""

    def copy(self, source: str, target: str) -> None:
        """`target` as a bit-equal copy of `source`."""

    def remove(self, role: str) -> None:
        """Take a role out, if it is there."""

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """What may be trained of a role, by name."""

    def is_initial(self, role: str) -> bool:
        """Whether a role is still the bare base."""

    def activate(self, role: str | None) -> None:
        """Make the model compute as this role, or as the bare base."""

    def merged(self, role: str) -> AbstractContextManager[None]:
        """Inside the active role: its weights as plain ones, to be read only."""

    def merge_into(self, role: str, bare: nn.Module) -> None:
        """Make a bare model of the base, in float32, what the role is; for good."""

    def save(self, role: str, folder: Path, trunk: str, head: Pooling | None) -> None:
        """Write the role's weights, and what they are, for the trunk of this digest."""

    def load(self, role: str, folder: Path, trunk: str) -> Pooling | None:
        """Add a role as `save` wrote it; what its head reads."""


class ScalarHead(nn.Module):
    """A number for each state: (w . h + b - shift) / scale, in float32.

    w starts as N(0, 1/(H+1)) and b as 0 (Stiennon et al., 2020). `shift` and `scale` are the normaliser that
    is fitted after training; they are part of the saved state. `pooling` says which states make a score:
    a linear head gives the mean of the states the mean of their numbers.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, hidden_size: int, generator: torch.Generator, pooling: Pooling = "last") -> None:
        super().__init__()
        self.pooling = pooling
        weight = torch.randn(hidden_size, generator=generator) / (hidden_size + 1) ** 0.5
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] to [...]."""
        # A product and a sum, not a matrix product: its order of summation does not depend on other rows.
        raw = (hidden.float() * self.weight).sum(-1) + self.bias
        return (raw - self.shift) / self.scale


def pooled(hidden: Tensor, first: Tensor, last: Tensor, pooling: Pooling) -> Tensor:
    """[B, H] of the states [B, W, H]: the one at `last` [B], or the mean from `first` [B] up to it."""
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    within = (positions >= first[:, None]) & (positions <= last[:, None])
    return hidden.float().masked_fill(~within[..., None], 0.0).sum(1) / within.sum(1, keepdim=True)


def peft_settings(linears: Mapping[str, nn.Module], num_layers: int, lora: Lora) -> dict[str, Any]:
    """What peft is told of an adapter on these layers, to make it here or to read its files elsewhere."""
    if lora.last_layers > num_layers:
        raise ValueError(
            f"last_layers is {lora.last_layers}, and the trunk has {num_layers} layers; 0 adapts them all"
        )
    first = num_layers - lora.last_layers if lora.last_layers else 0
    names = [name for name in linears if _layer_number(name) >= 0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
        "layers_to_transform": list(range(first, num_layers)),
        # GPT-2 keeps its weights transposed, in a layer of its own kind.
        "fan_in_fan_out": not any(isinstance(linears[name], nn.Linear) for name in names),
    }


@torch.no_grad()
def merge(model: nn.Module, adapter: Mapping[str, Tensor], lora: Lora) -> None:
    """Add what an adapter changes to the weights of a bare model: W + alpha / rank * B A, all in float32.

    In bfloat16 an update smaller than W's last place, 2^-8 of W, would be lost weight by weight.
    """
    ends = (".lora_A.weight", ".lora_B.weight")
    for name, down in adapter.items():
        if not name.endswith(ends[0]):
            continue
        layer = name.removesuffix(ends[0])
        up = adapter[f"{layer}{ends[1]}"]
        module = model.get_submodule(layer)
        weight = module.get_parameter("weight")
        if weight.dtype != torch.float32:
            raise ValueError(
                f"{layer} is {weight.dtype}: merged into it, small updates would be rounded away. Merge into "
                "float32 weights and cast afterwards."
            )
        delta = lora.alpha / lora.rank * (up.detach().cpu().float() @ down.detach().cpu().float())
        # GPT-2 keeps its weights transposed, in a layer of its own kind.
        weight.add_(delta if isinstance(module, nn.Linear) else delta.T)


def write_adapter(
    folder: Path, role: AdapterFile, adapter: Mapping[str, Tensor], peft: Mapping[str, Any]
) -> None:
    """An adapter's files; equal adapters give equal bytes, and plain peft reads them."""
    _save({f"{PREFIX}{name}": tensor for name, tensor in adapter.items()}, folder / ADAPTER)
    (folder / ADAPTER_CONFIG).write_bytes(canonical(peft))
    (folder / ROLE).write_bytes(canonical(role.to_json()))


def write_weights(folder: Path, role: OwnWeightsFile, weights: Mapping[str, Tensor]) -> None:
    """The files of a role with weights of its own, named as the model names them; equal ones, equal bytes."""
    _save(weights, folder / WEIGHTS)
    (folder / ROLE).write_bytes(canonical(role.to_json()))


def write_head(folder: Path, head: ScalarHead) -> None:
    """A head's file, its normaliser included."""
    _save(head.state_dict(), folder / HEAD)


def read_role(folder: Path, kind: type[FileType], trunk: str) -> FileType:
    """What a folder holds; a role of the other kind, or of another trunk than this digest's, is refused."""
    either: TypeAdapter[AdapterFile | OwnWeightsFile] = TypeAdapter(AdapterFile | OwnWeightsFile)
    role = either.validate_json((folder / ROLE).read_bytes())
    if not isinstance(role, kind):
        raise ValueError(
            f"this role was trained with `weights: {role.mode}`, and this trunk's roles are "
            f"`weights: {kind.mode}`: its tensors have no place here. Use the project it was trained in."
        )
    if role.trunk != trunk:
        raise ValueError(
            f"this role was trained on trunk {role.trunk[:12]} and this is {trunk[:12]}: "
            "its numbers would mean nothing here. Use the project's own trunk, or rebase the project."
        )
    return role


@torch.no_grad()
def fill_adapter(folder: Path, adapter: Mapping[str, Tensor]) -> None:
    """Copy an adapter's file into these tensors, strictly: none missing, none to spare, all of one shape."""
    own = {f"{PREFIX}{name}": tensor for name, tensor in adapter.items()}
    _fill(own, load_file(folder / ADAPTER), "adapter")


@torch.no_grad()
def fill_head(folder: Path, head: ScalarHead) -> None:
    """Copy a head's file into this head, as strictly."""
    _fill(head.state_dict(), load_file(folder / HEAD), "head")


@torch.no_grad()
def read_weights(folder: Path, role: OwnWeightsFile, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors like the base's of these names, filled as strictly; nothing of the base is touched."""
    if unknown := sorted(set(role.weights) - base.keys()):
        raise ValueError(
            f"the weights do not fit this trunk: it has no {', '.join(unknown[:3])}. They were made for "
            "another model."
        )
    own = {name: torch.empty_like(base[name]) for name in role.weights}
    _fill(own, load_file(folder / WEIGHTS), "weights")
    return own


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}, file)


def _fill(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    if differing := sorted(saved.keys() ^ own.keys()):
        raise ValueError(
            f"the {what} does not fit this trunk: {len(differing)} tensors are missing or to spare, "
            f"{', '.join(differing[:3])}. It was cut short, or made for another model."
        )
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise ValueError(
                f"{what} tensor {name} is {saved[name].dtype} {list(saved[name].shape)}, and the trunk wants "
                f"{tensor.dtype} {list(tensor.shape)}: it was made for another model."
            )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _layer_number(name: str) -> int:
    """The number in a module's name, -1 where it is in no layer."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1
