"""Log-probs of the trained tokens, without ever holding logits for all positions or for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from components.contracts.errors import ConfigurationError
from components.models.lora import base_model


class Policy(nn.Module):
    """A vision-language model seen as a function from a batch to the log-probs of its trained tokens.

    The head is applied to the positions that predict a trained token only, `chunk_tokens` at a time, and its
    logits are computed again in the backward pass: the largest tensor with a vocabulary dimension is
    (chunk_tokens, V). All of it happens in `forward`, so FSDP's hooks see one call.

    Args:
        model: a transformers model with a body `.model` and an output head, with or without adapters. It is
            put into evaluation mode: log-probs with dropout would not be those of the sampler.
        temperature: logits are divided by it, as the sampler's were.
        chunk_tokens: trained tokens whose logits exist at once.
        forbidden_token_ids: tokens that the sampler could not choose; they get no probability here either.
        autocast: dtype of matrix products, None for the dtype of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        chunk_tokens: int,
        forbidden_token_ids: Sequence[int] = (),
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        for module in model.modules():
            # Such a layer checkpoints in training mode only; its children, where dropout is, stay as they are.
            if isinstance(module, GradientCheckpointingLayer):
                module.training = module.gradient_checkpointing
        self.temperature, self.chunk_tokens, self.autocast = temperature, chunk_tokens, autocast
        self.register_buffer("forbidden", torch.tensor(sorted(forbidden_token_ids)).long(), persistent=False)
        config = base_model(model).config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def forward(self, inputs: dict[str, Tensor], loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(N,) log-probs and (N,) entropies of the N tokens where `loss_mask` (B, L) is True, columns 1 on."""
        device = loss_mask.device
        mask = loss_mask[:, 1:].bool()
        with self.cast(device):
            hidden = self._hidden(inputs)[:, :-1][mask]
            targets = inputs["input_ids"][:, 1:][mask]
            # Without any token there is one empty chunk: under FSDP every rank has to use the head, or its gradients
            # are missing from a collective of the others.
            pieces = [
                checkpoint(self._chunk, h, t, use_reentrant=False) if torch.is_grad_enabled() else self._chunk(h, t)
                for h, t in zip(hidden.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True)
            ]
        logprobs, entropy = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """What the model computes in."""
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        return base_model(self.model).model(**inputs, use_cache=False).last_hidden_state

    def _chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = base_model(self.model).get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        logits = (logits / self.temperature).index_fill(-1, self.forbidden, float("-inf"))
        normaliser = torch.logsumexp(logits, dim=-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        # Last, so that the recomputation in backward, which stops at the last tensor it needs, leaves it out.
        with torch.no_grad():
            entropy = torch.special.entr((logits - normaliser[:, None]).exp_()).sum(-1)
        return logprobs, entropy


def check_head(policy: Policy, tolerance: float = 1e-2) -> None:
    """Compares the head applied by `Policy` with the model's own logits on a row of text, up to their rounding.

    Raises:
        ConfigurationError: the model does something to its logits that `Policy` does not know.
    """
    model = base_model(policy.model)
    device = next(policy.parameters()).device
    usable = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.arange(1, 9, device=device)[None] % usable
    mask = torch.ones_like(ids, dtype=torch.bool)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    with torch.no_grad():
        ours, _ = policy(inputs, mask)
        with policy.cast(device):
            logits = model(**inputs).logits[:, :-1]
        tolerance += 2 * torch.finfo(logits.dtype).eps * logits.abs().max().item()
        logits = logits.float() / policy.temperature
        logits.index_fill_(-1, policy.forbidden, float("-inf"))
        theirs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()
    finite = theirs.isfinite()
    gap = (ours - theirs)[finite].abs().max().item()
    if gap > tolerance:
        raise ConfigurationError(
            f"{type(model).__name__} changes its logits after the head: log-probs differ by {gap:.3g}",
            where="components.training.logprobs.Policy",
            remedy="add that change to Policy._chunk",
        )
