"""Supervised and preference training on conversations with images on one GPU, ours and TRL's, on the same rows.

A model of Qwen2.5-VL-3B's sizes with random weights. Each row has an image of its own, so nothing is shared; a pair of
answers shares its prompt. Ours is the stage `sft`. TRL runs in `.venv-trl` or in the Python that ARMATURE_TRL_PYTHON
names, with bf16, Liger's layers, FlashAttention 2 and its fastest micro-batch. Both keep activations, and both
recompute them.

Usage: python -m benchmarks.sft_gpu [WAY...], a way being METHOD,SIDE,RECOMPUTE,SIZE such as sft,ours,0,24000 (tokens of
a micro-batch) or dpo,trl,1,8 (rows of it); on a CPU of a small model. Results go to $OUT/sft.json as well.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from armature.components.configuration.stages import run_stage
from armature.components.contracts.machine import Machine, MachineTrainer
from armature.components.models.settings import ModelSettings
from armature.components.vlm.settings import SupervisedSettings
from armature.components.vlm.sft.fit import EpochSampler
from armature.components.vlm.sft.settings import (
    ConversationSettings,
    ConversationsStageSettings,
    DPOSettings,
    PairColumns,
    SupervisedStageSettings,
)
from benchmarks.rl_step_case import make_image
from benchmarks.rl_step_gpu import CUDA, HERE, checkpoint, side

ROWS_PER_STEP, STEPS, UNTIMED = (32, 8, 2) if CUDA else (4, 3, 1)
ANSWER = (64, 1024) if CUDA else (8, 32)
"""Least and most characters of an answer; most are one token."""
LEARNING_RATE, EPSILON, BETA = 1e-6, 1e-8, 0.1
WAYS = tuple(
    f"{method},{way}"
    for method in ("sft", "dpo")
    for way in ("ours,0,12000", "trl,0,8", "trl,0,16", "ours,1,24000", "trl,1,8", "trl,1,16")
)
TEMPLATE = (
    "{% for m in messages %}{% if not loop.first %}\n{% endif %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'][0]['text'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
)
"""A chat template whose markers say to both sides which tokens are trained on."""


def units(method: str) -> int:
    """Return the number of rows of a step. A row of `dpo` has two answers."""
    return ROWS_PER_STEP if method == "sft" else ROWS_PER_STEP // 2


def rows(method: str) -> datasets.Dataset:
    """Return a step's rows for each step: an image, a question, and one answer or a pair of answers."""
    rng = np.random.default_rng(0)

    def said(role: str, least: int, most: int) -> list[dict[str, str]]:
        letters = rng.choice(list("abcdefghij klmnop"), rng.integers(least, most + 1))
        return [{"role": role, "content": "".join(letters).strip() or "a"}]

    table = []
    for number in range(units(method) * STEPS):
        row: dict[str, Any] = {"images": [make_image(side(), number)], "split": "train"}
        question = said("user", 40, 80)
        if method == "sft":
            row["messages"] = question + said("assistant", *ANSWER)
        else:
            row |= {"prompt": question, "chosen": said("assistant", *ANSWER), "rejected": said("assistant", *ANSWER)}
        table.append(row)
    message = [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
    features = {name: message for name in table[0] if name not in ("images", "split")}
    features |= {"images": datasets.List(datasets.Image()), "split": datasets.Value("string")}
    return datasets.Dataset.from_list(table, features=datasets.Features(features))


def in_our_order(table: datasets.Dataset, rows_of_step: int) -> datasets.Dataset:
    """Return the rows in the order in which the stage `sft` trains on them, for TRL."""
    plan = EpochSampler(list(range(len(table))), 1, rows_of_step, 0)  # type: ignore[arg-type]
    order: list[Any] = [row for step in range(1, plan.steps + 1) for row in plan.of(step)]
    return table.select(order).remove_columns("split")


def ours(method: str, recompute: bool, tokens: int, folder: Path) -> dict[str, Any]:
    """Run the stage `sft` on the rows in `folder`, and return its losses, norms, seconds and peak of memory."""
    dtype = "bfloat16" if CUDA else "float32"
    trainer = MachineTrainer(gpus=(0,) if CUDA else (), loader_workers=4 if CUDA else 0)
    machine = Machine(store=str(folder / "store"), trainer=trainer)
    model = ModelSettings.model_validate(
        {"source": str(folder / "model"), "dtype": dtype, "gradient_checkpointing": recompute}
    )
    source = {"source": str(folder / method), "images": ("images",), "split": {"by": "column"}}
    pairs, dpo = (None, None) if method == "sft" else (PairColumns(), DPOSettings(beta=BETA))
    data = ConversationsStageSettings(model=model, data=ConversationSettings.model_validate(source | {"pairs": pairs}))
    plan = SupervisedSettings.model_validate(
        {
            "learning_rate": LEARNING_RATE,
            "adam_epsilon": EPSILON,
            "max_sequence_tokens": 4096,
            "samples_per_step": units(method),
            "max_tokens_per_micro_batch": tokens,
            "logprobs": {"name": "triton" if CUDA else "torch", "chunk_tokens": 2048},
            "packing": True,
            "weights": dtype,
            "torch_compile": CUDA,
        }
    )
    inputs = {"model": run_stage("model", model, {}, machine)}
    inputs["conversations"] = run_stage("conversations", data, inputs, machine)
    made = run_stage("sft", SupervisedStageSettings(model=model, trainer=plan, dpo=dpo), inputs, machine)
    history = json.loads((made.path / "history.json").read_text())[1:]
    return {
        "loss": [row["loss"] for row in history],
        "norm": [row["grad_norm"] for row in history],
        "seconds": [row["timing/train"] for row in history][UNTIMED:],
        "peak_gib": history[-1].get("memory/peak_gib", 0.0),
    }


def theirs(method: str, recompute: bool, micro: int, folder: Path) -> dict[str, Any]:
    """Run TRL's trainer on the rows in `folder`, in the order of ours."""
    out = folder / "theirs.json"
    options = {"rows": units(method), "micro": micro, "recompute": recompute}
    options |= {"learning_rate": LEARNING_RATE, "epsilon": EPSILON, "beta": BETA}
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if CUDA:
        options |= {"liger": True, "bf16": True, "attention": "flash_attention_2"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "flash_attention"), os.environ.get("PYTHONPATH", "")])
    python = os.environ.get("ARMATURE_TRL_PYTHON", str(HERE.parent / ".venv-trl/bin/python"))
    places = [str(folder / "model"), str(folder / f"{method}-trl"), str(out)]
    command = [python, str(HERE / "sft_trl.py"), method, *places, json.dumps(options)]
    subprocess.run(command, env=environment, check=True)
    result: dict[str, Any] = json.loads(out.read_text())
    result["seconds"] = result["seconds"][UNTIMED - 1 :]
    return result


