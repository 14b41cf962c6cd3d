"""One frozen base, many roles: each role is a LoRA adapter, and a scalar head where it gives numbers.

The only place that switches adapters. Forward *and backward* of a role happen inside its `role` block: with
another adapter active in between, the first one's gradient would silently be wrong.

Rows reach the base from position 0, right-padded to a width that depends on their own length only, with a causal
mask and nothing else: so a row's numbers do not depend on its neighbours, to the bit.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_core.artifacts import canonical
from rlhf_core.batch import TextBatch
from rlhf_core.models import Base, TextCodec
from rlhf_core.settings import Settings
from rlhf_core.tensors import logprobs_from_logits

HEAD_CHUNK = 128
"""Positions that meet the vocabulary at once; always this many, so that no row depends on how many others came."""


class Lora(Settings):
    """A low-rank adapter (Hu et al., 2021) on the linear layers of the trunk."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update; more can learn more and memorise more."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    last_layers: int = Field(default=0, ge=0)
    """Adapt only this many of the last layers; 0 adapts all. Fewer are cheaper and memorise less."""


class ScalarHead(nn.Module):
    """A number for each state: (w . h + b - shift) / scale, in float32.

    w starts as N(0, 1/(H+1)) and b as 0 (Stiennon et al., 2020). `shift` and `scale` are the normaliser that is
    fitted after training; they are part of the saved state.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, hidden_size: int, generator: torch.Generator) -> None:
        super().__init__()
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


class Trunk:
    """The frozen base with its roles."""

    def __init__(
        self, base: Base, digest: str, *, device: str = "cpu", bucket: int = 64, micro_batch_tokens: int = 2048
    ) -> None:
        self.model = base.model.to(device)  # type: ignore[arg-type]
        self.codec = TextCodec(base)
        self.digest = digest
        self.device = torch.device(device)
        self.bucket = bucket
        self.micro_batch_tokens = micro_batch_tokens
        self.heads: dict[str, ScalarHead] = {}
        output = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._linears = [
            name for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not output
        ]  # fmt: skip
        self._lora: dict[str, Lora] = {}
        self._active: str | None = None

    @property
    def roles(self) -> list[str]:
        """All roles that have an adapter."""
        return list(self._lora)

    # Roles

    def add_role(self, role: str, lora: Lora, seed: int, *, head: bool = False) -> None:
        """A fresh adapter, which changes nothing yet (B = 0), and a fresh head if asked."""
        if role in self._lora:
            raise ValueError(f"role {role!r} is already there; a second one of that name would overwrite it")
        num_layers = self.model.config.num_hidden_layers
        if lora.last_layers > num_layers:
            raise ValueError(f"last_layers is {lora.last_layers}, and the trunk has {num_layers} layers")
        first = num_layers - lora.last_layers if lora.last_layers else 0
        targets = [name for name in self._linears if _layer_number(name) >= first]
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, self.model, adapter_name=role)
        del self.model.peft_config  # peft's own book-keeping; it would warn of every further role
        self._lora[role] = lora
        for parameter in self._adapter(role).values():
            parameter.data = parameter.data.to(self.device, self.model.dtype)
        if head:
            generator = torch.Generator().manual_seed(seed)
            self.heads[role] = ScalarHead(self.model.config.hidden_size, generator).to(self.device)
        self._activate(None)

    def copy_role(self, source: str, target: str) -> None:
        """`target` as a bit-equal copy of `source`, head included."""
        self.add_role(target, self._lora[source], seed=0, head=source in self.heads)
        with torch.no_grad():
            for name, parameter in self._adapter(target).items():
                parameter.copy_(self._adapter(source)[name])
        if source in self.heads:
            self.heads[target].load_state_dict(self.heads[source].state_dict())

    @contextmanager
    def role(self, role: str) -> Iterator[None]:
        """Everything inside is done as this role; `reference` without an adapter of its own is the bare trunk."""
        if self._active is not None:
            raise RuntimeError(f"role {role!r} inside {self._active!r}: finish its backward pass first")
        if role not in self._lora and role != "reference":
            raise ValueError(f"the trunk has no role {role!r}; it has {', '.join(self._lora) or 'none'}")
        self._active = role
        self._activate(role if role in self._lora else None)
        try:
            yield
        finally:
            self._activate(None)
            self._active = None

    @contextmanager
    def merged(self, role: str) -> Iterator[None]:
        """The role's adapter added into the trunk's weights while inside: faster for many forward passes.

        The trunk's own tensors are put back afterwards, so nothing is rounded for good. Numbers differ from the
        adapter's by rounding: log-probabilities that enter a ratio are never taken in here.
        """
        kept: list[tuple[nn.Parameter, Tensor]] = []
        with self.role(role), torch.no_grad():
            for layer in self._layers(role):
                weight = cast(nn.Parameter, layer.get_base_layer().weight)
                kept.append((weight, weight.data))
                weight.data = weight.data + layer.get_delta_weight(role).to(weight.dtype)
            self._activate(None)
            try:
                yield
            finally:
                for weight, original in kept:
                    weight.data = original

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """What a role trains, by name: its adapter, and its head's weight and bias."""
        head = self.heads.get(role)
        named = {f"head.{name}": p for name, p in head.named_parameters()} if head else {}
        return {**self._adapter(role), **named}

    # Forward passes

    def logprobs(
        self, batch: TextBatch, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T] log-probabilities of the response tokens in the active role, and their entropies if asked."""

        def of(rows: TextBatch, hidden: Tensor) -> Tensor:
            states = self._at_responses(rows, hidden, before=True)[rows.response_mask]
            ids = rows.response_ids[rows.response_mask]
            found = [
                self._head_chunk(states[i : i + HEAD_CHUNK], ids[i : i + HEAD_CHUNK], temperature, with_entropy)
                for i in range(0, len(ids), HEAD_CHUNK)
            ]
            return _scatter(torch.cat(found), rows.response_mask)

        result = self._in_micro_batches(batch, of, (*batch.response_ids.shape, 2 if with_entropy else 1))
        return result[..., 0], result[..., 1] if with_entropy else None

    def values(self, batch: TextBatch) -> Tensor:
        """[B, T] the active role's number for the state before each response token."""
        head = self._active_head()

        def of(rows: TextBatch, hidden: Tensor) -> Tensor:
            values: Tensor = head(self._at_responses(rows, hidden, before=True))
            return torch.where(rows.response_mask, values, 0.0)

        return self._in_micro_batches(batch, of, tuple(batch.response_ids.shape))

    def scores(self, batch: TextBatch) -> Tensor:
        """[B] the active role's number for the whole completion, read at its last token."""
        head = self._active_head()

        def of(rows: TextBatch, hidden: Tensor) -> Tensor:
            last = rows.query_lengths + rows.response_lengths - 1
            scores: Tensor = head(hidden[torch.arange(len(rows), device=hidden.device), last])
            return scores

        return self._in_micro_batches(batch, of, (len(batch),))

    # Files

    def save_role(self, role: str, folder: Path) -> None:
        """Adapter, head and settings of a role; equal roles give equal bytes."""
        adapter = {f"base_model.model.{name}": p.detach().cpu() for name, p in self._adapter(role).items()}
        save_file({name: adapter[name].contiguous() for name in sorted(adapter)}, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "trunk": self.digest, "bias": "none",
            "r": self._lora[role].rank, "lora_alpha": self._lora[role].alpha, "lora_dropout": 0.0,
            "target_modules": sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapter}),
            "settings": self._lora[role].to_json(),
        }  # fmt: skip
        (folder / "adapter_config.json").write_bytes(canonical(config))
        if role in self.heads:
            head = {name: tensor.cpu() for name, tensor in self.heads[role].state_dict().items()}
            save_file(head, folder / "head.safetensors")

    def load_role(self, role: str, folder: Path) -> None:
        """A role as `save_role` wrote it, strictly: another trunk's, a missing or a spare tensor is refused."""
        config = json.loads((folder / "adapter_config.json").read_bytes())
        if config["trunk"] != self.digest:
            raise ValueError(
                f"this adapter was trained on trunk {config['trunk'][:12]} and this is {self.digest[:12]}: "
                "its numbers would mean nothing here. Use the project's own trunk, or rebase the project."
            )
        has_head = (folder / "head.safetensors").exists()
        self.add_role(role, Lora.model_validate(config["settings"]), seed=0, head=has_head)
        saved = load_file(folder / "adapter_model.safetensors", device=str(self.device))
        own = {f"base_model.model.{name}": p for name, p in self._adapter(role).items()}
        if saved.keys() != own.keys():
            differing = sorted(saved.keys() ^ own.keys())
            raise ValueError(f"the adapter does not fit this trunk: {len(differing)} tensors differ, {differing[:3]}")
        with torch.no_grad():
            for name, parameter in own.items():
                if saved[name].shape != parameter.shape or saved[name].dtype != parameter.dtype:
                    raise ValueError(
                        f"adapter tensor {name} is {saved[name].dtype} {list(saved[name].shape)}, and the trunk "
                        f"wants {parameter.dtype} {list(parameter.shape)}"
                    )
                parameter.copy_(saved[name])
        if has_head:
            self.heads[role].load_state_dict(load_file(folder / "head.safetensors", device=str(self.device)))

    # Within

    def _in_micro_batches(
        self, batch: TextBatch, of: Callable[[TextBatch, Tensor], Tensor], shape: tuple[int, ...]
    ) -> Tensor:
        """`of` the hidden states of each micro-batch, put together in the batch's order."""
        if self._active is None:
            raise RuntimeError("a forward pass outside of `with trunk.role(...)`: whose numbers would these be?")
        order, parts = [], []
        for rows, width in batch.micro_batches(self.bucket, self.micro_batch_tokens):
            chosen = batch.select(rows)
            hidden = self._hidden(chosen.sequences(width, self.codec.pad_id))
            order.append(rows)
            parts.append(of(chosen, hidden))
        whole = torch.cat(parts)[torch.cat(order).argsort()]
        assert whole.shape == shape, (whole.shape, shape)
        return whole

    def _hidden(self, input_ids: Tensor) -> Tensor:
        """[B, W, H] last hidden states under a plain causal mask; what follows a row's end cannot reach it."""
        body: nn.Module = self.model.get_decoder()
        return cast(Tensor, body(input_ids=input_ids, use_cache=False).last_hidden_state)

    def _at_responses(self, rows: TextBatch, hidden: Tensor, *, before: bool) -> Tensor:
        """[B, T, H] the state before (or after) each response token: the one place where positions shift."""
        tokens = torch.arange(rows.response_ids.shape[1], device=hidden.device)
        positions = rows.query_lengths[:, None] + tokens - int(before)
        index = positions.clamp(max=hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, index)

    def _head_chunk(self, states: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> Tensor:
        """[n, 1 or 2] log-probability (and entropy) of `ids` after `states`, computed HEAD_CHUNK at a time."""
        missing = HEAD_CHUNK - len(ids)
        states = nn.functional.pad(states, (0, 0, 0, missing))
        logits = self.model.get_output_embeddings()(states)  # type: ignore[no-untyped-call]
        logprobs, entropy = logprobs_from_logits(
            logits, nn.functional.pad(ids, (0, missing)), temperature, with_entropy
        )
        found = torch.stack([logprobs] if entropy is None else [logprobs, entropy], -1)
        return found[: len(ids)]

    def _active_head(self) -> ScalarHead:
        if self._active not in self.heads:
            raise RuntimeError(f"the active role {self._active!r} has no head: it gives no numbers")
        return self.heads[self._active]

    def _layers(self, role: str) -> list[LoraLayer]:
        return [m for m in self.model.modules() if isinstance(m, LoraLayer) and role in m.lora_A]

    def _adapter(self, role: str) -> dict[str, nn.Parameter]:
        """The adapter's parameters, named without the role so that any role can hold them."""
        return {
            name.replace(f".{role}.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if ".lora_" in name and f".{role}." in name
        }

    def _activate(self, role: str | None) -> None:
        """Switch every layer to one adapter, or to none; only the active one can receive gradients."""
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.enable_adapters(role is not None)
                if role is not None:
                    module.set_adapter([role] if role in module.lora_A else [])
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.requires_grad_(role is not None and f".{role}." in name)
        for name, head in self.heads.items():
            head.requires_grad_(name == role)


def _layer_number(name: str) -> int:
    """The number in a module's name, -1 where it is in no layer."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _scatter(found: Tensor, mask: Tensor) -> Tensor:
    """[N, k] numbers of the True places back to [B, T, k], zero elsewhere."""
    whole = found.new_zeros((*mask.shape, found.shape[-1]))
    whole[mask] = found
    return whole
