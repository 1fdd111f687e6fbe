"""Rollouts with tool calls on one GPU: tokens per second, and agreement of trainer and server in every turn.

A model of Qwen2.5-VL-3B's sizes with random weights, and a vLLM server on the same GPU. Random weights write no call,
so any text counts as a call of `zoom`, whose result is an image of 448 x 448. A rollout ends after four calls, or
when no turn fits into the model any more. The text
of random tokens has other tokens when it is read again, so a trainer that tokenized texts would train on those.

Usage: python -m benchmarks.tools_gpu, on a CPU of a small model. ARMATURE_TEST_VLLM_PYTHON names the Python that has
vLLM. Results go to $OUT/tools.json as well.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from anyio.from_thread import start_blocking_portal

from armature.components.artifacts.images import ImageStore
from armature.components.configuration.stages import TerminalEvents
from armature.components.contracts.machine import Machine, MachineServers
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.tool_calls import ToolCall
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings, ServerSettings
from armature.components.inference.tool_calls import ToolFormat
from armature.components.models.adapters import get_adapter
from armature.components.models.attention import apply_image_attention
from armature.components.models.load import load_model, load_processor
from armature.components.models.settings import ModelSettings
from armature.components.models.varlen import choose_kernels
from armature.components.rl.agreement import compare
from armature.components.rollouts.collect import collect
from armature.components.training.ranks import Ranks
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import MicroBatchLoader
from benchmarks.rl_step_gpu import CUDA, checkpoint, side
from benchmarks.step_ours import DEVICE, settings_of

GROUPS, GROUP_SIZE, CALLS, ROUNDS = (8, 8, 4, 4) if CUDA else (2, 2, 2, 1)
TOKENS = 128 if CUDA else 8
"""Most tokens of a turn."""


class AlwaysCalling(ToolFormat):
    """A format in which any text is a call of `zoom`, at a place that depends on the text."""

    def calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        left, top = sum(text.encode()) % (side() // 2), len(text) % (side() // 2)
        return [ToolCall("zoom", {"image": 0, "box": [left, top, left + side() // 2, top + side() // 2]})]


class CallingPool:
    """A pool whose model calls `zoom` with any text."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self.tool_format = AlwaysCalling(**pool.tool_format.model_dump())

    async def complete(self, *arguments: Any, **offered: Any) -> Any:
        return await self._pool.complete(*arguments, **offered)


