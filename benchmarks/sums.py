"""Do released weights learn, and as fast as with TRL? SmolLM2-135M-Instruct learns sums by GRPO, with three seeds.

Ours is the recipe `train-vlm/smollm2-sums`; TRL has the same weights, questions, reward, batch, learning rate and
number of steps. Every few steps both answer the same held-out questions, sampled at temperature 1.

Usage: python -m benchmarks.sums [at-once] [WAY...], a way being SIDE,SEED such as ours,0 or trl,0; `at-once` runs all
ways at the same time. On a CPU it asks few questions, to see that it runs. Results go to $OUT/sums.json, curves to
$OUT/sums.png. ARMATURE_TEST_VLLM_PYTHON and ARMATURE_TRL_PYTHON name the Pythons that have vLLM and TRL.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from armature.components.configuration import Recipe, load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.environments.make import make_environment
from armature.components.environments.reasoning_gym import ReasoningGym
from armature.components.evaluation.wilson import wilson_interval
from armature.components.models.gguf import model_source
from armature.components.models.load import load_processor

CUDA = torch.cuda.is_available()
HERE, NAME = Path(__file__).parent, "train-vlm/smollm2-sums"
WAYS = tuple(f"{side},{seed}" for seed in range(3) for side in ("ours", "trl"))


@dataclass(frozen=True)
class Sizes:
    """Sizes that differ from the recipe's; a CPU has smaller ones."""

    steps: int = 100 if CUDA else 2
    every: int = 10 if CUDA else 1
    heldout: int = 1024 if CUDA else 8
    train: int = 4096 if CUDA else 16
    groups: int = 16 if CUDA else 2

    def recipe(self, seed: int = 0, store: str = "") -> Recipe:
        """Return the recipe with these sizes. Its server takes little of a GPU, which several runs may share."""
        values = {
            "environment.train_tasks": self.train,
            "environment.heldout_tasks": self.heldout,
            "rollouts.groups_per_step": self.groups,
            "rollouts.seed": seed,
            "trainer.seed": seed,
            "trainer.max_steps": self.steps,
            "trainer.save_every": self.steps,
            "evaluation.every": self.every,
            "evaluation.heldout_tasks": self.heldout,
            "machine.servers.python": os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python"),
            "machine.limits.generation_timeout": 300.0,
        }
        values |= {"machine.store": store} if store else {}
        if CUDA:
            values |= {"machine.servers.gpus": [[0]], "machine.trainer.gpus": [0]}
            arguments = {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 2 * 1024**3}
            values |= {f"machine.servers.arguments.{name}": value for name, value in arguments.items()}
        return load_recipe(NAME, [f"{key}={json.dumps(value)}" for key, value in values.items()])


SIZES = Sizes()


def ours(seed: int, folder: Path) -> dict[str, Any]:
    """Train by the recipe's stages."""
    recipe = SIZES.recipe(seed, str(folder / f"store-{seed}"))
    machine, made = recipe.sections["machine"], dict[str, Artifact]()
    assert isinstance(machine, Machine)
    for kind in ("tasks", "model", "train-vlm"):
        stage = STAGES[kind]
        inputs = {key: made[key] for key in stage.inputs}
        made[kind] = run_stage(kind, recipe.settings_for(stage.settings), inputs, machine)
    history = json.loads((made["train-vlm"].path / "history.json").read_text())
    return {
        "accuracy": {row["step"]: row["heldout/accuracy"] for row in history if "heldout/accuracy" in row},
        "seconds": [row["timing/step"] for row in history if "timing/step" in row],
        "mismatch_kl": max(row["mismatch_kl"] for row in history if "mismatch_kl" in row),
    }


