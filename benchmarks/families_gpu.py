"""Trainer and vLLM in bf16 on one GPU, family by family: do their log-probs agree before and after steps and syncs?

Usage: python -m benchmarks.families_gpu [small] [at-once] FAMILY[+replay]..., for example qwen3.5 smolvlm
qwen3-vl-moe+replay. Each model has released widths where `attention_gpu` knows them, four layers, a small vocabulary
and random weights. A run plays conversations of two turns with three images of odd sizes on a real server, makes three
steps and syncs, and prints the check before the first step and each step's mismatch KL. `+replay` has the server
return its experts. `at-once` runs all families at the same time. `small` runs on a CPU. Results go to
$OUT/families.json as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.conversion_mapping import get_model_conversion_mapping

from armature.components.artifacts.images import encode_png
from armature.components.configuration import build_recipe
from armature.components.configuration.stages import STAGES, TerminalEvents, run_stage
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.contracts.stages import Artifact
from armature.components.environments.generated import GeneratedEnvironment
from armature.components.models.load import save_checkpoint
from armature.components.models.tiny.build import make_tiny_checkpoint
from benchmarks.attention_gpu import CUDA, GEOMETRIES, made
from benchmarks.rl_step_case import make_image, reward
from benchmarks.step_case import need_gpu

STEPS, GROUPS, ANSWERS, TOKENS = 3, 8, 8, 96
"""Steps of a run, conversations' tasks in a step, conversations of a task, and most tokens of an answer."""
SIZES = ((452, 300), (170, 395), (333, 333))
"""Width and height in pixels of the images: two in the first turn, one in the second."""


class NoSettings(Settings):
    """The environment has no settings."""


