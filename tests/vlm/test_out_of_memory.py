"""A step whose memory is not enough to keep activations is computed again from the same state. The error is planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from armature.components.models.lora import base_model
from armature.components.rollouts.batches.table import write_batch
from armature.components.vlm.client import OUT_OF_MEMORY
from armature.components.vlm.learner import Learner
from tests.refusals import refused
from tests.vlm.conftest import Tiny, assert_same_step, step, stepped, trainer_settings, worker_of


def plant(learner: Learner, pass_number: int, when: str, always: bool = False) -> None:
    """Let the last layer raise the error of a full GPU in its n-th pass with kept activations, or in all from there."""
    layer: Any = base_model(learner.model).model.language_model.layers[-1]
    passes = []

    def raise_once(*_: object) -> None:
        if always or not layer.gradient_checkpointing:
            passes.append(1)
            if len(passes) == pass_number or (always and len(passes) > pass_number):
                raise torch.OutOfMemoryError("CUDA out of memory")

    if when == "forward":
        layer.register_forward_pre_hook(lambda *_: raise_once() if torch.is_grad_enabled() else None)
    else:
        layer.register_full_backward_pre_hook(raise_once)


def make(tiny: Tiny, may_recompute: bool = True, **changes: Any) -> Learner:
    settings = trainer_settings(samples_per_update=4, max_rows_per_micro_batch=2, max_steps=9, **changes)
    model = tiny.model(dtype=changes.get("weights", "float32"))
    return Learner(model, settings, temperature=1.0, may_recompute=may_recompute)


@pytest.mark.parametrize(
    ("when", "changes"),
    [("forward", {"packing": False}), ("backward", {"packing": True}), ("backward", {"weights": "bfloat16"})],
    ids=["padded", "packed", "bf16"],
)
def test_repeated_update_equals_an_undisturbed_one(tiny: Tiny, when: str, changes: dict[str, Any]) -> None:
    samples, expected, learner = tiny.samples(8, seed=1), make(tiny, **changes), make(tiny, **changes)
    plant(learner, 4, when)  # in the second micro-batch of the second of two updates
    plain, disturbed = stepped(expected, tiny, samples), stepped(learner, tiny, samples)
    assert_same_step(disturbed, plain)
    counted = ("tokens/trained", "tokens/total", "tokens/computed", "sequences", "updates")
    assert all(disturbed.metrics[name] == plain.metrics[name] for name in counted if name in plain.metrics)
    assert disturbed.metrics[OUT_OF_MEMORY] == 1 and OUT_OF_MEMORY not in plain.metrics
    later = [step(each, tiny, tiny.samples(8, seed=2)) for each in (expected, learner)]
    assert later[0]["loss"] == pytest.approx(later[1]["loss"], rel=1e-5)
    assert not any(OUT_OF_MEMORY in metrics for metrics in later)
    layers = [module for module in learner.model.modules() if hasattr(module, "gradient_checkpointing")]
    assert any(layer.gradient_checkpointing and layer.training for layer in layers)


@pytest.mark.parametrize(("may_recompute", "always"), [(False, False), (True, True)])
def test_error_remains_where_recomputation_is_off_or_no_help(tiny: Tiny, may_recompute: bool, always: bool) -> None:
    learner = make(tiny, may_recompute)
    plant(learner, 2, "forward", always)
    with pytest.raises(torch.OutOfMemoryError):
        step(learner, tiny, tiny.samples(4, seed=1))


@pytest.mark.parametrize("recomputes", ["auto", True])
def test_memory_that_recomputation_does_not_save_is_the_error_itself(
    tiny: Tiny, tmp_path: Path, recomputes: Any
) -> None:
    (tmp_path / "batch").mkdir()
    write_batch(tmp_path / "batch", tiny.samples(4, seed=1))
    command = {"name": "step", "step": 1, "batch": str(tmp_path / "batch")}
    worker = worker_of(tiny, tmp_path / "trainer", gradient_checkpointing="auto")
    if recomputes is True:  # the estimate was for it
        worker.learner.policy.recompute_activations()
    plant(worker.learner, 1, "forward", always=True)
    with pytest.raises(torch.OutOfMemoryError):
        worker.run(command, worker.check(command))


@pytest.mark.parametrize("several_ranks", [False, True])
def test_restarted_trainer_recomputes_from_the_beginning(tiny: Tiny, tmp_path: Path, several_ranks: bool) -> None:
    (tmp_path / "batch").mkdir()
    write_batch(tmp_path / "batch", tiny.samples(4, seed=1))
    command = {"name": "step", "step": 1, "batch": str(tmp_path / "batch")}
    first = worker_of(tiny, tmp_path / "trainer", gradient_checkpointing="auto")
    first.learner._may_recompute = not several_ranks  # ranks that wait for one that failed cannot repeat a step
    plant(first.learner, 1, "forward")
    prepared = first.check(command)
    if several_ranks:
        with refused("out_of_memory"):
            first.run(command, prepared)
    else:
        assert first.run(command, prepared)[OUT_OF_MEMORY] == 1
    again = worker_of(tiny, tmp_path / "trainer", gradient_checkpointing="auto")
    plant(again.learner, 1, "forward")
    assert OUT_OF_MEMORY not in again.run(command, again.check(command))
