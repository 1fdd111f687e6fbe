"""Planning of robot recipes: memory of a policy's training, and duration of a step of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from pydantic import Field, NonNegativeFloat, PositiveFloat

from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.planning.memory import Gpu, RecipeMemory
from armature.components.planning.step import STEP_HEAD, Plan, StepTime, assumptions, plan_title, step_cells
from armature.components.robots.imitation.opening import group_of, prepare
from armature.components.robots.imitation.settings import PolicyUpdateSettings, VLATrainerSettings
from armature.components.robots.policies.family import family
from armature.components.robots.policies.model import ModelShape, PolicyModel, denoising_steps
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.recipes import EvaluateBenchmark, EvaluateLibero, SweepPolicies, TrainVla, TrainVlaRl
from armature.components.robots.rl.settings import RobotRLTrainerSettings, TrainVLARLSettings
from armature.components.training.processes import TrainerProcesses
from armature.components.vlm.memory import GIB

SIZES = (1, 8)
"""Numbers of GPUs to plan for, if the user gives none."""
POLICIES = "; docs/benchmarks.md, MolmoAct2 of the released sizes"
TRYING = "; docs/benchmarks.md, Robot policies that learn by trying"
ACTION_TOKENS = 40
"""Assumed number of discrete action tokens of an example."""


class RobotAssumptions(Settings):
    """Assumptions that no data sheet has. Descriptions name their source; measurements are on H200s and 16 cores."""

    success: float = Field(0.5, ge=0, le=1)
    """assumed: share of episodes that solve their task"""
    solved_actions: float = Field(0.6, gt=0, le=1)
    """assumed: mean number of actions of a solved episode, as a share of max_steps"""
    # Each further row of a pass takes 9.84 ms. One row takes 33 ms, less its FLOPs, for 36 layers and 10 denoising
    # steps.
    policy_mfu: PositiveFloat = Field(0.412, description="measured: FLOPs utilization of each further row" + POLICIES)
    layer_seconds: NonNegativeFloat = Field(0.0231 / 360, description="measured: overhead of one layer" + POLICIES)
    expert_mfu: PositiveFloat = Field(0.228, description="measured: training the expert, by the VLM's FLOPs" + POLICIES)
    full_mfu: PositiveFloat = Field(0.32, description="measured: 0.304 for LoRA and 0.337 for all weights" + POLICIES)
    fp8_time: PositiveFloat = Field(0.8, description="measured: time of a further row in fp8, over bf16" + TRYING)
    micro_batch_seconds: NonNegativeFloat = Field(0.31 / 36, description="measured: minimum for a layer" + POLICIES)
    action_seconds: NonNegativeFloat = Field(0.015, description="measured: core time of an action" + TRYING)
    waiting_seconds: NonNegativeFloat = 0.01
    """assumed: core time of a waiting step after a reset"""
    reset_seconds: NonNegativeFloat = 0.2
    """assumed: core time of a reset, without its waiting steps"""
    build_seconds: NonNegativeFloat = Field(2.5, description="measured: core time to build a simulator" + TRYING)
    keep_seconds: NonNegativeFloat = 0.01
    """assumed: time to encode and store the images of an action chunk"""
    batch_answer_seconds: NonNegativeFloat = 1e-4
    """assumed: time per action chunk to make the batch of a step"""
    network_share: PositiveFloat = 0.7
    """assumed: share of the bandwidth of NVLink and network that collectives reach"""
    memory_share: PositiveFloat = 0.7
    """assumed: share of the memory bandwidth that the optimizer reaches"""
    write_bandwidth: PositiveFloat = 1e9
    """assumed: bytes/s when writing weights to a folder, and when reading them"""


@dataclass(frozen=True)
class PolicySizes:
    """Sizes of a policy.

    vlm, expert: number of parameters of the VLM and of the action expert.
    met: number of VLM parameters that each token of a prompt is multiplied by, without embeddings and output layer.
    tokens: number of tokens of a prompt. denoising: number of denoising steps of an action chunk.
    width: bytes per weight.
    """

    shape: ModelShape
    vlm: int
    met: int
    expert: int
    cameras: int
    tokens: int
    denoising: int
    width: int

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.vlm + self.expert

    @property
    def layers(self) -> int:
        """Number of layers of the text model. The action expert has as many."""
        return self.shape.layers

    @property
    def key_value_bytes(self) -> int:
        """Bytes of one token's keys and values, summed over all layers of the text model. The expert reads them."""
        text = self.shape.text
        return 2 * self.layers * text.num_key_value_heads * text.head_dim * self.width


