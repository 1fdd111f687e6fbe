"""The estimate of a trainer's memory, and the choice of gradient checkpointing by memory."""

from __future__ import annotations

import math

import pytest
import torch

from armature.components.models.load import load_model
from armature.components.training.processes import TrainerProcesses
from armature.components.vlm.learner import Learner
from armature.components.vlm.memory import FREE, GIB, OVERHEAD, chosen_recomputation, estimate_memory
from tests.builders import make_machine
from tests.vlm.conftest import model_settings, step, trainer_settings, worker_of


def test_sharded_estimate_is_shard_plus_gathered(tiny):
    model = tiny.model()
    parameters = sum(p.numel() for p in model.parameters())
    units = [*model.model.language_model.layers, model.model.visual]
    sizes = sorted(sum(p.numel() for p in unit.parameters()) for unit in units)
    settings = trainer_settings(autocast="bf16")
    whole = estimate_memory(tiny.folder, model_settings(dtype="bfloat16"), settings, "bfloat16")
    assert whole.over(1).trainer - whole.activations - whole.images - whole.logits == parameters * (2 + 4 + 8 + 4)
    split = whole.over(4).trainer - whole.activations - whole.images - whole.logits
    assert split == parameters * (4 + 4 + 8) // 4 + 2 * (parameters - sum(sizes[:-2]))
    compared = estimate_memory(
        tiny.folder, model_settings(), trainer_settings(kl_coefficient=0.1, autocast="bf16"), "bfloat16"
    )
    assert compared.over(4).weights == 2 * parameters
    assert "GiB on each of 4 ranks; 1.00 GiB free on GPU 0" in compared.over(4).lines(2**30, "GPU 0")[1]


def test_context_parallel_divides_activations(tiny):
    whole = estimate_memory(tiny.folder, model_settings(), trainer_settings(packing=True), "float32").over(4)
    assert whole.activations - whole.over(1, 4).activations == 3 * whole.activations // 4
    split = estimate_memory(tiny.folder, model_settings(), trainer_settings(packing=True), "float32").over(4, 4)
    assert split.trainer == whole.trainer - 3 * whole.activations // 4


@pytest.mark.parametrize("recomputed", [False, True])
def test_offloaded_activations_count_as_one_layer(tiny, recomputed):
    model, settings = model_settings(gradient_checkpointing=recomputed), trainer_settings(activation_offloading=True)
    one = estimate_memory(tiny.folder, model, settings, "float32").activations
    text, tokens = tiny.model().config.get_text_config(), settings.max_tokens_per_micro_batch
    inputs = text.num_hidden_layers * 4 * tokens * 64 * recomputed
    whole = estimate_memory(tiny.folder, model, trainer_settings(), "float32").activations
    assert whole == inputs + one * (1 if recomputed else text.num_hidden_layers)


@pytest.mark.parametrize(
    ("logprobs", "tokens", "size"),
    [
        ({"name": "normal"}, 64, 8),
        ({"name": "torch", "chunk_tokens": 16}, 16, 8),
        ({"name": "triton", "chunk_tokens": 16}, 16, 2),
        ({"name": "triton", "chunk_tokens": 100}, 64, 2),
    ],
)
def test_logits_estimate_by_backend(tiny, logprobs, tokens, size):
    """torch and normal hold logits and gradient in fp32; triton holds only the gradient, in the products' dtype."""
    settings = trainer_settings(logprobs=logprobs, max_tokens_per_micro_batch=64, autocast="bf16")
    estimate = estimate_memory(tiny.folder, model_settings(), settings, "float32")
    assert estimate.logits == tokens * tiny.model().config.get_text_config().vocab_size * size


def test_bf16_weights_estimate_includes_master_halves(tiny):
    settings = trainer_settings(weights="bfloat16")
    estimate = estimate_memory(tiny.folder, model_settings(dtype="bfloat16"), settings, "bfloat16")
    assert estimate.weights + estimate.optimizer == estimate.parameters * (2 + 4 + 8 + 2)


