"""A whole RL step of a vision-language model of 3.75 B weights on one GPU: rollouts, update, weights to the sampler.

Ours is the stage `train-vlm` as a recipe would run it, with a vLLM server on the same GPU; TRL has vLLM in its process.
Each has the same checkpoint, images, question, reward and share of the GPU for its sampler, and TRL its best settings
(see `benchmarks.step_gpu`). Each way in processes of its own, as many ways at once as there are GPUs.

Usage: python -m benchmarks.rl_step_gpu [WAY...], of `OURS` and `TRL`, each as often as it is named; of a small model on
a CPU. All ways on a GPU go to the page, some to $OUT/rl-step.json. ARMATURE_TEST_VLLM_PYTHON names the Python that has
vLLM, ARMATURE_TRL_PYTHON the one that has TRL and vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from transformers import AutoProcessor
from transformers.conversion_mapping import get_model_conversion_mapping

from armature.components.artifacts.images import encode_png
from armature.components.configuration import build_recipe
from armature.components.configuration.stages import STAGES, TerminalEvents, run_stage
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact
from armature.components.environments.generated import GeneratedEnvironment
from armature.components.machine.resources import visible_devices
from armature.components.models.load import save_checkpoint
from armature.components.models.tiny.build import SMALL, make_tiny_checkpoint
from benchmarks.rl_step_case import (
    LEARNING_RATE,
    MODEL_LENGTH,
    SERVER_SHARE,
    TEMPERATURE,
    fill_vocabulary,
    make_image,
    reward,
)
from benchmarks.step_case import GROUP_SIZE, GROUPS, Case, clean, make_model

CUDA = torch.cuda.is_available()
HERE = Path(__file__).parent
STEPS, ROUNDS = 8, 3
LAPS = {"ours": ("timing/wait_for_rollouts", "timing/sync"), "trl": ("generate", "sync_weights")}
LONG, EVERY = 6.0, 8
"""In cases with uneven episodes, judging takes `LONG` seconds for the answers to one of `EVERY` tasks, as with a
simulator."""
TRL = ("16,0,0", "16,1,0", "16,0,1")
"""Variants of TRL, fastest first. TRL is fastest if it keeps activations, and if its correction is off, since it then
need not score sampled tokens."""


@dataclass(frozen=True)
class Way:
    """Variant of our training. `max_staleness` is the number of steps by which rollouts may be ahead. `seconds` is the
    time for judging the answers to one of `EVERY` tasks.

    quantization: of the server; log-probs are then corrected for.
    """

    max_staleness: int = 0
    in_flight_updates: bool = False
    seconds: float = 0.0
    quantization: str | None = None


OURS = {
    "in turn": Way(),
    "one step ahead": Way(1),
    "in flight": Way(4, True),
    "fp8, in turn": Way(quantization="fp8"),
    "uneven, in turn": Way(seconds=LONG),
    "uneven, in flight": Way(4, True, LONG),
}


class GivenSettings(Settings):
    """Settings of `Given`: the question, the width of its images in pixels, and `Way.seconds`."""

    question: str
    side: int
    seconds: float


class Given(GeneratedEnvironment[GivenSettings]):
    """Environment whose episodes have one image, one question and one answer."""

    name = "given"
    Settings = GivenSettings
    max_turns = 1

    def __init__(self, settings: GivenSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.reward_weights = {"given": 1.0}
        self._encoded = cache(lambda number: encode_png(make_image(settings.side, number)))  # as a dataset has them

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"image": index}

    def episode(self, task: Task) -> GivenEpisode:
        number = task.payload["image"]
        seconds = 0.0 if number % EVERY else self.settings.seconds
        return GivenEpisode(self._encoded(number), self.settings.question, seconds)


@dataclass
class GivenEpisode:
    image: EncodedImage
    question: str
    seconds: float

    async def reset(self) -> Observation:
        return Observation((self.image, self.question))

    async def step(self, action: str) -> Outcome:
        await asyncio.sleep(self.seconds)
        return Outcome(None, {"given": reward(action)})

    async def close(self) -> None:
        pass


class Enough(Exception):
    """Raised to end a run after the requested number of steps."""


class Noted(TerminalEvents):
    """Events that keep the metrics of each step and end the run after `steps` steps. Progress bars are not shown."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.rows = steps, list[Mapping[str, float]]()

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        pass

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append(dict(values))
        if step == self.steps:
            raise Enough


