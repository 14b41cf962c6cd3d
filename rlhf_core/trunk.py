"""One frozen base, many roles: each role is a LoRA adapter, and a scalar head where it gives numbers.

The only place that switches adapters. Forward *and backward* of a role happen inside its `role` block: with
another adapter active in between, the first one's gradient would silently be wrong.

Rows reach the base from position 0, right-padded to a width that depends on their own length only, with a
causal mask and nothing else: so a row's numbers do not depend on its neighbours, to the bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_core import roles as role_files
from rlhf_core.batch import TextBatch
from rlhf_core.models import Base, TextCodec
from rlhf_core.roles import Lora, Pooling, ScalarHead, pooled
from rlhf_core.tensors import logprobs_from_logits, unmasked

__all__ = ["Lora", "Pooling", "ScalarHead", "Trunk"]

HEAD_CHUNK = 128
"""Positions that meet the vocabulary at once; always this many, whatever the number of rows."""


class Trunk:
    """The frozen base with its roles."""

    def __init__(
        self,
        base: Base,
        digest: str,
        *,
        device: str = "cpu",
        bucket: int = 64,
        micro_batch_tokens: int = 2048,
    ) -> None:
        self.model = base.model.to(device)  # type: ignore[arg-type]
        self.codec = TextCodec(base)
        self.digest = digest
        self.device = torch.device(device)
        self.bucket = bucket
        self.micro_batch_tokens = micro_batch_tokens
        self.heads: dict[str, ScalarHead] = {}
        output = self.model.get_output_embeddings()
        self._linears = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not output
        }
        self._lora: dict[str, Lora] = {}
        self._active: str | None = None
        self._check_head()

    @property
    def roles(self) -> list[str]:
        """All roles that have an adapter."""
        return list(self._lora)

    # Roles

    def add_role(self, role: str, lora: Lora, seed: int, *, head: Pooling | None = None) -> None:
        """A fresh adapter, which changes nothing yet (B = 0), and a fresh head if asked."""
        if self._active is not None:
            raise RuntimeError(
                f"role {role!r} added inside {self._active!r}, which it would switch off: do so outside"
            )
        if role in self._lora:
            raise ValueError(f"role {role!r} is already there; a second one of that name would overwrite it")
        config = LoraConfig(
            **role_files.peft_settings(self._linears, self.model.config.num_hidden_layers, lora)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, self.model, adapter_name=role)
        del self.model.peft_config  # peft's own book-keeping; it would warn of every further role
        self._lora[role] = lora
        for parameter in self._adapter(role).values():
            parameter.data = parameter.data.to(self.device, self.model.dtype)
        if head:
            generator = torch.Generator().manual_seed(seed)
            self.heads[role] = ScalarHead(self.model.config.hidden_size, generator, head).to(self.device)
        self._activate(None)

    def copy_role(self, source: str, target: str) -> None:
        """`target` as a bit-equal copy of `source`, head included."""
        head = self.heads[source].pooling if source in self.heads else None
        self.add_role(target, self._lora[source], seed=0, head=head)
        with torch.no_grad():
            for name, parameter in self._adapter(target).items():
                parameter.copy_(self._adapter(source)[name])
        if source in self.heads:
            self.heads[target].load_state_dict(self.heads[source].state_dict())

    @contextmanager
    def role(self, role: str) -> Iterator[None]:
        """Everything inside is done as this role; `reference` without an adapter is the bare trunk."""
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

        The trunk's own tensors are put back afterwards, so nothing is rounded for good. Numbers differ from
        the adapter's by rounding: log-probabilities that enter a ratio are never taken in here.
        """
        kept: list[tuple[nn.Parameter, Tensor]] = []
        with self.role(role), torch.no_grad():
            try:
                for layer in self._layers(role):
                    weight = cast(nn.Parameter, layer.get_base_layer().weight)
                    kept.append((weight, weight.data))
                    weight.data = weight.data + layer.get_delta_weight(role).to(weight.dtype)
                self._activate(None)
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
        """[B, T] log-probabilities of the response tokens in the active role, and entropies if asked."""

        def of(rows: TextBatch, hidden: Tensor) -> Tensor:
            states = self._before_responses(rows, hidden)[rows.response_mask]
            ids = rows.response_ids[rows.response_mask]
            chunks = zip(torch.split(states, HEAD_CHUNK), torch.split(ids, HEAD_CHUNK), strict=True)
            found = [self._head_chunk(*chunk, temperature, with_entropy) for chunk in chunks]
            return unmasked(torch.cat(found), rows.response_mask)

        result = self._in_micro_batches(batch, of, (*batch.response_ids.shape, 2 if with_entropy else 1))
        return result[..., 0], result[..., 1] if with_entropy else None

    def values(self, batch: TextBatch) -> Tensor:
        """[B, T] the active role's number for the state before each response token."""
        head = self._active_head()

        def of(rows: TextBatch, hidden: Tensor) -> Tensor:
            return torch.where(rows.response_mask, head(self._before_responses(rows, hidden)), 0.0)

        return self._in_micro_batches(batch, of, tuple(batch.response_ids.shape))

    def scores(self, batch: TextBatch) -> Tensor:
        """[B] the active role's number for the whole completion."""
        return cast(Tensor, self._active_head()(self.pooled_states(batch)))

    def pooled_states(self, batch: TextBatch) -> Tensor:
        """[B, H] all that the active role's head reads of each completion."""
        pooling = self._active_head().pooling

        def of(rows: TextBatch, hidden: Tensor) -> Tensor:
            last = rows.query_lengths + rows.response_lengths - 1
            return pooled(hidden, rows.query_lengths, last, pooling)

        return self._in_micro_batches(batch, of, (len(batch), self.model.config.hidden_size))

    # Files

    def save_role(self, role: str, folder: Path) -> None:
        """Adapter, head and settings of a role; equal roles give equal bytes."""
        lora, head = self._lora[role], self.heads.get(role)
        said = role_files.RoleFile(trunk=self.digest, lora=lora, head=head.pooling if head else None)
        peft = role_files.peft_settings(self._linears, self.model.config.num_hidden_layers, lora)
        role_files.write_role(folder, said, self._adapter(role), head, peft)

    def load_role(self, role: str, folder: Path) -> None:
        """A role as `save_role` wrote it, strictly: another trunk's, or one that does not fit, is refused."""
        said = role_files.read_role(folder, self.digest)
        self.add_role(role, said.lora, seed=0, head=said.head)
        try:
            role_files.fill_role(folder, self._adapter(role), self.heads.get(role))
        except (ValueError, OSError):
            self._remove(role)
            raise

    # Within

    def _in_micro_batches(
        self, batch: TextBatch, of: Callable[[TextBatch, Tensor], Tensor], shape: tuple[int, ...]
    ) -> Tensor:
        """`of` the hidden states of each micro-batch, put together in the batch's order."""
        self._active_role()
        order, parts = [], []
        for rows, width in batch.micro_batches(self.bucket, self.micro_batch_tokens):
            chosen = batch.select(rows)
            # Learned positions end with the context, which need not be a multiple of the bucket.
            width = min(width, self.codec.context_length)
            hidden = chosen.states(self._hidden, width, self.codec.pad_id)
            order.append(rows)
            parts.append(of(chosen, hidden))
        whole = torch.cat(parts)[torch.cat(order).argsort()]
        assert whole.shape == shape, (whole.shape, shape)
        return whole

    def _hidden(self, input_ids: Tensor, **more: Tensor) -> Tensor:
        """[B, W, H] last hidden states under a causal mask: what follows a row's end cannot reach it."""
        body: nn.Module = self.model.get_decoder()
        return cast(Tensor, body(input_ids=input_ids, use_cache=False, **more).last_hidden_state)

    def _before_responses(self, rows: TextBatch, hidden: Tensor) -> Tensor:
        """[B, T, H] the state before each response token: the one place where positions shift."""
        tokens = torch.arange(rows.response_ids.shape[1], device=hidden.device)
        positions = rows.query_lengths[:, None] + tokens - 1
        index = positions.clamp(max=hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, index)

    def _head_chunk(self, states: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> Tensor:
        """[n, 1 or 2] log-probability (and entropy) of `ids` after `states`; n is at most HEAD_CHUNK."""
        missing = HEAD_CHUNK - len(ids)
        states = nn.functional.pad(states, (0, 0, 0, missing))
        logits = self.model.get_output_embeddings()(states)
        logprobs, entropy = logprobs_from_logits(
            logits, nn.functional.pad(ids, (0, missing)), temperature, with_entropy
        )
        found = torch.stack([logprobs] if entropy is None else [logprobs, entropy], -1)
        return found[: len(ids)]

    def _active_role(self) -> str:
        if self._active is None:
            raise RuntimeError(
                "a forward pass outside of `with trunk.role(...)`: whose numbers would it give?"
            )
        return self._active

    def _active_head(self) -> ScalarHead:
        role = self._active_role()
        if role not in self.heads:
            raise RuntimeError(f"the active role {role!r} has no head: it gives no numbers")
        return self.heads[role]

    def _check_head(self) -> None:
        """Refuse a model whose logits are more than one linear layer of its last hidden state."""
        ids = torch.arange(8, device=self.device)[None]
        with torch.no_grad():
            logits = self.model.get_output_embeddings()(self._hidden(ids)).float()
            if torch.equal(logits, self.model(input_ids=ids, use_cache=False).logits.float()):
                return
        raise ValueError(
            f"a {type(self.model).__name__} changes its logits after the output layer, and that is not "
            "done here: log-probabilities would be another distribution's. Use another base model."
        )

    def _layers(self, role: str) -> list[LoraLinear]:
        return [m for m in self.model.modules() if isinstance(m, LoraLinear) and role in m.lora_A]

    def _adapter(self, role: str) -> dict[str, nn.Parameter]:
        """The adapter's parameters, named without the role so that any role can hold them."""
        end = f".{role}.weight"
        return {
            f"{name.removesuffix(end)}.weight": parameter
            for name, parameter in self.model.named_parameters()
            if ".lora_" in name and name.endswith(end)
        }

    def _remove(self, role: str) -> None:
        for layer in self._layers(role):
            layer.set_adapter([])
            layer.delete_adapter(role)
        del self._lora[role]
        self.heads.pop(role, None)

    def _activate(self, role: str | None) -> None:
        """Switch every layer to one adapter, or to none; only the active one can receive gradients."""
        for module in self.model.modules():
            if isinstance(module, LoraLinear):
                module.enable_adapters(role is not None)
                if role is not None:
                    module.set_adapter([role] if role in module.lora_A else [])
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.requires_grad_(role is not None and name.endswith(f".{role}.weight"))
        for name, head in self.heads.items():
            head.requires_grad_(name == role)