def policy_sizes(config: Any, settings: RobotPolicySettings, cameras: int) -> PolicySizes:
    """Return the sizes of a policy, counted on the meta device.

    Args:
        config: Result of `PolicyFamily.read_config`.
    """
    shape: ModelShape = family(settings.family).shape(config)
    with torch.device("meta"):
        model = shape.make("float32")
    vlm, expert = (sum(part.numel() for part in each.parameters()) for each in (model.vlm, model.action_expert))
    outside = {*map(model.get_parameter, model.embeddings("seed")), model.get_parameter("vlm.lm_head.weight")}
    return PolicySizes(
        shape=shape,
        vlm=vlm,
        met=vlm - sum(part.numel() for part in outside),
        expert=expert,
        cameras=cameras,
        tokens=cameras * shape.image_tokens + shape.text_tokens,
        denoising=denoising_steps(settings, model.config),
        width=2 if settings.dtype == "bfloat16" else 4,
    )


def policy_trainer_parts(
    sizes: PolicySizes, policy: RobotPolicySettings, update: PolicyUpdateSettings, shards: int, flow_samples: int
) -> dict[str, int]:
    """Return the memory in bytes, by part, of a rank that trains a policy, counted on the meta device.

    Without sharding, a trained bf16 weight has a gradient, two moments and its rounding residual in bf16; an fp32
    weight has a gradient and two moments in fp32. Split over `shards`, all of these are fp32, and the weights of the
    expert, the embeddings and two layers are gathered at a time.
    """
    with torch.device("meta"):
        model = sizes.shape.make(policy.dtype)
    prepare(model, update, policy.semantics)
    parameters = list(model.parameters())
    trained = [each for each in parameters if each.requires_grad]
    count, total = sum(each.numel() for each in trained), sum(each.numel() for each in parameters)
    weights = sum(each.numel() * each.element_size() for each in parameters)
    optimizer = sum(each.numel() * (12 if each.dtype == torch.float32 else 8) for each in trained)
    gathered = 0
    if shards > 1:
        weights, optimizer = 4 * total // shards, 12 * count // shards
        gathered = 4 * sizes.expert + sizes.width * (sizes.vlm - sizes.met + 2 * (sizes.met // sizes.layers))
    if isinstance(update, VLATrainerSettings) and update.ema_decay is not None:
        optimizer += 4 * count // shards
    if isinstance(update, RobotRLTrainerSettings) and update.kl_coefficient:
        weights += 4 * sizes.expert  # the copy of the initial expert for the KL term
    recomputes = isinstance(update, VLATrainerSettings) and update.gradient_checkpointing
    discrete = policy.action_mode != "continuous" and update.mode != "expert"
    example = _example_bytes(sizes, policy.chunk_size * flow_samples, update, recomputes)
    if isinstance(update, VLATrainerSettings) and update.lora_dropout:
        dropped = _dropout_bytes(model, sizes, policy.chunk_size * flow_samples)
        example += dropped // sizes.layers if recomputes else dropped
    if discrete:
        example += ACTION_TOKENS * sizes.shape.text.vocab_size * 8
    return {
        "weights": weights,
        "gradients and optimizer": optimizer,
        "gathered": gathered,
        "activations": update.micro_batch_size * example,
    }


def _example_bytes(sizes: PolicySizes, actions: int, update: PolicyUpdateSettings, recomputes: bool) -> int:
    """Return the number of bytes that one training example's activations take on the GPU.

    A layer keeps 17 numbers per token and hidden unit (arXiv 2205.05198), in an expert that is not compiled 24. With
    gradient checkpointing (`recomputes`) one layer at a time keeps them, and every layer keeps its output. A frozen VLM
    keeps only its keys and values; without checkpointing the expert keeps them joined to others, and projected, too.
    """
    shape, frozen = sizes.shape, update.mode == "expert"
    widths = {"expert": (actions * shape.expert, shape.layers, 17 if update.torch_compile else 24)}
    if not frozen:
        widths["text"] = ((sizes.tokens + ACTION_TOKENS) * shape.text.hidden_size, shape.layers, 17)
        patches = sizes.cameras * shape.patches
        widths["vision"] = (patches * shape.vision.hidden_size, shape.vision.num_hidden_layers, 17)
    stored = sum(units * layers * (1 if recomputes else values) for units, layers, values in widths.values())
    once = max(values * units for units, _, values in widths.values()) if recomputes else 0
    caches = (1 if recomputes else shape.caches) * frozen
    return sizes.width * (stored + once) + caches * sizes.tokens * sizes.key_value_bytes


def _dropout_bytes(model: PolicyModel, sizes: PolicySizes, actions: int) -> int:
    """Return the bytes of dropout in one training example: each adapter has a mask and its own copy of its input."""
    images = {"vit": sizes.shape.patches, "connector": sizes.shape.image_tokens}
    positions = {group: sizes.cameras * each for group, each in images.items()}
    positions |= {"vlm": sizes.tokens + ACTION_TOKENS, "action_expert": actions}
    adapters = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer))
    return (sizes.width + 1) * sum(positions[group_of(name)] * layer.in_features for name, layer in adapters)


