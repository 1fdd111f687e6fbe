"""The same updates by one GPU and by two: what `machine.trainer.processes = 2` gains.

Usage: python -m benchmarks.scaling_gpu [small] [plain] [reshard] [one] [full] [copies] [A] [B] [C]: the sides and the
cases, by default `one`, `full` and all cases. `full` splits the model over the ranks, as several GPUs do by default;
`copies` has all of it on each (`machine.trainer.sharding = "none"`). `plain`: layers are not compiled. `reshard`:
`full` gathers weights for the backward pass again. Rows of a case with equal norms did the same work. The rows go to
$OUT/scaling.json as well. `small` runs two ranks on a CPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForImageTextToText, AutoProcessor

from armature.components.artifacts.images import ImageStore
from armature.components.families.family import family_of
from armature.components.machine.resources import exempt_from_collection
from armature.components.models.adapters import get_adapter
from armature.components.models.attention import apply_image_attention
from armature.components.models.load import RECOMPUTATION
from armature.components.models.varlen import choose_kernels
from armature.components.training.processes import TrainerProcesses, private_folder
from armature.components.training.ranks import Ranks, joined
from armature.components.training.sharding import blocks, sharder
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import MicroBatchLoader
from benchmarks.step_case import Case, clean, make_model, model_config, need_gpu, sync
from benchmarks.step_gpu import make_processor
from benchmarks.step_ours import samples_of, settings_of

CUDA = torch.cuda.is_available()
SIDES = ("one", "full", "copies")
CASES = ("B", "C", "A")
STEPS = 4
TOKENS = 70_000
"""Largest number of tokens in a micro-batch. It is chosen such that one rank needs one micro-batch for each case."""
LIMIT = 420.0
"""Largest number of seconds that one side may take."""


def processes_of(side: str) -> TrainerProcesses:
    n = 1 if side == "one" else 2
    return TrainerProcesses(
        processes=n,
        gpus=tuple(range(n)) if CUDA else (),
        sharding="full" if side == "full" else None,
        threads=0 if CUDA else 1,
        rank_timeout=LIMIT,
    )


def learner_of(folder: Path, words: set[str], processes: TrainerProcesses, ranks: Ranks) -> Learner:
    """Return a learner with the model that the trainer's worker would make. Its weights are random instead of read from
    a checkpoint."""
    settings = settings_of(TOKENS, {"packing", "bf16"} | (set() if "plain" in words else {"compile"}))
    small = "small" in words
    device, sharded = str(ranks.device), processes.sharding is not None
    made = make_model(folder, "sdpa", device, small) if ranks.first or not sharded else None
    if sharded:
        with init_empty_weights(include_buffers=False):
            config = model_config(folder, small)
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    else:
        model = made
    choose_kernels(model)
    apply_image_attention(model)
    model.gradient_checkpointing_enable(RECOMPUTATION)
    shard = None
    if sharded:
        weights = None if made is None else {f"model.{name}": value for name, value in made.state_dict().items()}
        units = partial(blocks, family=family_of(model.config), dtype=torch.bfloat16)
        methods = ["next_tokens", "own_logits"]
        keep = "reshard" not in words
        shard = sharder(ranks, processes.copies, units, weights, cast_inputs=True, methods=methods, keep=keep)
    return Learner(model, settings, temperature=1.0, ranks=ranks, shard=shard)


def measured(
    case: Case, learner: Learner, loader: MicroBatchLoader, store: ImageStore, adapter: Any, processor: Any
) -> dict[str, Any]:
    ranks = learner.ranks
    samples = samples_of(case, adapter, store, case.prompt(processor, case.question(processor)))
    with loader.batch():
        scores = learner.score(samples, loader)
        ours = [replace(one, behavior_logprobs=values) for one, values in zip(samples, scores, strict=True)]
        whole = list(loader(learner.plan(ours, range(len(ours)))))

    def step() -> dict[str, float]:
        return learner.step(ours, lambda plan: iter(whole))

    def timed() -> tuple[float, dict[str, float]]:
        ranks.gather(None)  # they begin together
        sync()
        began = time.perf_counter()
        report = step()
        sync()
        return max(ranks.gather(time.perf_counter() - began)), report

    clean()
    first, report = timed()
    exempt_from_collection()  # as a trainer does after its first steps
    later = [timed() for _ in range(STEPS)]
    result: dict[str, Any] = {
        "case": case.name,
        "norm": report["grad_norm"],
        "mismatch_kl": report["mismatch_kl"],
        "first_s": first,
        "tokens": ranks.gather(sum(len(batch.packing.rows) for _, batch in whole)),
        "images": ranks.gather(sum(len(batch.packing.image_tokens) for _, batch in whole)),
        "micro_batches": len(whole),
        "seconds": [seconds for seconds, _ in later],
        "peak_gib": ranks.gather(later[-1][1]["memory/peak_gib"]),
    }
    return result | ({"gpu_ms": ranks.gather(on_gpu(step))} if CUDA else {})


def on_gpu(step: Callable[[], Any]) -> dict[str, float]:
    """Profile one step. Return the milliseconds of kernels that compute, the milliseconds of NCCL's kernels (which
    include waiting for the other rank), and the milliseconds in which only NCCL ran. The profiler slows the host down,
    so `wall` is longer than for other steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        began = time.perf_counter()
        step()
        sync()
        wall = 1e3 * (time.perf_counter() - began)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer."):
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    busy, computing = covered(spans[True] + spans[False]), covered(spans[False])
    return {"wall": wall, "computing": computing, "nccl": covered(spans[True]), "nccl_alone": busy - computing}


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of time spans, in milliseconds. The spans are in microseconds."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def rank(folder: Path, out: Path, side: str, words: set[str]) -> None:
    """Do the work of one process of a side."""
    processes = processes_of(side)
    with joined(processes, seed=0) as ranks, tempfile.TemporaryDirectory() as scratch:
        processor = AutoProcessor.from_pretrained(folder)
        store = ImageStore(Path(scratch) / "images")
        adapter = get_adapter("qwen2_5_vl", processor, store.open)
        loader = MicroBatchLoader(adapter.collator, store, workers=0)
        learner = learner_of(folder, words, processes, ranks)
        for name in (case for case in CASES if case in words):
            result = measured(Case(folder, name, "small" in words), learner, loader, store, adapter, processor)
            if ranks.first:
                print(json.dumps({"side": side} | result), flush=True)
                with out.open("a") as file:
                    file.write(json.dumps({"side": side} | result) + "\n")


