"""GRPO on a page: a tiny vision-language model learns to name the color of an image.

Collect rollouts on a vLLM server, build a batch with group-relative advantages, apply it as one step, publish the
weights, sync the server, and evaluate on held-out tasks. `armature run train-vlm/colors` is the same loop with resume,
restarts, tracking and reports. Two cores and no GPU are enough: `python examples/grpo.py`, some three minutes.
Arguments change the recipe's values: `python examples/grpo.py trainer.max_steps=20`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import armature
from armature.components.artifacts.images import ImageStore
from armature.components.configuration.stages import TerminalEvents
from armature.components.environments.make import make_environment
from armature.components.evaluation.results import collect_results, metrics
from armature.components.inference.command import vocabulary
from armature.components.inference.pool import ServerPool
from armature.components.models.adapters import get_adapter
from armature.components.models.load import load_processor
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.rollouts.batches.table import build_batch, write_batch
from armature.components.rollouts.collect import collect
from armature.components.rollouts.sampler import tasks_of_step
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings


async def train(work: Path, overrides: list[str]) -> float:
    """The accuracy on the held-out tasks after the last step."""
    settings: dict[str, Any] = dict(armature.load_recipe("train-vlm/colors", overrides).sections)
    machine, model, plan, trainer = (settings[name] for name in ("machine", "model", "rollouts", "trainer"))
    images, events = ImageStore(work / "images"), TerminalEvents()

    # The model, and the environment with its tasks: an image and a question each, and a reward for the answer.
    start = make_tiny_checkpoint("qwen2-vl", work / "model", model.tiny.seed, model.tiny)
    environment = make_environment(settings["environment"])
    tasks, heldout = (list(environment.tasks(split)) for split in ("train", "heldout"))

    # The adapter knows the model family: which tokens stand for an image, and how rollouts become training samples.
    adapter = get_adapter(start, load_processor(start, model), images.open, settings["batches"].max_sequence_tokens)
    forbidden = sorted(adapter.collator.forbidden_token_ids)
    policy = TrainerPolicySettings(
        model_path=start, model=model, trainer=trainer, temperature=plan.sampling.temperature, images=images.root
    )
    pool = ServerPool(start, settings["inference"], machine, log_folder=work / "logs", forbidden_token_ids=forbidden)
    with closing(environment), closing(events), TrainerClient(policy, machine, work / "trainer") as client:
        async with pool:

            async def play(tasks: list[Any], samples: int, step: int, sampling: Any) -> Any:
                options: dict[str, Any] = {"step": step, "seed": plan.seed, "machine": machine, "events": events}
                return await collect(environment, tasks, samples, pool, images, sampling, **options)

            for step in range(1, trainer.max_steps + 1):
                # 1. Rollouts: each task is played group_size times by the weights of the step before.
                chosen = tasks_of_step(tasks, plan.groups_per_step, step, plan.seed)
                rollouts = await play(chosen, plan.group_size, step, plan.sampling)

                # 2. The batch: a sample's advantage is its reward less the mean of its group, and the tokens and
                #    log-probs are those that the server returned. Groups that agree teach nothing and are left out.
                batch = build_batch(rollouts, adapter, settings["batches"], vocabulary(start))
                folder = work / f"batch-{step:05d}"
                folder.mkdir()
                write_batch(folder, batch.samples)

                # 3. The step: the clipped or masked policy gradient of all samples, and AdamW.
                report = await asyncio.to_thread(client.step, step, folder)

                # 4. The server gets the new weights, and proves it: it answers a probe as the trainer does.
                answer = await asyncio.to_thread(client.probe, pool.weights.probe, step)
                weights = work / "weights" / f"{step:06d}"
                await asyncio.to_thread(client.publish, weights, step)
                await pool.sync(weights, step, None, answer)

                rewards = [trajectory.reward for trajectory in rollouts.trajectories]
                shown = {"rew": sum(rewards) / len(rewards), "kl": report.get("mismatch_kl", 0.0)}
                events.progress("Training", step, trainer.max_steps, **shown)

            # 5. Evaluation: every held-out task once.
            evaluation = settings["evaluation"]
            played = await play(heldout, 1, 0, evaluation.sampling)
    results = collect_results(played, heldout, evaluation.success_reward, evaluation.kind_field)
    return float(metrics(results, ["heldout"])["accuracy"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        print(f"held-out accuracy {asyncio.run(train(Path(folder), sys.argv[1:])):.3f}")