def sweep_memory(recipe: SweepPolicies) -> RecipeMemory | None:
    """Return the memory of the largest policy of a sweep, in which one policy plays after the other.

    It is None if it can be counted for none of them.
    """
    cameras, rows = len(recipe.simulator.camera_name_mapping), recipe.evaluation.rows_per_pass
    counted = [policy for policy in recipe.sweep.policies.values() if policy.external is None]
    memories = [robot_memory(policy, recipe.machine, cameras, None, rows=rows) for policy in counted]
    return max(memories, key=lambda memory: sum(memory.server.values()), default=None)


def recipe_memory(recipe: TrainVla | TrainVlaRl | EvaluateLibero | EvaluateBenchmark) -> RecipeMemory | None:
    """Return the memory that a recipe needs to train or play a policy on the recipe's machine.

    It is None for a policy that another program computes.
    """
    policy, machine = recipe.policy, recipe.machine
    if policy.external is not None:
        return None
    if isinstance(recipe, EvaluateBenchmark):
        return robot_memory(policy, machine, len(recipe.benchmark.cameras), None, rows=recipe.evaluation.rows_per_pass)
    cameras = len(recipe.simulator.camera_name_mapping) if recipe.simulator is not None else 0
    if isinstance(recipe, TrainVlaRl):
        return robot_memory(policy, machine, cameras, recipe.trainer, recipe.settings_for(TrainVLARLSettings))
    rows = recipe.evaluation.rows_per_pass if recipe.evaluation is not None else 0
    update = recipe.training if isinstance(recipe, TrainVla) else None
    return robot_memory(policy, machine, cameras or len(policy.image_keys) or 2, update, rows=rows)


def robot_memory(
    policy: RobotPolicySettings,
    machine: Machine,
    cameras: int,
    update: PolicyUpdateSettings | None,
    rollouts: TrainVLARLSettings | None = None,
    rows: int = 0,
) -> RecipeMemory:
    """Return the memory of the trainer and of the playing policy.

    In reinforcement learning (`rollouts`) both share the trainer's first GPU; an evaluation comes after training.

    Args:
        update: settings of the training; None: no training.
        rows: rows of one forward pass of the playing policy; 0: no policy plays.
    """
    sizes, processes = (
        policy_sizes(family(policy.family).read_config(policy), policy, cameras),
        TrainerProcesses.of(machine),
    )
    flow_samples, trainer = policy.num_flow_timesteps, dict[str, int]()
    if rollouts is not None:
        plan = rollouts.rollouts
        flow_samples, rows = (plan.flow_samples if plan.likelihood == "fpo" else 1), plan.rows_per_pass
    if update is not None:
        trainer = policy_trainer_parts(sizes, policy, update, processes.shards, flow_samples)
    cache = rows * sizes.tokens * sizes.key_value_bytes
    return RecipeMemory(
        trainer=trainer,
        ranks=processes.ranks if update is not None else 0,
        server={"weights": sizes.parameters * sizes.width, "keys and values": cache} if rows else {},
        servers=min(1, rows),
        together=rollouts is not None,
        server_share=None,
        on_gpu=bool(processes.gpus),
        served="the playing policy",
    )


@dataclass(frozen=True)
class RobotCosts:
    """Durations in seconds.

    build, reset: one reset in a simulator process, with and without building the simulator first.
    action: one action in a simulator process.
    policy_pass: one forward pass of the playing policy.
    answer, update: one action chunk and one optimizer step on a rank of the trainer.
    micro_batch: minimum duration of a micro-batch on a rank, even if it has few chunks.
    sync: publishing new weights and loading them.
    """

    build: float
    reset: float
    action: float
    policy_pass: float
    answer: float
    micro_batch: float
    update: float
    sync: float


