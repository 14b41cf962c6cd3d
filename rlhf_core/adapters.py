"""`weights: lora`: each role is a LoRA adapter (Hu et al., 2021) on the linear layers of the frozen base.

The only place that switches adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_core.roles import (
    AdapterFile,
    Lora,
    Pooling,
    fill_adapter,
    merge,
    peft_settings,
    read_role,
    write_adapter,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Adapters:
    """Named adapters in the layers of one model."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model
        self._module: nn.Module = model
        self._device = next(self._module.parameters()).device
        output: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._linears = {
            name: module
            for name, module in self._module.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not output
        }
        self._lora: dict[str, Lora] = {}

    @property
    def roles(self) -> list[str]:
        """All roles that have an adapter."""
        return list(self._lora)

    def add(self, role: str, lora: Lora, seed: int) -> None:
        """A fresh adapter, which changes nothing yet (B = 0)."""
        config = LoraConfig(**self._peft_settings(lora))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, self._module, adapter_name=role)
        del self._model.peft_config  # peft's own book-keeping; it would warn of every further role
        self._lora[role] = lora
        for parameter in self.parameters(role).values():
            parameter.data = parameter.data.to(self._device, self._model.dtype)

    def copy(self, source: str, target: str) -> None:
        """`target` as a bit-equal copy of `source`."""
        self.add(target, self._lora[source], seed=0)
        original = self.parameters(source)
        with torch.no_grad():
            for name, parameter in self.parameters(target).items():
                parameter.copy_(original[name])

    def remove(self, role: str) -> None:
        """Take a role out, if it is there."""
        for layer in self._layers(role):
            layer.set_adapter([])
            layer.delete_adapter(role)
        self._lora.pop(role, None)

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """The adapter's parameters, named without the role so that any role can hold them."""
        end = f".{role}.weight"
        return {
            f"{name.removesuffix(end)}.weight": parameter
            for name, parameter in self._module.named_parameters()
            if ".lora_" in name and name.endswith(end)
        }

    def is_initial(self, role: str) -> bool:
        """Whether every B is zero."""
        return all(not p.any() for name, p in self.parameters(role).items() if ".lora_B." in name)

    def activate(self, role: str | None) -> None:
        """Switch every layer to one adapter, or to none; only the active one can receive gradients."""
        for module in self._module.modules():
            if isinstance(module, LoraLinear):
                module.enable_adapters(role is not None)
                if role is not None:
                    module.set_adapter([role] if role in module.lora_A else [])
        for name, parameter in self._module.named_parameters():
            if ".lora_" in name:
                parameter.requires_grad_(role is not None and name.endswith(f".{role}.weight"))

    @contextmanager
    def merged(self, role: str) -> Iterator[None]:
        """The adapter added into the base's weights while inside.

        The base's own tensors are put back afterwards, so nothing is rounded for good.
        """
        kept: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for layer in self._layers(role):
                weight = cast(nn.Parameter, layer.get_base_layer().weight)
                kept.append((weight, weight.data))
                weight.data = weight.data + layer.get_delta_weight(role).to(weight.dtype)
            self.activate(None)
            yield
        finally:
            for weight, original in kept:
                weight.data = original

    def merge_into(self, role: str, bare: nn.Module) -> None:
        """The adapter's update added to a bare model's weights."""
        merge(bare, self.parameters(role), self._lora[role])

    def save(self, role: str, folder: Path, trunk: str, head: Pooling | None) -> None:
        """The adapter as plain peft reads it, and what it is."""
        lora = self._lora[role]
        said = AdapterFile(trunk=trunk, lora=lora, head=head)
        write_adapter(folder, said, self.parameters(role), self._peft_settings(lora))

    def load(self, role: str, folder: Path, trunk: str) -> Pooling | None:
        """An adapter as `save` wrote it; what its head reads."""
        said = read_role(folder, AdapterFile, trunk)
        self.add(role, said.lora, seed=0)
        fill_adapter(folder, self.parameters(role))
        return said.head

    def _peft_settings(self, lora: Lora) -> dict[str, Any]:
        return peft_settings(self._linears, self._model.config.num_hidden_layers, lora)

    def _layers(self, role: str) -> list[LoraLinear]:
        return [m for m in self._module.modules() if isinstance(m, LoraLinear) and role in m.lora_A]