def write_for_trl(folder: Path) -> None:
    """Write the language model, its tokenizer, and all questions with their answers to `folder`, for TRL."""
    from transformers import LlamaForCausalLM, SmolVLMForConditionalGeneration

    recipe = SIZES.recipe()
    source = model_source(recipe.sections["model"].source)  # type: ignore[attr-defined]
    whole = SmolVLMForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    text = LlamaForCausalLM(whole.config.text_config)
    text.model.load_state_dict(whole.model.text_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    text.generation_config = whole.generation_config
    text.save_pretrained(folder / "model")
    processor = load_processor(source, recipe.sections["model"])  # type: ignore[arg-type]
    processor.tokenizer.chat_template = processor.chat_template
    processor.tokenizer.save_pretrained(folder / "model")
    environment = make_environment(recipe.sections["environment"])  # type: ignore[arg-type]
    assert isinstance(environment, ReasoningGym)
    tasks: dict[str, tuple[list[Any], list[str]]] = {"train": ([], []), "heldout": ([], [])}
    for split, (chats, answers) in tasks.items():
        for task in environment.tasks(split):  # type: ignore[arg-type]
            (question,) = asyncio.run(environment.episode(task).reset()).content
            chats.append([{"role": "user", "content": question}])
            answers += environment.demonstration(task)
    (folder / "tasks.json").write_text(json.dumps(tasks))


def theirs(seed: int, folder: Path) -> dict[str, Any]:
    """Train by TRL in a process of its own."""
    recipe, out = SIZES.recipe(), folder / f"trl-{seed}.json"
    rollouts, trainer = recipe.sections["rollouts"], recipe.sections["trainer"]
    options = {"steps": SIZES.steps, "every": SIZES.every, "groups": SIZES.groups}
    options |= {"size": rollouts.group_size, "tokens": rollouts.sampling.max_tokens}  # type: ignore[attr-defined]
    options |= {"learning_rate": trainer.learning_rate}  # type: ignore[attr-defined]
    python = os.environ.get("ARMATURE_TRL_PYTHON", str(HERE.parent / ".venv-trl/bin/python"))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [python, str(HERE / "sums_trl.py"), str(folder), str(out), str(seed), json.dumps(options)]
    subprocess.run(command, env=environment, check=True)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def measured(way: str, folder: Path) -> dict[str, Any] | None:
    """Run one way in a process of its own; return None if it fails."""
    out = folder / f"{way}.json"
    command = [sys.executable, "-m", "benchmarks.sums", "--child", way, str(folder), str(out)]
    environment = os.environ | {"VLLM_CACHE_ROOT": str(folder / f"vllm-{way}")}
    if subprocess.run(command, env=environment).returncode:
        print(f"{way}: failed", flush=True)
        return None
    result = {"way": way} | json.loads(out.read_text())
    print(line_of(result), flush=True)
    return result


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Draw the held-out accuracy of each side over steps and over training seconds: the seeds and their mean."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.4), layout="constrained")
    for axes, over in zip(figure.subplots(1, 2, sharey=True), ("steps", "seconds of training"), strict=True):
        for number, side in enumerate(sorted({result["way"].split(",")[0] for result in results})):
            curves = [result for result in results if result["way"].split(",")[0] == side]
            steps = [int(step) for step in curves[0]["accuracy"]]
            places = [[step if over == "steps" else sum(one["seconds"][:step]) for step in steps] for one in curves]
            rates = [list(one["accuracy"].values()) for one in curves]
            for place, rate in zip(places, rates, strict=True):
                axes.plot(place, rate, color=f"C{number}", alpha=0.3)
            mean = [[sum(column) / len(column) for column in zip(*rows, strict=True)] for rows in (places, rates)]
            axes.plot(*mean, color=f"C{number}", label=f"{side}, {len(curves)} seeds")
        axes.set(xlabel=over, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.axes[0].set_ylabel("accuracy on held-out sums")
    figure.savefig(file, dpi=100)


def line_of(result: dict[str, Any]) -> str:
    shown = {}
    for step, share in result["accuracy"].items():
        interval = wilson_interval(round(share * SIZES.heldout), SIZES.heldout)
        shown[step] = f"{share:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
    return f"{result['way']}: {shown}, {sum(result['seconds']):.0f} s"


def main(words: list[str]) -> None:
    if words[:1] == ["--child"]:
        way, folder, out = words[1:]
        side, seed = way.split(",")
        result = {"ours": ours, "trl": theirs}[side](int(seed), Path(folder))
        Path(out).write_text(json.dumps(result))
        return
    at_once, ways = "at-once" in words, [word for word in words if word != "at-once"] or WAYS
    results = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(ways) if at_once else 1) as pool:
        write_for_trl(Path(name))
        for done in as_completed([pool.submit(measured, way, Path(name)) for way in ways]):
            if (result := done.result()) is not None:
                results.append(result)
                out = Path(os.environ.get("OUT", "."))
                (out / "sums.json").write_text(json.dumps(results, indent=1) + "\n")
                draw(results, out / "sums.png")


if __name__ == "__main__":
    main(sys.argv[1:])
