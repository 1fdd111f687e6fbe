"""Log-probs of trained tokens compared with the naive computation on all logits, in float64."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from armature.components.families.family import FAMILIES
from armature.components.models.adapters import model_inputs
from armature.components.models.attention import needs_no_mask
from armature.components.vlm.logprobs import Policy, check_head, predicting
from tests.refusals import refused

from .conftest import LORA

FORBIDDEN = (5, 9)


def naive(model: Any, batch: Any, temperature: float, forbidden: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = batch.loss_mask[:, 1:]
    logits = model(**model_inputs(batch)).logits[:, :-1][mask].double() / temperature
    logits[:, [token for token in forbidden if token < logits.shape[1]]] = float("-inf")
    everything = logits.log_softmax(-1)
    chosen = everything.gather(-1, batch.input_ids[:, 1:][mask][:, None]).squeeze(-1)
    return chosen, -(everything.exp() * everything.clamp(min=-1e9)).sum(-1).detach()


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen3-vl", "llava", "gemma3", "molmo2"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("backend", ["normal", "torch"])
def test_backends_equal_naive_with_gradients(family, lora, backend, make_tiny):
    """In Molmo2 image tokens have embeddings but no logits."""
    tiny = make_tiny(family)
    forbidden = (*FORBIDDEN, *sorted(tiny.collator.forbidden_token_ids))
    model = tiny.model(lora=lora).double()
    batch = tiny.collator.collate(tiny.samples(6, seed=0), tiny.images.open)
    if batch.pixel_values is not None:
        batch.pixel_values = batch.pixel_values.double()
    policy = Policy(model, logprobs=backend, temperature=0.7, chunk_tokens=7, forbidden_token_ids=forbidden)
    rows = len(model.get_output_embeddings().weight)
    assert (batch.input_ids >= rows).any() == (family == "molmo2")
    weights = torch.linspace(-1, 1, int(batch.loss_mask[:, 1:].sum()), dtype=torch.float64)
    results = []
    for compute in (
        lambda: policy(model_inputs(batch), predicting(batch.loss_mask)),
        lambda: naive(model, batch, 0.7, forbidden),
    ):
        model.zero_grad()
        logprobs, entropy = compute()
        (logprobs.masked_fill(logprobs.isinf(), 0.0) * weights).sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((logprobs.detach(), entropy.detach(), grads))
    (lp, ent, grads), (lp_naive, ent_naive, grads_naive) = results
    torch.testing.assert_close(lp, lp_naive, atol=1e-10, rtol=0)
    torch.testing.assert_close(ent, ent_naive, atol=1e-10, rtol=0)
    assert grads
    assert grads.keys() == grads_naive.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_naive[name], atol=1e-10, rtol=1e-8)


def test_forbidden_tokens_have_no_probability(tiny):
    batch = tiny.collator.collate(tiny.samples(2, seed=0), tiny.images.open)
    batch.input_ids[0, -1] = 5
    batch.loss_mask[0, -1] = True
    policy = Policy(tiny.model(), logprobs="torch", temperature=1.0, chunk_tokens=4, forbidden_token_ids=FORBIDDEN)
    with torch.no_grad():
        logprobs, entropy = policy(model_inputs(batch), predicting(batch.loss_mask))
    assert logprobs.isinf().sum() == 1
    assert entropy.isfinite().all()


class Bare(nn.Module):
    """A model whose body returns fixed hidden states, with an identity matrix as head, so that these are its logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.config = type("C", (), {"get_text_config": lambda self: object()})()
        self.head = nn.Linear(logits.shape[-1], logits.shape[-1], bias=False)
        nn.init.eye_(self.head.weight)
        self.logits = nn.Parameter(logits)

    def model(self, **inputs: Any) -> Any:
        return type("O", (), {"last_hidden_state": self.logits})

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def bare(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Bare]:
    model = Bare(logits)
    ids = torch.zeros(logits.shape[:2], dtype=torch.int64)
    policy = Policy(model, logprobs="torch", temperature=1.0, chunk_tokens=2)
    return *policy({"input_ids": ids, "attention_mask": ids + 1}, predicting(torch.ones_like(ids))), model


def test_large_logits_are_stable():
    logits = torch.tensor([[[1000.0, -1000.0, 0.0]] * 3])
    logprobs, entropy, model = bare(logits)
    assert logprobs.isfinite().all()
    assert (entropy < 0.1).all()
    logprobs.sum().backward()
    assert model.logits.grad.isfinite().all()
    _, entropy, _ = bare(torch.zeros(1, 3, 10))
    np.testing.assert_allclose(entropy.detach(), np.log(10), rtol=1e-6)


def test_rejects_unsupported_head(tiny):
    model = tiny.model()
    policy = Policy(model, logprobs="torch", temperature=1.0, chunk_tokens=64)
    check_head(policy)
    model.register_forward_hook(lambda *a: a[2].__setitem__("logits", a[2].logits * 2) or a[2])
    with refused("head_not_supported", "Qwen2VL"):
        check_head(policy)


def test_gradient_checkpointing_works_without_training_mode(tiny):
    batch = tiny.collator.collate(tiny.samples(4, seed=0), tiny.images.open)
    grads = []
    for checkpointing in (False, True):
        model = tiny.model(gradient_checkpointing=checkpointing)
        policy = Policy(model, logprobs="torch", temperature=1.0, chunk_tokens=64)
        layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) and m.training]
        assert bool(layers) is checkpointing
        assert not any(m.training for m in model.modules() if isinstance(m, nn.Dropout))
        policy(model_inputs(batch), predicting(batch.loss_mask))[0].sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors. The process's memory would also include freed bytes that malloc keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.known:
                    self.known.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def test_chunked_log_probs_need_less_memory():
    rows, length, width, vocabulary = 2, 512, 32, 20_000
    model = Bare(torch.randn(rows, length, width))
    model.head = nn.Linear(width, vocabulary, bias=False)
    ids = torch.randint(0, vocabulary, (rows, length))
    mask = (torch.arange(length) >= length // 2).expand(rows, length)
    with Live() as chunked:
        policy = Policy(model, logprobs="torch", temperature=1.0, chunk_tokens=32)
        policy({"input_ids": ids, "attention_mask": ids}, predicting(mask))[0].sum().backward()
    with Live() as everything:
        logprobs = model.head(model.logits)[:, :-1].float().log_softmax(-1)
        _entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
        logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)[mask[:, 1:]].sum().backward()
    print(f"naive {everything.peak / 2**20:.0f} MiB, chunked {chunked.peak / 2**20:.0f} MiB")
    assert chunked.peak < everything.peak / 10


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_models_need_no_mask_for_end_padding(family, make_tiny):
    """Log-probs and gradients equal the results of the model with its mask."""
    tiny = make_tiny(family)
    batch = tiny.collator.collate(tiny.samples(4, seed=0), tiny.images.open)
    assert not batch.attention_mask.bool().all()
    inputs, mask, results = model_inputs(batch), batch.loss_mask[:, 1:].bool(), []
    for whole in (False, True):
        policy = Policy(tiny.model(), logprobs="torch", temperature=1.0)
        assert needs_no_mask(policy.model) == (not FAMILIES[family].image_attention)
        if whole:
            logits = policy.own_logits(inputs)[:, :-1][mask]
            logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:][mask][:, None])[:, 0]
        else:
            logprobs, _ = policy(inputs, predicting(batch.loss_mask))
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        results.append((logprobs.detach(), gradient))
    (ours, gradient), (theirs, reference) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    assert (gradient - reference).norm() < 1e-5 * reference.norm()
