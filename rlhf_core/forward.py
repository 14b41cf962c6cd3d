"""What the active role says of a batch: log-probabilities, values, scores, whatever holds its weights.

Rows reach the model from position 0, right-padded to a width that depends on their own length only, with a
causal mask and nothing else: so a row's numbers do not depend on its neighbours, to the bit.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from rlhf_core.batch import TextBatch
from rlhf_core.models import Base, TextCodec
from rlhf_core.roles import ScalarHead, pooled
from rlhf_core.tensors import logprobs_from_logits, unmasked

HEAD_CHUNK = 128
"""Positions that meet the vocabulary at once; always this many, whatever the number of rows."""


class ForwardPasses:
    """A model, the heads of its roles, and what comes out of them; knows nothing of how a role is held."""

    def __init__(self, base: Base, device: str, bucket: int, micro_batch_tokens: int) -> None:
        self.model = base.model.to(device)  # type: ignore[arg-type]
        self.codec = TextCodec(base)
        self.device = torch.device(device)
        self.bucket = bucket
        self.micro_batch_tokens = micro_batch_tokens
        self.heads: dict[str, ScalarHead] = {}
        self._active: str | None = None
        self._check_head()

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
