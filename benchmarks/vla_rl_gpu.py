"""Reinforcement learning of a MolmoAct2 of the released sizes, with random weights, on one GPU and its CPU cores.

`python -m benchmarks.vla_rl_gpu [--fp8]` takes about seven minutes: answers at several batch sizes, episodes of
libero_spatial that the policy plays in simulators, and updates of the action expert on what it did. A policy of random
weights solves nothing, so every episode has as many actions as one that is solved has on average. Rollouts and updates
are those of one step of πRL (arXiv 2510.25889): 512 episodes and one epoch.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.machine import available_cpus
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.libero.processes import SimulatorProcess
from armature.components.robots.libero.settings import SimulatorSettings, Suite
from armature.components.robots.libero.tasks import suite_tasks
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy, load_policy
from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
from armature.components.robots.policies.molmoact2.configuration import MolmoAct2Config
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.policy import MolmoAct2Policy
from armature.components.robots.policies.norm_stats import FeatureNormStats, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings, TinyPolicySettings
from armature.components.robots.rl.collect import Collector
from armature.components.robots.rl.learner import RobotRLLearner
from armature.components.robots.rl.likelihood import FlowLikelihood
from armature.components.robots.rl.loader import ActionChunkLoader
from armature.components.robots.rl.schedule import plan_step
from armature.components.robots.rl.settings import RobotRLTrainerSettings, RobotRolloutSettings
from armature.components.robots.rl.table import ActionChunkSample, with_advantage
from armature.components.training.ranks import Ranks
from benchmarks.policy_case import RELEASED
from benchmarks.step_case import need_gpu

ROWS = (1, 8, 32, 64)
EPISODES, ACTIONS = 512, 120
MICRO_BATCH, SAMPLES = 32, 512
NOISE = 0.5
SUITE: Suite = "libero_spatial"
STATE, ACTION = 8, 7
SIZES = ("vit_config", "adapter_config", "text_config", "action_expert_config")
SETTINGS = RobotPolicySettings(
    action_mode="continuous",
    chunk_size=10,
    n_action_steps=10,
    setup_type="single franka robotic arm in libero",
    control_mode="delta end-effector pose",
    normalize_gripper=True,
    image_keys=("observation.images.image", "observation.images.wrist_image"),
    dtype="bfloat16",
    num_inference_steps=10,
)


def released(folder: Path, small: bool, device: torch.device) -> LoadedPolicy:
    """Return a policy with the tokenizer and processor of a tiny policy, but with the released model sizes and image
    sizes."""
    words = (
        *(f"The task is to {task.language}." for task in suite_tasks(SUITE)),
        f"The setup is {SETTINGS.setup_type}.",
    )
    sizes = TinyPolicySettings(image_side=84 if small else 378, max_action_dim=32, corpus=words)
    settings = SETTINGS.model_copy(update={"tiny": sizes})
    robot = RobotMetadata(action_stats=_range(ACTION), state_stats=_range(STATE))
    loaded = load_policy(make_tiny_policy(folder, settings), SETTINGS, robot)
    if small:
        return loaded
    config = loaded.config.model_dump()
    for name in SIZES:
        config[name] |= RELEASED[name]
    config["text_config"] |= {
        key: loaded.config.model_dump()["text_config"][key] for key in ("vocab_size", "additional_vocab_size")
    }
    parts = replace(loaded.parts, config=MolmoAct2Config.from_dict(config))
    return LoadedPolicy(random_model(parts.config, device), parts)


def random_model(config: MolmoAct2Config, device: torch.device) -> MolmoAct2:
    with torch.device("meta"):
        model = MolmoAct2(config, "bfloat16")
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model.eval()


def _range(size: int) -> FeatureNormStats:
    return FeatureNormStats(q01=(-1.0,) * size, q99=(1.0,) * size, min=(-1.0,) * size, max=(1.0,) * size)


def answers(loaded: LoadedPolicy, seen: list[RobotObservation], rows: int) -> dict[str, Any]:
    """Measure how long `rows` answers at once take, in ms, with and without the processor's work."""
    policy = MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows)
    arguments = (seen * rows)[:rows]
    examples = [policy._processor.encode(each) for each in arguments]
    whole, model = [], []
    for seed in range(8):
        began = time.perf_counter()
        policy.sample_flow_sde(arguments, range(seed, seed + rows), NOISE)
        whole.append(time.perf_counter() - began)
        began = time.perf_counter()
        policy._sampler.sample_flow_sde(examples, range(seed, seed + rows), NOISE)
        model.append(time.perf_counter() - began)
    result = {"rows": rows, "tokens": examples[0].length, "width": policy._sampler._width(examples[0])}
    return result | {"ms": 1e3 * statistics.median(whole[2:]), "model_ms": 1e3 * statistics.median(model[2:])}