def rollouts(folder: Path, images: ImageStore, model: ModelSettings) -> list[tuple[float, GenerateOutputs]]:
    """Play `ROUNDS` batches of rollouts on a server, and return the seconds and the rollouts of each."""
    python = Path(os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python"))
    servers = MachineServers(python=python)
    if CUDA:
        servers = MachineServers(python=python, gpus=((0,),), arguments={"gpu_memory_utilization": 0.5})
    machine = Machine(servers=servers)
    settings = ServerSettings(
        max_model_len=8192, max_images_per_prompt=CALLS + 1, dtype="bfloat16" if CUDA else "float32"
    )
    environment = make_environment(
        EnvironmentSettings(
            name="colors",
            args={"image_size": side()},
            tools=("zoom",),
            max_tool_calls=CALLS,
            train_tasks=GROUPS * (ROUNDS + 1),
            heldout_tasks=1,
        ),
        8,
    )
    tasks = list(environment.tasks("train"))
    forbidden = sorted(get_adapter(folder, load_processor(folder, model)).collator.forbidden_token_ids)
    pool = ServerPool(folder, settings, machine, folder.parent / "logs", forbidden_token_ids=forbidden)

    async def play(step: int) -> GenerateOutputs:
        chosen = tasks[step * GROUPS : (step + 1) * GROUPS]
        shared: dict[str, Any] = {"step": step, "seed": 0, "machine": machine, "events": TerminalEvents()}
        sampling = SamplingSettings(max_tokens=TOKENS)
        return await collect(environment, chosen, GROUP_SIZE, CallingPool(pool), images, sampling, **shared)

    taken = []
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(pool):
        portal.call(play, 0)  # loads what is loaded once
        for step in range(1, ROUNDS + 1):
            began = time.perf_counter()
            outputs = portal.call(play, step)
            taken.append((time.perf_counter() - began, outputs))
            assert not outputs.failures, outputs.failures[0]
    environment.close()
    return taken


def agreement(folder: Path, images: ImageStore, model: ModelSettings, outputs: GenerateOutputs) -> dict[str, Any]:
    """Compare trainer and server turn by turn, and count turns whose text has other tokens when it is read again."""
    processor = load_processor(folder, model)
    adapter = get_adapter(folder, processor, images.open, 8192)
    samples, drops = adapter.samples(outputs)
    assert not drops, drops
    loaded = load_model(folder, model).to(DEVICE)
    choose_kernels(loaded)
    apply_image_attention(loaded)
    words = {"packing", "bf16"} if CUDA else {"packing"}
    learner = Learner(
        loaded,
        settings_of(16_384, words),
        temperature=1.0,
        forbidden_token_ids=sorted(adapter.collator.forbidden_token_ids),
        ranks=Ranks(device=DEVICE),
    )
    loader = MicroBatchLoader(adapter.collator, images, workers=0)
    with loader.batch():
        scores = learner.score(samples, loader)
    scored: dict[str, list[Any]] = {}
    for sample, score in zip(samples, scores, strict=True):
        scored.setdefault(sample.trajectory_id, []).append((sample, score))
    by_turn: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(CALLS + 1)]
    other_tokens = 0
    for trajectory in outputs.trajectories:
        for turn in trajectory.turns:
            start, ids = len(turn.prompt_token_ids), turn.completion_token_ids
            here = slice(start, start + len(ids))
            (score,) = (
                score[here]
                for sample, score in scored[trajectory.trajectory_id]
                if np.array_equal(sample.input_ids[here], ids) and sample.loss_mask[here].all()
            )
            by_turn[turn.index].append(score - turn.completion_logprobs)
            again = processor.tokenizer(turn.completion, add_special_tokens=False)["input_ids"]
            other_tokens += again != [token for token in ids.tolist() if token != processor.tokenizer.eos_token_id]
    whole = compare(samples, scores)
    return {
        "kl_by_turn": [float(np.mean(np.expm1(d) - d)) for d in map(np.concatenate, filter(None, by_turn))],
        "tokens_by_turn": [int(sum(map(len, parts))) for parts in by_turn],
        "mismatch_kl": whole.mismatch_kl,
        "max_difference": whole.max_difference,
        "turns": sum(map(len, by_turn)),
        "turns_with_other_tokens": other_tokens,
    }


def main() -> None:
    dtype = "bfloat16" if CUDA else "float32"
    with tempfile.TemporaryDirectory() as scratch:
        folder, images = Path(scratch) / "model", ImageStore(Path(scratch) / "images")
        checkpoint(folder)
        model = ModelSettings.model_validate({"source": str(folder), "dtype": dtype})
        taken = rollouts(folder, images, model)
        turns = [turn for _, outputs in taken for one in outputs.trajectories for turn in one.turns]
        sampled = [
            sum(len(turn.completion_token_ids) for one in outputs.trajectories for turn in one.turns)
            for _, outputs in taken
        ]
        result = {
            "rollouts": GROUPS * GROUP_SIZE,
            "seconds": [seconds for seconds, _ in taken],
            "sampled_tokens_per_s": [count / seconds for count, (seconds, _) in zip(sampled, taken, strict=True)],
            "prompt_tokens_of_the_last_turn": max(len(turn.prompt_token_ids) for turn in turns),
            "images_of_the_last_turn": max(len(turn.images) for turn in turns),
            **agreement(folder, images, model, taken[-1][1]),
        }
    print(json.dumps(result, indent=1))
    (Path(os.environ.get("OUT", ".")) / "tools.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