def test_optimizer_states_estimate_by_storage(tiny):
    low = model_settings(dtype="bfloat16")
    estimates = {}
    for states in ("device", "cpu", "8bit"):
        settings = trainer_settings(weights="bfloat16", optimizer_states=states)
        estimates[states] = estimate_memory(tiny.folder, low, settings, "bfloat16")
    p = estimates["device"].parameters
    assert {name: (one.optimizer, one.main_memory) for name, one in estimates.items()} == {
        "device": (p * (4 + 8 + 2), 0),
        "cpu": (p * 4, p * (8 + 2)),
        "8bit": (math.ceil(p * (4 + 2 + 2 * 4 / 256 + 2)), 0),
    }
    split = estimates["cpu"].over(2)
    assert (split.optimizer, split.main_memory) == (p * 4 // 2, p * 8 // 2)
    assert "of main memory, pinned for a GPU, for each of 2 ranks" in split.lines(2**30, "GPU 0")[-2]


@pytest.mark.parametrize("states", ["cpu", "8bit"])
def test_learner_stores_states_as_set(tiny, states):
    done = []
    for each in ("device", states):
        learner = Learner(tiny.model(), trainer_settings(optimizer_states=each), temperature=1.0)
        metrics = [step(learner, tiny, tiny.samples(4, seed=seed)) for seed in (1, 2)]
        done.append((learner, metrics[1]["grad_norm"]))
    (plain, norm), (other, same) = done
    pairs = zip(plain.model.parameters(), other.model.parameters(), strict=True)
    dtypes = {value.dtype for state in other.optimizer.state.values() for value in state.values()}
    if states == "cpu":
        assert norm == same and all(torch.equal(one, two) for one, two in pairs)
    else:
        assert torch.uint8 in dtypes and norm == pytest.approx(same, rel=0.01)


@pytest.mark.parametrize(
    ("lora", "freeze"),
    [
        ({"rank": 3, "targets": ("q_proj", "down_proj")}, ()),
        ({"rank": 2, "targets": ("all",), "scope": "all"}, ()),
        ({"rank": 2, "targets": ("all",), "scope": "all"}, ("vision",)),
    ],
)
def test_estimate_counts_adapter_parameters(tiny, lora, freeze):
    settings = model_settings(lora=lora, freeze=freeze)
    made = sum(p.numel() for p in load_model(tiny.folder, settings).parameters() if p.requires_grad)
    assert estimate_memory(tiny.folder, settings, trainer_settings(), "float32").trainable == made


def test_memory_estimate_names_the_server_on_the_same_gpu(tiny):
    estimate = estimate_memory(tiny.folder, model_settings(), trainer_settings(), "float32")
    needed = estimate.trainer
    assert "0.00 GiB are left" in estimate.beside_server(0.5, 2 * GIB, GIB + needed)
    assert "WARNING: 1.00 GiB are missing for both" in estimate.beside_server(0.5, 2 * GIB, needed)
    assert "WARNING: its weights are" in estimate.beside_server(0.0, 2 * GIB, 2 * GIB)
    for servers, trainers, share, expected in (
        ([[0]], (0,), 0.45, 0.45),
        ([[0]], (0,), None, 0.92),
        ([[1]], (0,), 0.45, None),
        ([[1]], (0, 1), 0.45, 0.45),
        ([], (), None, None),
    ):
        arguments = {} if share is None else {"gpu_memory_utilization": share}
        machine = make_machine(
            servers__gpus=tuple(map(tuple, servers)), trainer__gpus=trainers, servers__arguments=arguments
        )
        assert TrainerProcesses.of(machine).server_share == expected


@pytest.mark.parametrize(("processes", "sharing"), [(1, 1), (4, 1), (4, 4)])
def test_auto_checkpointing_is_the_smallest_share_that_fits(tiny, processes, sharing):
    ranks = TrainerProcesses(processes=processes, sharding="full", context_parallel=sharing)
    auto, plain, settings = model_settings(gradient_checkpointing="auto"), model_settings(), trainer_settings()
    half = model_settings(gradient_checkpointing=0.5)  # of two layers
    rooms = []
    for model in (plain, half):
        estimate = estimate_memory(tiny.folder, model, settings, "float32").over(ranks.shards, sharing)
        enough = int(estimate.trainer * OVERHEAD / (1 - FREE)) + 1
        rooms += [enough, enough - 2]
    chosen = [chosen_recomputation(tiny.folder, auto, settings, ranks, room) for room in rooms]
    assert chosen == [plain, half, half, model_settings(gradient_checkpointing=True)]
    assert chosen_recomputation(tiny.folder, plain, settings, ranks, 0) == plain


@pytest.mark.parametrize(("tokens", "recomputed"), [(256, False), (10**12, True)])
def test_worker_resolves_auto_checkpointing_by_memory(tiny, tmp_path, tokens, recomputed):
    trainer = {"max_tokens_per_micro_batch": tokens}
    worker = worker_of(tiny, tmp_path, trainer, gradient_checkpointing="auto")
    layers = [module for module in worker.learner.model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert bool(layers) is recomputed
