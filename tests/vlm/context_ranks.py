"""A program whose ranks compute the cases of test_context_parallel together, each for a slice of the tokens."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from armature.components.contracts.batches import Sample
from armature.components.models.adapters import model_inputs
from armature.components.models.lora import base_model
from armature.components.models.packed import complete_packing
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks, joined
from armature.components.vlm.loader import FeatureCache
from armature.components.vlm.logprobs import Policy, predicting
from armature.components.vlm.packing import packed_batch
from tests.training.forked import serve
from tests.vlm.conftest import Tiny, open_tiny


@dataclass(frozen=True)
class Case:
    """A model, and samples for which ranks compute log-probs and gradients.

    `window` is the length in tokens of the sliding attention window in the model's layers; None means no window.
    """

    folder: Path
    samples: list[Sample]
    model: dict[str, Any] = field(default_factory=dict)
    window: int | None = None


def policy_of(case: Case, tiny: Tiny, ranks: Ranks) -> Policy:
    torch.manual_seed(0)  # adapters are initialized randomly
    model = tiny.model(**case.model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # while lora_B is 0, lora_A has no gradient
            nn.init.normal_(parameter, std=0.1)
    if case.window is not None:
        base_model(model).config.text_config.sliding_window = case.window
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = case.window
    forbidden = sorted(tiny.collator.forbidden_token_ids)
    return Policy(
        model, logprobs="torch", temperature=1.0, forbidden_token_ids=forbidden, packing=True, context=ranks.context
    )


def packed(case: Case, tiny: Tiny, policy: Policy, ranks: Ranks) -> tuple[Any, Any]:
    with TemporaryDirectory() as folder:
        features = FeatureCache(tiny.collator, tiny.images, Path(folder))
        batch = packed_batch(tiny.collator, case.samples, features, *ranks.part)
    inputs = model_inputs(batch)
    return batch, complete_packing(base_model(policy.model), inputs, batch.grids, batch.packing, ranks.context)


def results(
    policy: Policy, batches: list[tuple[Any, Any]], count_saved: Callable[[nn.Module], Any]
) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Compute the rows of all batches.

    Return their log-probs and entropies, the gradient of a weighted sum of these, and the bytes saved for backward.
    """
    policy.zero_grad()
    outputs, most = [], 0
    for batch, packing in batches:
        with count_saved(policy) as sizes:
            logprobs, entropy = policy(model_inputs(batch), predicting(batch.loss_mask), packing)
        weight = batch.advantages[:, 1:][batch.loss_mask[:, 1:]]
        (weight * logprobs + 0.1 * entropy).sum().backward()
        outputs += [logprobs.detach(), entropy.detach()]
        most = max(most, sum(sizes.values()))
    return outputs, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}, most


@contextmanager
def kept_for_backward(policy: nn.Module) -> Iterator[dict[int, int]]:
    """Count the bytes that autograd saves within this block, by memory address. Weights are not counted."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def compute(file: str) -> None:
    """Compute the pickled cases in `file` as one of several ranks, and save the results beside it."""
    cases: dict[str, Case] = pickle.loads(Path(file).read_bytes())
    with joined(TrainerProcesses(threads=1, context_parallel=int(os.environ["WORLD_SIZE"])), seed=0) as ranks:
        for name, case in cases.items():
            tiny = open_tiny(case.folder)
            policy = policy_of(case, tiny, ranks)
            outputs, gradient, most = results(policy, [packed(case, tiny, policy, ranks)], kept_for_backward)
            ranks.sum_gradients(policy.parameters())
            of_ranks = ranks.gather([sorted(gradient), most, *outputs])
            if ranks.first:
                torch.save((of_ranks, gradient), Path(file).with_name(f"{name} on {ranks.size}.pt"))


if __name__ == "__main__":
    serve(compute)
