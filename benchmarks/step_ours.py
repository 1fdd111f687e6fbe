"""Our half of the GPU benchmark: updates on tensors at hand.

Usage: python -m benchmarks.step_ours PROCESSORS RESULTS STEPS SMALL WAY..., a way being words joined by commas: a case,
the tokens of a micro-batch, then `packing`, `bf16`, `compile`, `keep` (activations), `lora`, `profile` as wanted. A
number in place of `keep` is the share of layers that recompute activations; with `stored`, compiled layers keep what
they would compute again. `cpu` or `8bit` is where the optimizer's states are, `7b` a larger model; with `lora`, `nf4`
has base weights in 4 bits, and `rounded` what these stand for. `padded` pads widths whatever the trainer would choose,
`unpadded` does not.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoProcessor

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.contracts.batches import Sample
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.families.family import family_of
from armature.components.machine.resources import exempt_from_collection
from armature.components.models.adapters import SampleCollator, get_adapter
from armature.components.models.attention import apply_image_attention
from armature.components.models.compiled import _compiled, _inductor, pad_widths
from armature.components.models.load import freeze, recompute_activations
from armature.components.models.lora import NF4Linear, add_adapters, quantize
from armature.components.models.settings import LoraSettings
from armature.components.models.varlen import choose_kernels
from armature.components.rollouts.batches.table import build_batch
from armature.components.rollouts.settings import BatchSettings
from armature.components.training.ranks import Ranks
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import MicroBatchLoader
from armature.components.vlm.settings import PPO, TrainerSettings
from benchmarks.rollouts import one_turn
from benchmarks.step_case import GROUP_SIZE, NO_MEMORY, WORK, Case, clean, limit_memory, make_model, peak_gib, say, sync

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BATCH = BatchSettings.model_validate(
    {
        "advantage": {"name": "group_mean", "scale": "none"},
        "penalty": {"format": 0.0, "inadmissible": 0.0},
        "skip_zero_advantage": False,
        "max_sequence_tokens": 2**31 - 1,
    }
)


def settings_of(tokens: int, words: set[str]) -> TrainerSettings:
    """Return trainer settings equal to TRL's: clipping at 0.2, mean over tokens, AdamW with learning rate 1e-6 and no
    weight decay, and gradients clipped at 1."""
    return TrainerSettings.model_validate(
        {
            "objective": PPO(name="ppo"),
            "learning_rate": 1e-6,
            "max_steps": 1000,
            "max_tokens_per_micro_batch": tokens,
            "logprobs": {"name": "triton" if CUDA else "torch", "chunk_tokens": tokens if "keep" in words else 2048},
            "packing": "packing" in words,
            "weights": "bfloat16" if "bf16" in words else "float32",
            "autocast": "none" if "bf16" in words or not CUDA else "bf16",
            "torch_compile": "compile" in words,
            "optimizer_states": next(iter(words & {"cpu", "8bit"}), "device"),
        }
    )


def samples_of(case: Case, adapter: Any, store: ImageStore, prompt: np.ndarray[Any, Any]) -> list[Sample]:
    refs = [tuple(store.put(encode_png(image)) for image in images) for images in case.images]
    trajectories = []
    for row, answer in enumerate(case.answers):
        group, member = divmod(row, GROUP_SIZE)
        trajectories.append(one_turn(group, member, prompt, answer, refs[case.prompt_of(row)], case.rewards[row]))
    built = build_batch(GenerateOutputs(trajectories), adapter, BATCH)
    assert not built.drops, built.drops
    return list(built.samples)


def measure(
    model: Any, collator: SampleCollator, store: ImageStore, samples: list[Sample], steps: int, way: str
) -> dict[str, Any]:
    _, tokens, *words = way.split(",")
    if share := share_of(words):
        recompute_activations(model, share)
    if "padded" in words:
        pad_widths(model)
    with ExitStack() as patches:
        if "unpadded" in words:
            patches.enter_context(patch("armature.components.vlm.learner.pad_widths"))
        if "stored" in words:
            stored = patch("armature.components.models.compiled._inductor", lambda **_: _inductor())
            patches.enter_context(stored)
            _compiled.cache_clear()
            patches.callback(_compiled.cache_clear)
        learner = Learner(model, settings_of(int(tokens), set(words)), temperature=1.0, ranks=Ranks(device=DEVICE))
    loader = MicroBatchLoader(collator, store, workers=0)
    with loader.batch():
        scores = learner.score(samples, loader)
        ours = [replace(one, behavior_logprobs=values) for one, values in zip(samples, scores, strict=True)]
        whole = list(loader(learner.plan(ours, range(len(ours)))))

    def step() -> dict[str, float]:
        return learner.step(ours, lambda plan: iter(whole))

    began = time.perf_counter()
    report = step()
    sync()
    result: dict[str, Any] = {"norm": report["grad_norm"], "first_s": time.perf_counter() - began, "seconds": []}
    exempt_from_collection()  # as our trainer does after its first steps
    result["mismatch_kl"] = report["mismatch_kl"]
    result["computed"] = int(report.get("tokens/computed", sum(batch.input_ids.numel() for _, batch in whole)))
    result["micro_batches"] = len(whole)
    for _ in range(steps):
        sync()
        began = time.perf_counter()
        report = step()
        sync()
        result["seconds"].append(time.perf_counter() - began)
    result["peak_gib"] = report["memory/peak_gib"] if CUDA else peak_gib()
    if "profile" in words:
        result["profile"] = profiled(step)
    return result


def share_of(words: Sequence[str]) -> float:
    """Return the share of layers that recompute activations: a number among the words, 0 for `keep`, otherwise 1."""
    numbers = [float(word) for word in words if word.replace(".", "", 1).isdigit()]
    return (numbers or [float("keep" not in words)])[0]


def restore(model: Any) -> None:
    """Replace 4-bit layers by plain linear layers, whose weights are the dequantized ones."""
    for name, layer in [(name, layer) for name, layer in model.named_modules() if isinstance(layer, NF4Linear)]:
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight, plain.bias = torch.nn.Parameter(layer.dequantized(), requires_grad=False), layer.bias
        model.set_submodule(name, plain)


def profiled(step: Any) -> dict[str, Any]:
    """Profile one step. Return the number of kernels, the time in which the GPU was busy, and the kernels that took
    longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        step()
        sync()
        wall = time.perf_counter() - began
    on_gpu = (event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    events = [event for event in on_gpu if not event.name.startswith("Optimizer.")]  # which spans others
    taken: dict[str, float] = {}
    for event in events:
        taken[event.name[:90]] = taken.get(event.name[:90], 0.0) + event.device_time_total / 1e3
    longest = sorted(taken.items(), key=lambda item: -item[1])[:25]
    waits = sum(event.name.startswith("cudaStreamSynchronize") for event in seen.events())
    return {
        "kernels": len(events),
        "busy_ms": sum(taken.values()),
        "wall_ms": wall * 1e3,
        "waits": waits,
        "longest_ms": {name: round(ms, 1) for name, ms in longest},
    }


def main() -> None:
    processors, out, steps, small = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    limit_memory()
    with tempfile.TemporaryDirectory() as scratch:
        store = ImageStore(Path(scratch) / "images")
        for way in sys.argv[5:]:
            name, words = way.split(",")[0], way.split(",")[2:]
            folder = processors / WORK[name].family
            size = "4b" if folder.name == "qwen3-vl" else "7b" if "7b" in words else "3b"
            case, processor = Case(folder, name, small), AutoProcessor.from_pretrained(folder)
            prompt = case.prompt(processor, case.question(processor))
            model = make_model(folder, "sdpa", str(DEVICE), small, size)
            adapter = get_adapter(model.config.model_type, processor, store.open)
            choose_kernels(model)
            apply_image_attention(model)
            try:
                model = model if "bf16" in words else model.float()
                if "lora" in words:
                    frozen, family = ("vision", "projector"), family_of(model.config)
                    freeze(model, family, frozen)
                    if {"nf4", "rounded"} & set(words):
                        quantize(model, family, DEVICE)
                    if "rounded" in words:
                        restore(model)
                    torch.manual_seed(0)
                    model = add_adapters(model, family, LoraSettings(), frozen)
                result = measure(model, adapter.collator, store, samples_of(case, adapter, store, prompt), steps, way)
                say(out, {"side": "ours", "way": way} | result)
            except torch.OutOfMemoryError:
                say(out, {"side": "ours", "way": way, "failed": NO_MEMORY})
            except Exception:
                say(out, {"side": "ours", "way": way, "failed": traceback.format_exc()[-1500:]})
            del model
            gc.unfreeze()
            clean()


if __name__ == "__main__":
    main()