def play(loaded: LoadedPolicy, folder: Path, small: bool) -> tuple[dict[str, Any], list[ActionChunkSample]]:
    """Play episodes in simulators on all cores. The first episodes are a warm-up and are not counted."""
    processes = max(1, available_cpus())
    slots = 2 if small else 4 * processes
    settings = RobotRolloutSettings(
        suite=SUITE,
        groups_per_step=2 if small else EPISODES,
        group_size=1,
        max_steps=20 if small else ACTIONS,
        batch=slots,
        rows_per_pass=1 if small else 32,
    )
    simulator = SimulatorSettings(num_steps_wait=10, assets="compact", reflections=False, offscreen_samples=0)
    policy = MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", settings.rows_per_pass)
    tasks, store = suite_tasks(settings.suite), ImageStore(folder)
    with ExitStack() as opened:
        simulators = [opened.enter_context(SimulatorProcess(simulator, 300.0)) for _ in range(min(slots, processes))]
        collector = Collector(settings, policy, simulators, store, lambda done, total: None)
        collector.collect(plan_step(settings, tasks, 1)[:slots], 1, 0, bootstrap=False)
        collector.times.since()
        began = time.perf_counter()
        result = collector.collect(plan_step(settings, tasks, 2), 2, 1, bootstrap=False).answers
        seconds = time.perf_counter() - began
    rates = {
        "episodes_per_minute": 60 * settings.groups_per_step / seconds,
        "answers_per_second": len(result) / seconds,
    }
    shape = {"simulators": len(simulators), "slots": slots, "episodes": settings.groups_per_step, "seconds": seconds}
    samples = [with_advantage(each, (-1.0) ** row) for row, each in enumerate(result)]
    return shape | rates | collector.times.since(), samples


def observed(images: ImageStore, sample: ActionChunkSample) -> RobotObservation:
    shown = {name: np.asarray(images.open(ref)) for name, ref in zip(sample.cameras, sample.images, strict=True)}
    return RobotObservation(shown, sample.state, sample.language)


def train(
    loaded: LoadedPolicy, samples: list[ActionChunkSample], folder: Path, device: torch.device, compiled: bool
) -> dict[str, Any]:
    """Measure one epoch over the answers, in which only the action expert is trained. An epoch before it is a warm-up
    and is not counted."""
    micro = min(MICRO_BATCH, len(samples))
    settings = RobotRLTrainerSettings(
        max_steps=10, micro_batch_size=micro, samples_per_update=SAMPLES, torch_compile=compiled
    )
    prepare(loaded.model, settings, loaded.settings.semantics)
    likelihood = FlowLikelihood(InferencePlan.of(loaded.settings, loaded.config), NOISE)
    load = ActionChunkLoader(loaded.processor(), ImageStore(folder))
    learner = RobotRLLearner(loaded.model, settings, likelihood, load, Ranks(device=device))
    learner.step(samples[: 2 * micro])
    began = time.perf_counter()
    report = learner.step(samples)
    seconds = time.perf_counter() - began
    return {
        "samples": len(samples),
        "seconds": seconds,
        "answers_per_second": len(samples) / seconds,
        "peak_gib": report["memory/peak_gib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny policy, to see that it runs")
    parser.add_argument("--fp8", action="store_true", help="text layers of players and trainer compute in 8 bits")
    parser.add_argument("--eager", action="store_true", help="layers are not compiled")
    arguments = parser.parse_args()
    if not arguments.small:
        need_gpu("python -m benchmarks.vla_rl_gpu --small")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def say(**result: Any) -> None:
        print(
            json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()}),
            flush=True,
        )

    say(
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        cpus=available_cpus(),
        torch=torch.__version__,
        quantization="fp8" if arguments.fp8 else None,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder, images = Path(scratch), Path(scratch) / "images"
        loaded = released(folder / "policy", arguments.small, device)
        loaded.model.cast_for_inference()
        if arguments.fp8:
            loaded.model.quantize_text("--fp8")
        compiled = not (arguments.eager or arguments.small)
        if compiled:
            loaded.model.compile_layers(dynamic=False)
        result, samples = play(loaded, images, arguments.small)
        say(what="rollouts", **result)
        seen = [observed(ImageStore(images), sample) for sample in samples[:4]]
        for rows in ROWS[:2] if arguments.small else ROWS:
            say(what="answers", **answers(loaded, seen, rows))
        del loaded
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        fresh = released(folder / "policy", arguments.small, device)
        if arguments.fp8:
            fresh.model.quantize_text("--fp8")
        say(what="updates", **train(fresh, samples, images, device, compiled))


if __name__ == "__main__":
    main()
