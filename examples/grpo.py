"""GRPO on a page: a tiny vision-language model learns to name the color of an image.

Each step collects rollouts on a vLLM server, builds a batch with group-relative advantages, applies it, publishes the
weights and loads them into the server. Held-out tasks are evaluated at the end. Two cores and no GPU are enough:
`python examples/grpo.py` takes three minutes. Arguments change values of the recipe, e.g. `trainer.max_steps=20`.

This script leaves out what `armature run train-vlm/colors` adds: resuming, restarts, the comparison of trainer and
server before the first step, tracking and reports. Its final weights are the recipe's, bit for bit.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from armature import (
    ImageStore,
    ServerPool,
    TerminalEvents,
    TrainerClient,
    TrainerPolicySettings,
    accuracy,
    build_batch,
    collect,
    collect_results,
    get_adapter,
    load_recipe,
    make_environment,
    make_tiny_checkpoint,
    tasks_of_step,
)


async def train(work: Path, overrides: list[str]) -> float:
    """Return the accuracy on the held-out tasks after the last step."""
    settings: dict[str, Any] = dict(load_recipe("train-vlm/colors", overrides).sections)
    machine, model, plan, trainer = (settings[name] for name in ("machine", "model", "rollouts", "trainer"))
    images = ImageStore(work / "images")

    # The model, and the environment with its tasks: an image and a question each, and a reward for the answer.
    start = make_tiny_checkpoint("qwen2-vl", work / "model", model.tiny.seed, model.tiny)
    environment = make_environment(settings["environment"])
    tasks, heldout = (list(environment.tasks(split)) for split in ("train", "heldout"))

    # The adapter knows the model family: which tokens stand for an image, and how rollouts become training samples.
    adapter = get_adapter(start, images=images.open, max_tokens=settings["batches"].max_sequence_tokens)
    policy = TrainerPolicySettings(
        model_path=start, model=model, trainer=trainer, temperature=plan.sampling.temperature, images=images.root
    )
    # Trainer and server leave the same tokens out of their softmax, those that stand for images.
    forbidden = sorted(adapter.collator.forbidden_token_ids)
    pool = ServerPool(start, settings["inference"], machine, log_folder=work / "logs", forbidden_token_ids=forbidden)
    with (
        closing(environment),
        closing(TerminalEvents()) as events,
        TrainerClient(policy, machine, work / "trainer") as client,
    ):
        async with pool:

            async def play(tasks: list[Any], samples: int, step: int, sampling: Any) -> Any:
                options: dict[str, Any] = {"step": step, "seed": plan.seed, "machine": machine, "events": events}
                return await collect(environment, tasks, samples, pool, images, sampling, **options)

            for step in range(1, trainer.max_steps + 1):
                # 1. Rollouts: the weights of the step before play each task group_size times.
                chosen = tasks_of_step(tasks, plan.groups_per_step, step, plan.seed)
                rollouts = await play(chosen, plan.group_size, step, plan.sampling)

                # 2. The batch: a sample's advantage is its reward less the mean of its group. Its tokens and log-probs
                #    are those that the server returned. Groups whose rewards are all equal are left out.
                batch = build_batch(rollouts, adapter, settings["batches"])
                folder = batch.write(work / f"batch-{step:05d}")

                # 3. The step: the policy gradient of all samples, and AdamW.
                report = await asyncio.to_thread(client.step, step, folder)

                # 4. The server loads the new weights. Both sides compute the log-probs of one probe prompt, which shows
                #    that the server has the trainer's weights.
                probe = await asyncio.to_thread(client.probe, pool.weights.probe, step)
                weights = work / "weights" / f"{step:06d}"
                await asyncio.to_thread(client.publish, weights, step)
                await pool.sync(weights, step, None, probe)

                rewards = [trajectory.reward for trajectory in rollouts.trajectories]
                shown = {"rew": sum(rewards) / len(rewards), "kl": report.get("mismatch_kl", float("nan"))}
                events.progress("Training", step, trainer.max_steps, **shown)

            # 5. Evaluation: every held-out task once.
            evaluation = settings["evaluation"]
            played = await play(heldout, 1, 0, evaluation.sampling)
    return accuracy(collect_results(played, heldout, evaluation.success_reward)).estimate


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        print(f"held-out accuracy {asyncio.run(train(Path(folder), sys.argv[1:])):.3f}")