def checkpoint(folder: Path) -> str:
    """Write a model with random weights to `folder`: with the sizes of the 3B model on a GPU, else a small one. Return
    the question for its images."""
    settings = SMALL.model_copy(update={"image_side": 448 if CUDA else 112, "max_positions": 32_768})
    make_tiny_checkpoint("qwen2.5-vl", folder, 0, settings)
    model = make_model(folder, "sdpa", "cuda" if CUDA else "cpu", not CUDA)
    fill_vocabulary(folder, model.config.get_text_config().vocab_size)
    processor = AutoProcessor.from_pretrained(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    save_checkpoint(model.to(torch.bfloat16 if CUDA else torch.float32), processor, folder)
    question = Case(folder, "A", not CUDA).question(processor)
    del model
    clean()
    return question


def ours(folder: Path, question: str, name: str, store: Path) -> dict[str, Any]:
    way, dtype = OURS[name], "bfloat16" if CUDA else "float32"
    values: dict[str, Any] = {
        "model": {"source": str(folder), "dtype": dtype, "gradient_checkpointing": "auto"},
        "environment": {
            "name": "benchmarks.rl_step_gpu:Given",
            "args": {"question": question, "side": side(), "seconds": way.seconds},
            "train_tasks": GROUPS * (STEPS + 1),
            "heldout_tasks": 1,
        },
        "inference": {"max_model_len": MODEL_LENGTH, "dtype": dtype, "quantization": way.quantization},
        "rollouts": {
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "sampling": {"max_tokens": sampled(), "temperature": TEMPERATURE},
            "max_staleness": way.max_staleness,
            "in_flight_updates": way.in_flight_updates,
        },
        "batches": {
            "advantage": {"name": "group_mean", "scale": "none"},
            "penalty": {"format": 0.0, "inadmissible": 0.0},
            "skip_zero_advantage": False,
            "max_sequence_tokens": MODEL_LENGTH,
        },
        "trainer": {
            "objective": {"name": "ppo"},
            "correction": {"mode": "none" if way.quantization is None else "truncate"},
            "learning_rate": LEARNING_RATE,
            "max_steps": 1000,
            "save_every": 1000,
            "max_tokens_per_micro_batch": 24_000 if CUDA else 2000,
            "packing": True,
            "logprobs": {"name": "triton" if CUDA else "torch", "chunk_tokens": 2048},
            "weights": dtype,
            "torch_compile": CUDA,
        },
        "preflight": {"groups": 1, "max_mismatch_kl": 0.05 if way.quantization is None else 0.2},
        "evaluation": {"sampling": {"max_tokens": sampled()}},
        "machine": {
            "store": str(store),
            "threads": 0 if CUDA else 1,
            "trainer": {"loader_workers": 4, "gpus": [0] if CUDA else []},
            "servers": {
                "python": os.environ["ARMATURE_TEST_VLLM_PYTHON"],
                "gpus": [[0]],
                "weight_transfer": "ipc",
                "arguments": {"gpu_memory_utilization": SERVER_SHARE},
            }
            if CUDA
            else {},
        },
    }
    recipe = build_recipe("train-vlm/given", values, __file__)
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    events, made = Noted(STEPS + 1), dict[str, Artifact]()
    try:
        for kind in ("tasks", "model", "train-vlm"):
            stage = STAGES[kind]
            inputs = {key: made[key] for key in stage.inputs}
            made[kind] = run_stage(kind, recipe.settings_for(stage.settings), inputs, machine, events)
    except Enough:
        pass
    rows = events.rows[1:]
    laps = (*LAPS["ours"], "timing/batch", "timing/train")
    return {
        "side": "ours",
        "way": name,
        "seconds": [row["timing/step"] for row in rows],
        "sampled": [row["tokens/completion"] * GROUPS * GROUP_SIZE for row in rows],
        "norms": [row["grad_norm"] for row in events.rows],
        "kl": [row["mismatch_kl"] for row in rows],
        "laps": {lap: [row[lap] for row in rows] for lap in laps},
        "peak_gib": rows[-1].get("memory/peak_gib", 0.0),
    }


def side() -> int:
    """Return the width of an image in pixels."""
    return 448 if CUDA else 112


def sampled() -> int:
    """Return the largest number of tokens in an answer."""
    return 256 if CUDA else 16


def measure(ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure these ways. Yield the result of each way as soon as it is available.

    Raises:
        SystemExit: some failed; the others are measured first.
    """
    failed = []
    gpus = torch.cuda.device_count() if CUDA else 1
    free = SimpleQueue[int]()
    for gpu in range(gpus):
        free.put(gpu)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(gpus) as pool:
        folder = Path(name) / "model"
        question = checkpoint(folder)

        def one(way: str) -> dict[str, Any]:
            gpu = free.get()
            try:
                return measured(way, folder, question, gpu)
            finally:
                free.put(gpu)

        for done in as_completed([pool.submit(one, way) for way in ways]):
            taken = done.result()
            if "failed" in taken:
                failed.append(f"{taken['way']}: {taken['failed']}")
                print(failed[-1], flush=True)
                continue
            print(line_of(taken), flush=True)
            yield taken
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


def measured(way: str, folder: Path, question: str, gpu: int) -> dict[str, Any]:
    """Measure one way on one GPU, in a process of its own, and return the result."""
    environment = dict(os.environ)
    if CUDA:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices([gpu])
        environment["VLLM_CACHE_ROOT"] = str(folder.parent / f"vllm-{gpu}")
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        if way in OURS:
            command = [sys.executable, "-m", "benchmarks.rl_step_gpu", "--child", str(folder), str(out), question, way]
        else:
            python = os.environ.get("ARMATURE_TRL_PYTHON", str(HERE.parent / ".venv-trl/bin/python"))
            environment |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "8"}
            environment |= {"TOKENIZERS_PARALLELISM": "false", "CUDA_SCALE_LAUNCH_QUEUES": "4x"}
            if CUDA:
                paths = [str(HERE / "flash_attention"), os.environ.get("PYTHONPATH", "")]
                environment["PYTHONPATH"] = os.pathsep.join(paths)
            sizes = [str(n) for n in (STEPS, GROUPS, GROUP_SIZE, side(), sampled())]
            command = [python, str(HERE / "rl_step_trl.py"), str(folder), str(out), *sizes, question, way]
        if code := subprocess.run(command, env=environment).returncode:
            return {"way": way, "failed": f"exit code {code}"}
        result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return result


def record() -> None:
    """Measure all ways `ROUNDS` times and write the results to the benchmark page."""
    from benchmarks.table import write

    began = time.perf_counter()
    rounds: list[dict[str, dict[str, Any]]] = [{} for _ in range(ROUNDS)]
    for one in measure([*OURS, *TRL] * ROUNDS):
        next(taken for taken in rounds if one["way"] not in taken)[one["way"]] = one
    rows = [row for number, taken in enumerate(rounds, 1) for row in rows_of([*taken.values()], number)]
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    note = f"All rounds took {(time.perf_counter() - began) / 60:.0f} minutes."
    write("rl-step-gpu", device | {"rows": rows, "steps": STEPS, "note": note})


def rows_of(taken: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return a row for each way of one round, with the mean seconds of a step and of its parts. The row also says
    how many times as fast as TRL the way is. A way with uneven episodes is compared with our own `uneven, in turn`
    instead."""
    seconds = {one["way"]: statistics.mean(one["seconds"]) for one in taken}
    fastest = min(seconds[way] for way in TRL if way in seconds)
    rows = []
    for one in taken:
        ours, uneven = seconds[one["way"]], one["way"].startswith("uneven")
        rollouts, sync = (statistics.mean(one["laps"][name]) for name in LAPS[one["side"]])
        row = {"round": number, "side": one["side"], "way": one["way"], "seconds": ours}
        row |= {
            "tokens_per_s": statistics.mean(one["sampled"]) / ours,
            "rollouts_s": round(rollouts, 3),
            "sync_s": sync,
        }
        rows.append(row | {"ratio": (seconds["uneven, in turn"] if uneven else fastest) / ours})
    return rows


def line_of(one: Mapping[str, Any]) -> str:
    laps = ", ".join(f"{name} {statistics.mean(values):.2f}" for name, values in one["laps"].items())
    seconds = statistics.mean(one["seconds"])
    rate = statistics.mean(one["sampled"]) / seconds
    return f"{one['side']} {one['way']}: {seconds:.2f} s a step, {rate:,.0f} sampled tokens/s ({laps})"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        folder, out, question, way = sys.argv[2:]
        Path(out).write_text(json.dumps(ours(Path(folder), question, way, Path(out).parent / "store")) + "\n")
        return
    if CUDA and not sys.argv[1:]:
        record()
        return
    ways = sys.argv[1:] or [*(way for way in OURS if OURS[way].quantization is None), *TRL]
    if unknown := [way for way in ways if way not in (*OURS, *TRL)]:
        raise SystemExit(f"{unknown[0]!r} is none of {', '.join([*OURS, *TRL])}")
    taken = []
    for one in measure(ways):
        taken.append(one)
        (Path(os.environ.get("OUT", ".")) / "rl-step.json").write_text(json.dumps(taken, indent=1) + "\n")


if __name__ == "__main__":
    main()
