"""Log-probs and entropies of the trained tokens, and of no other position."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.rollouts import LogProbs
from armature.components.inference.probe import LIKELIEST, WORDS, Probe
from armature.components.models.attention import needs_no_mask
from armature.components.models.context_parallel import ContextParallel, to_device
from armature.components.models.lora import base_model
from armature.components.models.packed import Packing, packed_states, use_packed_attention
from armature.components.vlm.heads.backends import HEADS, Backend, HeadSettings


class Policy(nn.Module):
    """A vision-language model seen as a function from a batch to the log-probs of its trained tokens.

    The head is applied to the positions that predict a trained token only, in a way that is chosen by name; see
    `armature.components.vlm.heads.backends`. All of it happens in `forward`, so FSDP's hooks see one call.

    Args:
        model: a transformers model with a body `.model` and an output head, with or without adapters. It is
            put into evaluation mode: log-probs with dropout would not be those of the sampler.
        logprobs: name of the backend that applies the head.
        temperature: logits are divided by it, as the sampler's were.
        chunk_tokens: trained tokens whose logits exist at once, for backends that do not make all of them.
        forbidden_token_ids: tokens that the sampler could not choose; they get no probability here either. Ids
            beyond the head's rows, as images and placeholders have in some families, have none anyway.
        autocast: dtype of matrix products, None for the dtype of the weights.
        device: where it will compute; None: where the model is.
        packing: whether rows may come packed.
        context: the ranks that share packed rows with this one.

    Raises:
        ConfigurationError: the backend does not work with this head, or on this device; or the model's rows cannot be
            packed, or not be shared by so many ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        logprobs: str,
        temperature: float,
        chunk_tokens: int = 2048,
        forbidden_token_ids: Sequence[int] = (),
        autocast: torch.dtype | None = None,
        device: torch.device | None = None,
        packing: bool = False,
        context: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.model, self.context = model.eval(), context
        if packing:
            use_packed_attention(base_model(model), context)
        for module in model.modules():
            # Such a layer checkpoints in training mode only; its children, where dropout is, stay as they are.
            if isinstance(module, GradientCheckpointingLayer):
                module.training = module.gradient_checkpointing
        self.temperature, self.autocast = temperature, autocast
        head = base_model(model).get_output_embeddings()
        forbidden = torch.zeros(len(head.weight), dtype=torch.bool)
        forbidden[[token for token in forbidden_token_ids if token < len(forbidden)]] = True
        self.forbidden: Tensor
        self.register_buffer("forbidden", forbidden, persistent=False)
        config = base_model(model).config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        settings = HeadSettings(temperature, self.softcap, chunk_tokens)
        self.backend: Backend = HEADS[logprobs](settings, head, device or head.weight.device)

    def forward(
        self, inputs: dict[str, Tensor], at: tuple[Tensor, Tensor], packing: Packing | None = None
    ) -> tuple[Tensor, Tensor]:
        """(N,) log-probs and (N,) entropies of the N tokens behind the positions `at`; see `predicting`.

        With `packing` the model computes what rows begin with once, and no padding; the result is the same. Ranks that
        share the rows all get the whole of it, and each the gradients of its part of the tokens.
        Without any token they are empty, and still depend on the head: under FSDP every rank has to use it, or its
        gradients are missing from a collective of the others.
        """
        with self.cast(inputs["input_ids"].device):
            targets = inputs["input_ids"][:, 1:][at]
            if packing is None:
                return self._applied(self._hidden(inputs)[:, :-1][at], targets)
            places = packing.places[:, :-1][at]
            if self.context is None:
                return self._applied(self._packed(inputs, packing)[places], targets)
            own = self.context.slice(len(packing.rows))
            mine = (places >= own.start) & (places < own.stop)
            places, targets = places[mine] - own.start, targets[mine]
            found = self._applied(self._packed(inputs, packing)[places], targets)
            logprobs, entropies = self.context.combine_columns(torch.stack(found), mine)
            return logprobs, entropies

    def _applied(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the head makes of the hidden states (N, D) before `targets` (N,)."""
        return self.backend(base_model(self.model).get_output_embeddings(), hidden, targets, self.forbidden)

    def next_tokens(self, inputs: dict[str, Tensor], mask: Tensor) -> Tensor:
        """(N, V) log-probs of every token after each of the N where `mask` (B, L) is True, as servers report those of
        a prompt: at temperature 1, and no token is forbidden.
        """
        with self.cast(mask.device):
            logits: Tensor = base_model(self.model).get_output_embeddings()(self._hidden(inputs)[mask])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.log_softmax(-1)

    def own_logits(self, inputs: dict[str, Tensor]) -> Tensor:
        """(B, L, V) as the model itself gives them."""
        logits: Tensor = base_model(self.model)(**inputs, use_cache=False).logits
        return logits

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """What the model computes in."""
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()

    def _packed(self, inputs: dict[str, Tensor], packing: Packing) -> Tensor:
        return packed_states(base_model(self.model), inputs, packing, self.context)

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        model = base_model(self.model)
        if needs_no_mask(model):
            inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
        return model.model(**inputs, use_cache=False).last_hidden_state


def predicting(loss_mask: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """(N,) rows and (N,) columns of the positions before the N tokens where `loss_mask` (B, L) is True, columns 1 on.

    A mask on a GPU is waited for, one on the CPU is not; they are on `device`, None: where the mask is.
    """
    rows, columns = loss_mask[:, 1:].bool().nonzero(as_tuple=True)
    device = device or loss_mask.device
    return to_device(rows, device), to_device(columns, device)


def text_inputs(policy: Policy, ids: Tensor) -> dict[str, Tensor]:
    """The model's inputs for rows (B, L) of text of one length."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in signature(base_model(policy.model).forward).parameters:
        inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    return inputs


def check_head(policy: Policy) -> None:
    """Compares the head applied by `Policy` with the model's own logits on a row of text, up to their rounding.

    Raises:
        ConfigurationError: the model does something to its logits that `Policy` does not know.
    """
    device = next(policy.parameters()).device
    ids = torch.arange(1, 9, device=device)[None] % len(policy.forbidden)
    mask = torch.ones_like(ids, dtype=torch.bool)
    inputs = text_inputs(policy, ids)
    with torch.no_grad():
        ours, _ = policy(inputs, predicting(mask))
        with policy.cast(device):
            logits = policy.own_logits(inputs)[:, :-1]
        tolerance = 1e-2 + 2 * torch.finfo(logits.dtype).eps * logits.abs().max().item()
        logits = logits.float() / policy.temperature
        logits.masked_fill_(policy.forbidden, float("-inf"))
        theirs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()
    finite = theirs.isfinite()
    gap = (ours - theirs)[finite].abs().max().item()
    if gap > tolerance:
        name = type(base_model(policy.model)).__name__
        raise ConfigurationError(
            f"{name} changes its logits after the head: log-probs differ by {gap:.3g}",
            code="head_not_supported",
            where="armature.components.vlm.logprobs.Policy",
            remedy="add that change to the backends in armature.components.vlm.heads.backends",
        )


# The trainer's own answer to a probe, with its current weights.


@torch.no_grad()
def answer_probe(policy: Policy, processor: Any, probe: Probe) -> LogProbs:
    """See `Probe`. Of a sharded policy every rank asks."""
    device = next(policy.parameters()).device
    tokens = torch.tensor([probe.tokens], device=device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    parts = [policy.next_tokens(text_inputs(policy, tokens), mask).gather(1, tokens[0, 1:, None])[:, 0]]
    if probe.image:
        inputs = _message(processor, probe)
        last = torch.zeros_like(inputs["input_ids"], dtype=torch.bool, device=device)
        last[:, -1] = True
        moved = {name: value.to(device) for name, value in inputs.items()}
        parts.append(policy.next_tokens(moved, last)[0].topk(LIKELIEST).values)
    values = torch.cat(parts).float().cpu().numpy()
    return np.asarray(values, dtype=np.float32)


def _message(processor: Any, probe: Probe) -> dict[str, Tensor]:
    content = [{"type": "image"}, {"type": "text", "text": WORDS}]
    chat = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return dict(processor(text=[text], images=[[probe.pil_image()]], add_special_tokens=False, return_tensors="pt"))
