"""A MolmoAct2 of the released sizes with random weights on one GPU: memory and speed of its training and its answers.

Usage: python -m benchmarks.policies [expert] [lora] [full] [answers] [8] [16] [32]: modes and batch sizes. Without any
it is all of them, which go on the page. One that does not fit says so. The rows go to $OUT/policies.json as well, each
as soon as it is measured.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.policy_case import ACTIONS, CHUNK, DRAWS, IMAGES, PAD, RELEASED, examples, patches_of
from components.policies.molmoact2.configuration import MolmoAct2Config
from components.policies.molmoact2.modeling.flow import FlowSamples
from components.policies.molmoact2.modeling.losses import LossPlan
from components.policies.molmoact2.modeling.model import MolmoAct2
from components.policies.molmoact2.processing.batch import Example, collate, pack
from components.policies.molmoact2.sampling import InferencePlan, Sampler
from components.policies.settings import ActionMode
from components.training.memory import peak_memory_gib
from components.training.ranks import Ranks
from components.vla.groups import prepare
from components.vla.learner import PolicyLearner
from components.vla.micro_batch import PolicyMicroBatch
from components.vla.settings import Mode, PolicyLoraSettings, VLATrainerSettings

UPDATES = 3  # the first one makes the optimizer's state
MODES: tuple[tuple[Mode, ActionMode], ...] = (("expert", "continuous"), ("lora", "both"), ("full", "both"))
BATCHES = (8, 16, 32)


@dataclass(frozen=True)
class Training:
    """Updates of `batch` examples with gradient checkpointing; None where the memory is too small."""

    mode: str
    action_mode: str
    batch: int
    packed: bool
    compiled: bool
    allocated_gib: float | None
    device_gib: float | None  # all that the GPU lent to anyone, as nvidia-smi has it
    samples_per_second: float | None


@dataclass(frozen=True)
class Answers:
    """So many rows at a time, 10 Euler steps; medians."""

    rows: int
    graph: bool
    compiled: bool
    milliseconds: float
    allocated_gib: float


def main(words: Sequence[str]) -> None:
    known = [*(mode for mode, _ in MODES), "answers", *map(str, BATCHES)]
    if unknown := set(words) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}\n{__doc__}")
    what = [word for word in known[: len(MODES) + 1] if word in words] or known[: len(MODES) + 1]
    modes = [pair for pair in MODES if pair[0] in what]
    batches = [batch for batch in BATCHES if str(batch) in words] or BATCHES
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"training": [], "answers": []}
    for one in measure(RELEASED, torch.device("cuda"), modes, batches, "answers" in what):
        print(one, flush=True)
        result["training" if isinstance(one, Training) else "answers"].append(asdict(one))
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "policies.json").write_text(json.dumps(result, indent=1))
    if not words:
        from benchmarks.table import write

        write("policies-gpu", result)


def measure(
    raw: dict[str, Any],
    device: torch.device,
    modes: Sequence[tuple[Mode, ActionMode]],
    batches: Sequence[int],
    answers: bool,
) -> Iterator[Training | Answers]:
    config = MolmoAct2Config.from_dict(raw)
    on_gpu = device.type == "cuda"
    for (mode, action_mode), batch in itertools.product(modes, batches):
        for packed, compiled in ((False, False), (True, False), (False, True)):
            if (packed and batch < max(batches)) or (compiled and not on_gpu):
                continue
            yield _training(config, device, mode, action_mode, batch, packed, compiled)
    if not answers:
        return
    ways = [(1, False, False)]
    if on_gpu:
        ways += [(rows, True, compiled) for compiled in (False, True) for rows in (1, *batches)]
    for way in ways:
        yield _answers(config, device, *way)


def _training(
    config: MolmoAct2Config,
    device: torch.device,
    mode: Mode,
    action_mode: ActionMode,
    batch: int,
    packed: bool,
    compiled: bool,
) -> Training:
    _clean(device)
    try:
        model = _model(config, device)
        settings = trainer_settings(mode, batch).model_copy(update={"torch_compile": compiled})
        prepare(model, settings, "head")
        plan = loss_plan(action_mode)
        learner = PolicyLearner(model, settings, plan, Ranks(device=device))
        micro = _micro_batch(config, batch, action_mode, packed).to(device)
        reports = [learner.step([micro]) for _ in range(UPDATES)]
    except torch.OutOfMemoryError:
        return Training(mode, action_mode, batch, packed, compiled, None, None, None)
    allocated = max(report["memory/peak_gib"] for report in reports)
    speed = max(report["samples_per_second"] for report in reports[1:])
    return Training(mode, action_mode, batch, packed, compiled, allocated, _lent(device), speed)


def _answers(config: MolmoAct2Config, device: torch.device, rows: int, graph: bool, compiled: bool) -> Answers:
    _clean(device)
    model = _model(config, device)
    model.cast_for_inference()
    if compiled:
        model.compile_layers(dynamic=False)
    plan = InferencePlan(bidirectional_images=True, hides_answers=False, mask_dimensions=True, steps=10)
    sampler = Sampler(model, plan, CHUNK, rows, 640, PAD)
    if not graph:
        sampler._euler_steps = sampler._euler
    given = examples_of(config.model_dump(), rows, answers=False, trained=False)
    times = []
    for seed in range(12):
        began = time.perf_counter()
        sampler.sample(given, range(seed, seed + rows))
        times.append(time.perf_counter() - began)
    return Answers(rows, graph, compiled, 1e3 * statistics.median(times[2:]), peak_memory_gib(device))


def _model(config: MolmoAct2Config, device: torch.device) -> MolmoAct2:
    with torch.device("meta"):
        model = MolmoAct2(config, "bfloat16", residual_dropout=0.1)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model


def loss_plan(action_mode: ActionMode) -> LossPlan:
    return LossPlan(action_mode, False, action_mode == "both", False, True, 1e-4, "root_subsegments_root_tokens")


def trainer_settings(mode: Mode, batch: int) -> VLATrainerSettings:
    return VLATrainerSettings(
        mode=mode,
        lora=PolicyLoraSettings() if mode == "lora" else None,
        gradient_checkpointing=True,
        max_steps=UPDATES,
        batch_size=batch,
        micro_batch_size=batch,
    )


def _micro_batch(config: MolmoAct2Config, batch: int, action_mode: ActionMode, packed: bool) -> PolicyMicroBatch:
    chosen = examples_of(config.model_dump(), batch, answers=action_mode != "continuous", trained=True)
    rows = [list(range(start, min(start + 4, batch))) for start in range(0, batch, 4)]
    made = pack(chosen, rows, 8, PAD) if packed else collate(chosen, "left", 8, PAD)
    draws = FlowSamples.per_example(range(batch), DRAWS, CHUNK, config)
    return PolicyMicroBatch(made, draws, sum(one.length for one in chosen))


def examples_of(raw: dict[str, Any], count: int, *, answers: bool, trained: bool) -> list[Example]:
    """Those of `benchmarks.policy_case`, with action tokens where there are `answers`, and actions if `trained`."""
    side = patches_of(raw)
    return [
        Example(
            input_ids=one["ids"],
            image_tokens=one["image_tokens"],
            pixel_values=one["pixels"],
            pooling=np.concatenate(
                [np.where(one["windows"] < 0, -1, one["windows"] + n * side**2) for n in range(IMAGES)]
            ),
            labels=one["labels"],
            actions=one["actions"] if trained else None,
            horizon_padding=np.zeros(CHUNK, bool) if trained else None,
            dimension_padding=np.arange(raw["max_action_dim"]) >= ACTIONS,
        )
        for one in examples(raw, count, answers=answers)
    ]


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _lent(device: torch.device) -> float | None:
    """GiB that the GPU has lent; torch gives none of it back by itself."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


if __name__ == "__main__":
    main(sys.argv[1:])
