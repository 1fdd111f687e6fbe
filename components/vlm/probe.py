"""The trainer's own answer to a probe, with its current weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from armature.components.contracts.rollouts import LogProbs
from armature.components.inference.probe import LIKELIEST, WORDS, Probe
from armature.components.vlm.logprobs import Policy, text_inputs


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