class TwoTurns(GeneratedEnvironment[NoSettings]):
    """Conversations of two turns with three images of odd sizes."""

    name = "two-turns"
    Settings = NoSettings
    max_turns = 2

    def __init__(self, settings: NoSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.reward_weights = {"given": 1.0}

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        return {"image": 3 * index}

    def episode(self, task: Task) -> TwoTurnsEpisode:
        return TwoTurnsEpisode(task.payload["image"])


class TwoTurnsEpisode:
    """An episode of `TwoTurns`."""

    def __init__(self, number: int) -> None:
        sizes = SIZES if CUDA else tuple((width // 4, height // 4) for width, height in SIZES)
        shown = [make_image(448, number + index).resize(size) for index, size in enumerate(sizes)]
        self.images: list[Image.Image] = shown
        self.turn = 0

    async def reset(self) -> Observation:
        return Observation((*map(encode_png, self.images[:2]), "What differs?"))

    async def step(self, action: str) -> Outcome:
        self.turn += 1
        if self.turn == 1:
            return Outcome(Observation((encode_png(self.images[2]), "And here?")), {"given": reward(action)})
        return Outcome(None, {"given": reward(action)})

    async def close(self) -> None:
        pass


class KeptEvents(TerminalEvents):
    """Events that keep messages and the metrics of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.messages, self.rows = list[str](), list[Mapping[str, float]]()

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        pass

    def message(self, text: str) -> None:
        super().message(text)
        self.messages.append(text)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append(dict(values))


def write_model(family: str, folder: Path, small: bool) -> None:
    """Write a checkpoint of `family` with random weights, in bf16 on a GPU."""
    if small or family not in GEOMETRIES:
        make_tiny_checkpoint(family, folder)
        return
    model, processor = made(family, small)
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    save_checkpoint(model, processor, folder)


def run(family: str, replay: bool, small: bool, folder: Path) -> dict[str, Any]:
    """Train a model of `family` for `STEPS` steps beside its server, and return what was compared."""
    model, dtype = folder / "model", "bfloat16" if CUDA else "float32"
    write_model(family, model, small)
    torch.cuda.empty_cache()
    length = 2048 if small else 4096
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": 4 * 1024**3,
        "gpu_memory_utilization": 0.1,
        "enforce_eager": True,
    }
    if family.startswith("qwen3.5"):
        arguments["gdn_prefill_backend"] = "triton"  # FlashInfer's kernel is compiled at the first request
    values: dict[str, Any] = {
        "model": {"source": str(model), "dtype": dtype},
        "environment": {
            "name": "benchmarks.families_gpu:TwoTurns",
            "train_tasks": GROUPS * (STEPS + 1),
            "heldout_tasks": 1,
        },
        "inference": {"max_model_len": length, "dtype": dtype, "max_images_per_prompt": 3, "replay_experts": replay},
        "rollouts": {
            "groups_per_step": 2 if small else GROUPS,
            "group_size": ANSWERS,
            "sampling": {"max_tokens": 8 if small else TOKENS},
        },
        "batches": {"max_sequence_tokens": length, "skip_zero_advantage": False, "penalty": {"format": 0.0}},
        "trainer": {
            "learning_rate": 1e-4,
            "max_steps": STEPS,
            "save_every": STEPS,
            "packing": True,
            "max_tokens_per_micro_batch": 16_384,
            "weights": dtype,
        },
        "preflight": {"max_mismatch_kl": 1.0, "step_mismatch": "warn"},
        "evaluation": {"sampling": {"max_tokens": 8}},
        "machine": {
            "store": str(folder / "store"),
            "threads": 0 if CUDA else 1,
            "trainer": {"gpus": [0] if CUDA else []},
            "servers": {
                "python": os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python"),
                **({"gpus": [[0]], "arguments": arguments} if CUDA else {}),
            },
        },
    }
    recipe = build_recipe("train-vlm/two-turns", values, __file__)
    machine = recipe.sections["machine"]
    assert isinstance(machine, Machine)
    events, artifacts = KeptEvents(), dict[str, Artifact]()
    for kind in ("tasks", "model", "train-vlm"):
        stage = STAGES[kind]
        inputs = {key: artifacts[key] for key in stage.inputs}
        artifacts[kind] = run_stage(kind, recipe.settings_for(stage.settings), inputs, machine, events)
    names = ("mismatch_kl", "experts/other_fraction", "tokens/completion", "grad_norm")
    shown = {name: [row[name] for row in events.rows if name in row] for name in names}
    return {"family": family, "replay": replay, "messages": events.messages, **shown}


def measured(name: str, small: bool, out: Path) -> dict[str, Any]:
    """Run one family in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.families_gpu", "--child", name, str(out)]
    command += ["small"] if small else []
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        return {"family": name, "failed": done.stdout[-6000:]}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main(words: list[str]) -> None:
    if words[:1] == ["--child"]:
        family, _, replay = words[1].partition("+")
        with tempfile.TemporaryDirectory() as scratch:
            result = run(family, replay == "replay", words[3:] == ["small"], Path(scratch))
        Path(words[2]).write_text(json.dumps(result))
        return
    small, at_once = "small" in words, "at-once" in words
    names = [word for word in words if word not in ("small", "at-once")]
    if not names:
        raise SystemExit(__doc__)
    if not small:
        need_gpu("python -m benchmarks.families_gpu small FAMILY")
    results, failed = [], False
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(names) if at_once else 1) as pool:
        waiting = [pool.submit(measured, name, small, Path(scratch) / f"{index}") for index, name in enumerate(names)]
        for name, one in zip(names, waiting, strict=True):
            result = one.result()
            results.append(result)
            failed |= "failed" in result
            print(f"--- {name}", result.get("failed") or "\n".join(result["messages"]), sep="\n", flush=True)
            print({key: value for key, value in result.items() if key not in ("messages", "failed")}, flush=True)
    if "OUT" in os.environ:
        device = torch.cuda.get_device_name() if CUDA else "cpu"
        document = {"device": device, "torch": torch.__version__, "results": results}
        Path(os.environ["OUT"], "families.json").write_text(json.dumps(document, indent=1))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