def compared(rows: list[dict[str, Any]]) -> None:
    print(f"{'case':<6}{'side':<9}{'ms':>8}{'gain':>7}  {'norm':<10}{'peak GiB':>9}  tokens of the ranks")
    for name in CASES:
        ms = {row["side"]: 1e3 * statistics.median(row["seconds"]) for row in rows if row["case"] == name}
        for row in (row for row in rows if row["case"] == name):
            row["gain"] = ms["one"] / ms[row["side"]] if "one" in ms else None
            gain = f"{row['gain']:.3f}" if row["gain"] else "-"
            numbers = f"{ms[row['side']]:>8.0f}{gain:>7}  {row['norm']:<10.6f}{max(row['peak_gib']):>9.2f}"
            print(f"{name:<6}{row['side']:<9}{numbers}  {row['tokens']}")


def main(words: list[str]) -> None:
    if unknown := set(words) - {"small", "plain", "reshard", *SIDES, *CASES}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}\n{__doc__}")
    sides = [side for side in SIDES if side in words] or ["one", "full"]
    if CUDA and torch.cuda.device_count() < 2 and sides != ["one"]:
        raise SystemExit(f"{' and '.join(set(sides) - {'one'})} need two GPUs, and there is one: say `one` alone")
    small = "small" in words
    if not small:
        need_gpu("python -m benchmarks.scaling_gpu small")
    words += () if set(words) & set(CASES) else CASES
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = make_processor("qwen2.5-vl", Path(scratch) / "model", small=small), Path(scratch) / "out"
        for side in sides:
            arguments = ["-m", "benchmarks.scaling_gpu", "rank", folder, out, side, *words]
            rendezvous = private_folder(Path(scratch) / "rendezvous")
            environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1"}
            program = processes_of(side).start(arguments, rendezvous=rendezvous, log=None, env=environment)
            try:
                if code := program.wait(LIMIT):
                    print(f"{side} ended with exit code {code}", flush=True)
            except subprocess.TimeoutExpired:
                print(f"{side} took more than {LIMIT:g} s", flush=True)
            finally:
                program.stop()
            if out.exists():
                rows = [json.loads(line) for line in out.read_text().splitlines()]
                compared(rows)
                save(rows)


def save(rows: list[dict[str, Any]]) -> None:
    if "OUT" in os.environ:
        device = torch.cuda.get_device_name() if CUDA else "cpu"
        document = {"device": device, "torch": torch.__version__, "rows": rows}
        Path(os.environ["OUT"], "scaling.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], set(sys.argv[5:]))
    else:
        main(sys.argv[1:])