def measured(way: str, folder: Path) -> dict[str, Any]:
    method, name, recompute, size = way.split(",")
    measure = {"ours": ours, "trl": theirs}[name]
    return {"way": way} | measure(method, recompute == "1", int(size), folder)


def main(words: list[str]) -> None:
    if words[:1] == ["--child"]:
        way, folder, out = words[1:]
        Path(out).write_text(json.dumps(measured(way, Path(folder))))
        return
    taken = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint(folder / "model")
        (folder / "model/chat_template.jinja").write_text(TEMPLATE)
        for method in ("sft", "dpo"):
            table = rows(method)
            table.save_to_disk(folder / method)
            in_our_order(table, units(method)).save_to_disk(folder / f"{method}-trl")
        for way in words or WAYS:
            out = folder / "out.json"
            command = [sys.executable, "-m", "benchmarks.sft_gpu", "--child", way, str(folder), str(out)]
            if subprocess.run(command).returncode:
                print(f"{way}: failed", flush=True)
                continue
            one = json.loads(out.read_text())
            taken.append(one)
            seconds = one["seconds"]
            spread = f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
            print(f"{way}: {spread}, peak {one['peak_gib']:.1f} GiB, norm {one['norm'][0]:.4g}", flush=True)
            Path(os.environ.get("OUT", "."), "sft.json").write_text(json.dumps(taken, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
