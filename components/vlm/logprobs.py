"""Log-probs and entropies of trained tokens. The output head is applied only at positions that predict one."""

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
from armature.components.models.experts import RouterHooks
from armature.components.models.load import recompute_activations
from armature.components.models.lora import base_model
from armature.components.models.packed import Packing, packed_states, use_packed_attention
from armature.components.vlm.distillation import candidate_logprobs, likeliest_tokens
from armature.components.vlm.heads.backends import HEADS, Backend, HeadSettings


class Policy(nn.Module):
    """A vision-language model as a function from a batch to the log-probs and entropies of its trained tokens.

    The output head is applied by a backend, and only at positions that predict a trained token; see
    `armature.components.vlm.heads.backends`. Everything happens within `forward`, so that FSDP's hooks see one call.

    Args:
        model: a transformers model with a body `.model` and an output head, with or without adapters. It is put into
            evaluation mode, because log-probs with dropout would differ from the sampler's.
        logprobs: name of the backend that applies the head.
        temperature: logits are divided by it, as the sampler's were.
        chunk_tokens: number of trained tokens whose logits exist at once, for backends that work in chunks.
        forbidden_token_ids: tokens that the sampler could not choose; they get probability 0 here too. Ids beyond the
            head's rows, such as image placeholders in some families, have no probability anyway.
        autocast: dtype of matrix products; None is the dtype of the weights.
        device: the device on which the model will compute; by default where it is now.
        packing: allow packed rows.
        context: the ranks that share packed rows with this one.

    Raises:
        ConfigurationError: the backend does not support this head or device, or the model does not support packed rows
            or their sharing by this number of ranks.
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
        self._set_modes()
        self.temperature, self.autocast = temperature, autocast
        self.routers = RouterHooks(base_model(model))
        head = base_model(model).get_output_embeddings()
        forbidden = torch.zeros(len(head.weight), dtype=torch.bool)
        forbidden[[token for token in forbidden_token_ids if token < len(forbidden)]] = True
        self.forbidden: Tensor
        self.register_buffer("forbidden", forbidden, persistent=False)
        config = base_model(model).config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.head_settings = HeadSettings(temperature, self.softcap, chunk_tokens)
        self.backend: Backend = HEADS[logprobs](self.head_settings, head, device or head.weight.device)

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes the activations of all layers."""
        layers = (each for each in self.model.modules() if isinstance(each, GradientCheckpointingLayer))
        return all(layer.gradient_checkpointing for layer in layers)

    def recompute_activations(self) -> None:
        """Recompute the activations of all layers in backward passes from now on. The results stay the same."""
        recompute_activations(base_model(self.model))
        self._set_modes()

    def _set_modes(self) -> None:
        for module in self.model.modules():
            # A checkpointing layer recomputes in training mode only. Its children, where dropout is, stay in evaluation
            # mode.
            if isinstance(module, GradientCheckpointingLayer):
                module.training = module.gradient_checkpointing

    def forward(
        self,
        inputs: dict[str, Tensor],
        at: tuple[Tensor, Tensor],
        packing: Packing | None = None,
        experts: Tensor | None = None,
        *,
        candidates: Tensor | None = None,
        likeliest: int = 0,
    ) -> tuple[Tensor, ...]:
        """Return log-probs (N,) and entropies (N,) of the N tokens that the positions `at` predict; see `predicting`.

        With `candidates` (N, k), the log-probs (N, k) of these tokens in the same places follow. With `likeliest` = k,
        the k likeliest tokens and their log-probs follow, (N, k) each.

        With `packing` the model computes a prefix that rows share only once, and no padding; the result is the same.
        Ranks that share the rows all get the complete result, and each computes gradients for its part of the tokens.

        With `experts` (B, L, layers, k), tokens go to these experts; see `RouterHooks`.

        With N = 0 the results are empty but still depend on the head: under FSDP every rank has to use it, because its
        gradients take part in a collective.
        """
        with self.cast(inputs["input_ids"].device):
            targets = inputs["input_ids"][:, 1:][at]
            if packing is None:
                self.routers.use(None if experts is None else experts.flatten(0, 1), inputs["attention_mask"].flatten())
                return self._applied(self._hidden(inputs)[:, :-1][at], targets, candidates, likeliest)
            part: slice[Any, Any, Any] = slice(None) if self.context is None else self.context.slice(len(packing.rows))
            self.routers.use(None if experts is None else experts[packing.rows[part], packing.columns[part]])
            places = packing.places[:, :-1][at]
            if self.context is None:
                return self._applied(self._packed(inputs, packing)[places], targets, candidates, likeliest)
            mine = (places >= part.start) & (places < part.stop)
            places, targets = places[mine] - part.start, targets[mine]
            candidates = None if candidates is None else candidates[mine]
            results = self._applied(self._packed(inputs, packing)[places], targets, candidates, likeliest)
            columns = [result if result.ndim == 2 else result[:, None] for result in results]
            combined = self.context.combine_columns(torch.cat(columns, 1).t(), mine)
            parts = combined.split([column.shape[1] for column in columns])
            return tuple(part[0] if result.ndim == 1 else part.t() for part, result in zip(parts, results, strict=True))

    def _applied(
        self, hidden: Tensor, targets: Tensor, candidates: Tensor | None, likeliest: int
    ) -> tuple[Tensor, ...]:
        """Return what `forward` returns for `targets` (N,), computed by the head from hidden states (N, D)."""
        head = base_model(self.model).get_output_embeddings()
        logprobs, entropies = self.backend(head, hidden, targets, self.forbidden)
        if candidates is not None:
            settings = self.head_settings
            return logprobs, entropies, candidate_logprobs(head, hidden, targets, logprobs, candidates, settings)
        if likeliest:
            ids, values = likeliest_tokens(head, hidden, self.forbidden, likeliest, self.head_settings)
            return logprobs, entropies, ids, values
        return logprobs, entropies

    def next_tokens(self, inputs: dict[str, Tensor], mask: Tensor) -> Tensor:
        """Return log-probs (N, V) of all possible next tokens, at the N positions where `mask` (B, L) is True.

        They are computed as servers compute the log-probs of a prompt: at temperature 1, and no token
        is masked.
        """
        self.routers.use(None)
        with self.cast(mask.device):
            logits: Tensor = base_model(self.model).get_output_embeddings()(self._hidden(inputs)[mask])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.log_softmax(-1)

    def own_logits(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the logits (B, L, V) that the model itself computes."""
        self.routers.use(None)
        logits: Tensor = base_model(self.model)(**inputs, use_cache=False).logits
        return logits

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the autocast context in which the model computes."""
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()

    def _packed(self, inputs: dict[str, Tensor], packing: Packing) -> Tensor:
        return packed_states(base_model(self.model), inputs, packing, self.context)

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        model = base_model(self.model)
        if needs_no_mask(model):
            inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
        return model.model(**inputs, use_cache=False).last_hidden_state


def predicting(loss_mask: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return rows (N,) and columns (N,) of the positions that predict the N tokens where `loss_mask` (B, L) is True.

    A token at column c is predicted at column c - 1; column 0 is never predicted. The result is on `device`, by default
    the mask's. Keep the mask on the CPU: a mask on a GPU makes the host wait for the GPU.

    Example:
        >>> predicting(torch.tensor([[False, False, True, True]]))
        (tensor([0, 0]), tensor([1, 2]))
    """
    rows, columns = loss_mask[:, 1:].bool().nonzero(as_tuple=True)
    device = device or loss_mask.device
    return to_device(rows, device), to_device(columns, device)


def text_inputs(policy: Policy, ids: Tensor) -> dict[str, Tensor]:
    """Return the model's inputs for the token ids (B, L) of B rows of text."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in signature(base_model(policy.model).forward).parameters:
        inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    return inputs


def check_head(policy: Policy) -> None:
    """Compare the log-probs of `policy` with the log-probs of the model's own logits, on a row of text.

    Raises:
        ConfigurationError: they differ by more than rounding, so the model changes its logits in a way that `Policy`
            does not support.
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
            f"{name} changes its logits after the output head: log-probs differ by {gap:.3g}",
            code="head_not_supported",
            where="armature.components.vlm.logprobs.Policy",
            remedy="implement this change in the backends in armature.components.vlm.heads.backends",
        )


@torch.no_grad()
def answer_probe(policy: Policy, processor: Any, probe: Probe) -> LogProbs:
    """Return the log-probs that the trainer's current weights give to a probe; see `Probe`.

    Servers that hold the same weights return the same numbers. With a sharded policy every rank must call this.
    """
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