def robot_costs(
    sizes: PolicySizes, gpu: Gpu, assumed: RobotAssumptions, settings: TrainVLARLSettings, ranks: int
) -> RobotCosts:
    """Return the durations on this GPU.

    A row takes 2 operations for each weight and token of its prompt; in 8 bits it takes less time. With `trainer.mode`
    expert, training on a chunk takes this once; otherwise the backward pass and recomputation are added, 8 operations
    in all. A trainer of several ranks gathers all weights twice and scatters the gradients of trained weights.
    """
    rollouts, simulator = settings.rollouts, settings.simulator
    expert, row = settings.trainer.mode == "expert", 2 * sizes.met * sizes.tokens
    played = row * (assumed.fp8_time if rollouts.quantization is not None else 1.0)
    trained = sizes.expert if expert else sizes.parameters
    held = sizes.vlm * sizes.width + 4 * sizes.expert
    gathered = 0.0 if ranks == 1 else (2 * held + 4 * trained) / (gpu.collective(ranks) * assumed.network_share)
    waiting = simulator.num_steps_wait * assumed.waiting_seconds
    return RobotCosts(
        build=assumed.build_seconds + waiting,
        reset=assumed.reset_seconds + waiting,
        action=assumed.action_seconds,
        policy_pass=assumed.layer_seconds * sizes.layers * sizes.denoising
        + rollouts.rows_per_pass * played / (gpu.flops * assumed.policy_mfu),
        answer=played / (gpu.flops * assumed.expert_mfu) if expert else 4 * row / (gpu.flops * assumed.full_mfu),
        micro_batch=max(assumed.micro_batch_seconds * sizes.layers, gathered),
        update=32 * trained / ranks / (gpu.memory_bandwidth * assumed.memory_share),
        sync=2 * held / assumed.write_bandwidth,
    )


def robot_step(
    costs: RobotCosts,
    assumed: RobotAssumptions,
    settings: TrainVLARLSettings,
    tasks: int,
    chunk: int,
    processes: int,
    ranks: int,
) -> StepTime:
    """Return the duration of a step of train-vla-rl in which all chunks, of `chunk` actions each, are trained on.

    A process runs its simulators one at a time while the policy computes for others, so the policy only counts for the
    time it takes longer. With several tasks, each slot changes its task once per step. Episodes of different lengths
    make a real step longer.
    """
    plan, trainer = settings.rollouts, settings.trainer
    episodes = plan.groups_per_step * plan.group_size
    slots = min(plan.batch, episodes)
    actions = plan.max_steps * (1 - assumed.success + assumed.success * assumed.solved_actions)
    answers = episodes * ceil(actions / chunk)
    builds = slots * (tasks > 1) * max(0.0, costs.build - costs.reset)
    playing = {
        "simulators compute actions": episodes * (costs.reset + actions * costs.action) / min(processes, slots),
        "simulators are built for other tasks": builds / min(processes, slots),
    }
    policy = ceil(answers / min(plan.rows_per_pass, slots)) * costs.policy_pass
    updates = trainer.epochs * ceil(answers / (trainer.samples_per_update or answers))
    of_rank = trainer.epochs * answers / ranks
    micro_batches = max(updates, ceil(of_rank / trainer.micro_batch_size))
    return StepTime(
        rollouts={
            **playing,
            "the one policy answers": max(0.0, policy - sum(playing.values())),
            "answers are stored": answers * assumed.keep_seconds / slots,
        },
        training={
            "the trainer computes": of_rank * costs.answer,
            "micro-batches wait": max(0.0, micro_batches * costs.micro_batch - of_rank * costs.answer),
            "the optimizer updates": updates * costs.update,
        },
        others={"batches are made": answers * assumed.batch_answer_seconds, "weights are synced": costs.sync},
        overlaps=plan.max_staleness > 0,
    )


def plan_robots(recipe: TrainVlaRl, gpus: Sequence[int], gpu: Gpu, values: Mapping[str, Any]) -> Plan:
    """Plan the steps of a recipe of train-vla-rl, see `Plan`."""
    from armature.components.robots.libero.tasks import suite_tasks

    settings, policy = recipe.settings_for(TrainVLARLSettings), recipe.policy
    assumed, plan = assumptions(RobotAssumptions, values), settings.rollouts
    cameras = len(settings.simulator.camera_name_mapping)
    sizes = policy_sizes(family(policy.family).read_config(policy), policy, cameras)
    tasks, processes = len(plan.tasks or suite_tasks(plan.suite)), min(recipe.machine.playing_processes, plan.batch)
    samples = plan.flow_samples if plan.likelihood == "fpo" else 1
    rows = [["GPUs", "rank GiB", *STEP_HEAD]]
    for count in gpus or SIZES:
        costs = robot_costs(sizes, gpu, assumed, settings, count)
        step = robot_step(costs, assumed, settings, tasks, policy.n_action_steps, processes, count)
        held = sum(policy_trainer_parts(sizes, policy, settings.trainer, count, samples).values())
        cells = step_cells(step, count, plan.groups_per_step * plan.group_size)
        rows.append([f"{count:,}", f"{held / GIB:.0f}", *cells])
    title = plan_title(sizes.parameters, plan.groups_per_step, plan.group_size, plan.max_staleness)
    return Plan(assumed, f"{title}, {plan.batch} simulators in {processes} processes", rows)
