"""Formulas for the seconds of a step of train-vlm on N GPUs, the best division of the GPUs, and the bottleneck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from armature.components.configuration import explain
from armature.components.configuration.recipes import SettingsT
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.contracts.settings import Settings
from armature.components.environments import ENVIRONMENTS
from armature.components.models.settings import ModelSettings
from armature.components.planning.memory import Gpu, ModelSizes, server_parts, sizes_of
from armature.components.rl.recipe import TrainVlm
from armature.components.rl.settings import TrainVLMSettings
from armature.components.vlm.memory import GIB, OVERHEAD
from armature.components.vlm.settings import TrainerSettings

STEP, SYNC = "; docs/benchmarks.md, A step of the trainer", "; docs/benchmarks.md, New weights to a server"
TWO = "; docs/benchmarks.md, Two GPUs, and less memory"
Transfer = Literal["file", "delta", "nccl", "ipc", "adapter"]
Mfu = Literal["trainer_mfu", "packed_mfu", "compiled_mfu", "kept_mfu"]
COLLECTIVES = 3
"""Number of collectives for each block in a micro-batch.

The weights are gathered in the forward and in the backward pass, and the gradients are scattered.
"""
USABLE = 0.9
"""Usable part of a server's GPU memory; the rest is CUDA's context, NCCL and fragmentation."""
MAX_SEQUENCES = 256
"""vLLM's default of max_num_seqs."""


class Assumptions(Settings):
    """Numbers that are neither in a recipe nor on a data sheet.

    Each description tells if the number was assumed, measured or fitted, and where; GPUs were H200s and H100s. The
    first numbers describe the mean episode; `armature plan` takes them from the recipe if it has them.
    """

    turns: PositiveFloat = 1.0
    """assumed: turns of an episode"""
    dialogue: bool = False
    """from the environment: a turn's prompt contains the conversation so far"""
    prompt_tokens: PositiveInt = 512
    """assumed: tokens of the first prompt, images included"""
    turn_tokens: PositiveInt = 256
    """assumed: tokens of a later observation, images included"""
    images_per_turn: NonNegativeInt = 1
    """assumed: images of an observation"""
    completion_tokens: PositiveFloat = 128
    """assumed: tokens of an answer"""
    environment_seconds: NonNegativeFloat = 0.05
    """assumed: seconds of the environment per turn"""
    longest: float = Field(2.0, ge=1)
    """assumed: tokens of the longest episode, relative to the mean"""
    trainer_mfu: PositiveFloat = Field(0.26, description="fitted: share of bf16 FLOPs, not packed, two models" + STEP)
    packed_mfu: PositiveFloat = Field(0.4, description="fitted: the same, packed, not compiled, one case" + STEP)
    compiled_mfu: PositiveFloat = Field(0.49, description="fitted: the same, packed and compiled, three cases" + STEP)
    kept_mfu: PositiveFloat = Field(0.64, description="fitted: the same, activations kept as well, three cases" + STEP)
    # Three micro-batches instead of one took 0.79 s longer, uncompiled. A line fitted to three compiled cases has an
    # intercept of 0.115 s.
    eager_layer_seconds: NonNegativeFloat = Field(
        0.395 / 68 / 3, description="measured: seconds per layer and pass" + STEP
    )
    compiled_layer_seconds: NonNegativeFloat = Field(0.115 / 68 / 3, description="fitted: the same, compiled" + STEP)
    # Two GPUs took 1,775 ms for half of the work that took one GPU 3,225 ms. They took 117 ms more in 207 collectives,
    # of which a single GPU takes 42 ms as well.
    sharded_loss: NonNegativeFloat = Field(2 * 1775 / 3225 - 1, description="measured: slowdown beside NCCL" + TWO)
    collective_seconds: NonNegativeFloat = Field(
        0.075 / 207, description="measured: exposed seconds per collective" + TWO
    )
    prefill_mfu: PositiveFloat = 0.4
    """assumed: share of bf16 FLOPs for prompts and decoded tokens"""
    memory_share: PositiveFloat = 0.7
    """assumed: share of the memory bandwidth when weights are read"""
    network_share: PositiveFloat = 0.7
    """assumed: share of the bandwidth of NVLink and of the network that collectives reach"""
    pass_seconds: NonNegativeFloat = 0.003
    """assumed: seconds of a server's forward pass besides the GPU's"""
    hop_seconds: NonNegativeFloat = 5e-6
    """assumed: seconds from one rank to the next in a ring"""
    request_seconds: NonNegativeFloat = 0.0015
    """assumed: seconds of the flow's event loop per turn"""
    image_seconds: NonNegativeFloat = 0.037 / 50
    """measured: seconds of the event loop per image"""
    rollout_seconds: NonNegativeFloat = 1 / 5259
    """measured: seconds to build a batch, per rollout"""
    sync_seconds: NonNegativeFloat = 0.15
    """measured: seconds to sync a tiny model, 0.12 to 0.19"""
    tensor_seconds: NonNegativeFloat = Field(0.125 / 824, description="measured: seconds to publish a tensor" + SYNC)
    load_bandwidth: PositiveFloat = Field(12e9, description="measured: bytes/s at which vLLM loads weights" + SYNC)
    write_bandwidth: PositiveFloat = Field(
        0.56e9, description="measured: bytes/s of writing a checkpoint to a disk" + SYNC
    )
    shared_bandwidth: PositiveFloat = 2e9
    """assumed: bytes/s of the folder from which servers load"""
    delta_bandwidth: PositiveFloat = Field(4e9, description="measured: bytes/s of comparing weights" + SYNC)
    delta_share: PositiveFloat = Field(0.03, description="measured: share of bytes sent if 2 % changed" + SYNC)
    adapter_publish: NonNegativeFloat = Field(0.28, description="measured: seconds to publish adapters" + SYNC)
    adapter_load: NonNegativeFloat = Field(0.94, description="measured: seconds to load 60 MB of adapters" + SYNC)

    def new_tokens(self) -> float:
        """Return the number of prompt tokens of an episode, after its first prompt, that a server has not cached."""
        return (self.turns - 1) * (self.turn_tokens if self.dialogue else self.prompt_tokens)

    def context(self) -> float:
        """Return the mean number of tokens to which a decoded token attends."""
        earlier = (self.turns - 1) / 2 * (self.turn_tokens + self.completion_tokens) if self.dialogue else 0.0
        return self.prompt_tokens + earlier + self.completion_tokens / 2

    def trained_tokens(self, group_size: int, packing: bool) -> float:
        """Return the number of tokens that the trainer computes for one episode.

        With packing, the episodes of a group share the tokens of their first prompt.
        """
        first = self.prompt_tokens / group_size if packing else self.prompt_tokens
        return first + self.new_tokens() + self.turns * self.completion_tokens


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by activity."""

    rollouts: Mapping[str, float]
    training: Mapping[str, float]
    others: Mapping[str, float]
    """Seconds of activities during which neither rollouts nor training continue, by activity."""
    overlaps: bool
    """True if rollouts and training run at the same time; False if one runs after the other."""

    @property
    def seconds(self) -> float:
        """Total seconds of the step."""
        rollouts, training = sum(self.rollouts.values()), sum(self.training.values())
        return (max(rollouts, training) if self.overlaps else rollouts + training) + sum(self.others.values())

    def bottleneck(self) -> tuple[str, float]:
        """Return the longest activity that the step waits for, and its share of the step."""
        sides = [self.rollouts, self.training]
        waited = [max(sides, key=lambda side: sum(side.values()))] if self.overlaps else sides
        parts = {name: seconds for side in (*waited, self.others) for name, seconds in side.items()}
        name = max(parts, key=lambda each: parts[each])
        return name, parts[name] / max(self.seconds, 1e-12)


@dataclass(frozen=True)
class TrainerCosts:
    """Seconds that one rank of the trainer needs for each unit of work."""

    token: float
    """Seconds to compute a token."""
    micro_batch: float
    """Seconds that the host needs to launch the kernels of a micro-batch."""
    gather: float
    """Seconds to gather the weights and scatter the gradients of a micro-batch. Computing continues meanwhile."""
    exposed: float
    """Seconds of a micro-batch's collectives during which nothing is computed."""
    update: float
    """Seconds of an optimizer step."""

    def seconds(self, tokens: float, micro_batches: int, updates: int = 1) -> dict[str, float]:
        """Return the seconds of a rank by activity, for `tokens` tokens in equal micro-batches.

        Gathering costs time only if it takes longer than computing.
        """
        computing = tokens * self.token
        gathered = max(0.0, micro_batches * self.gather - computing)
        return {
            "the trainer computes": computing,
            "the trainer's host launches kernels": micro_batches * self.micro_batch,
            "ranks exchange weights and gradients": gathered + micro_batches * self.exposed,
            "the optimizer updates": updates * self.update,
        }


def trainer_costs(sizes: ModelSizes, gpu: Gpu, assumed: Assumptions, mfu: Mfu, ranks: int) -> TrainerCosts:
    """Return the costs of a trainer that shards the model over `ranks`.

    A forward pass takes 2 operations per weight and token; a backward pass takes 4, or 2 for frozen weights.
    Recomputation is contained in the share of FLOPs that is reached (MFU). A micro-batch gathers all weights twice and
    scatters the gradients once. The weights outside of blocks are gathered first and their gradients are scattered
    last, so no computation hides these collectives.
    """
    passes = 2 if mfu == "kept_mfu" else 3
    layer = assumed.compiled_layer_seconds if mfu in ("compiled_mfu", "kept_mfu") else assumed.eager_layer_seconds
    weights, trained, loss, gathered, exposed = sizes.parameters, sizes.trained, 0.0, 0.0, 0.0
    if ranks > 1:
        collectives = COLLECTIVES * (sizes.blocks + 1)
        byte_seconds = (ranks - 1) / ranks / (gpu.collective(ranks) * assumed.network_share)
        gathered = (4 + 4 * trained) * weights * byte_seconds + collectives * (ranks - 1) * assumed.hop_seconds
        exposed = (2 + 4 * trained) * sizes.root * byte_seconds + collectives * assumed.collective_seconds
        loss = assumed.sharded_loss
    return TrainerCosts(
        token=(4 + 2 * trained) * weights * (1 + loss) / (gpu.flops * getattr(assumed, mfu)),
        micro_batch=passes * sizes.blocks * layer,
        gather=gathered,
        exposed=exposed,
        update=32 * weights / ranks * trained / (gpu.memory_bandwidth * assumed.memory_share),
    )


def mfu_of(model: ModelSettings, trainer: TrainerSettings) -> Mfu:
    """Return the name of the assumption that says which share of FLOPs (MFU) such a trainer reaches."""
    if not trainer.packing:
        return "trainer_mfu"
    if not trainer.torch_compile:
        return "packed_mfu"
    return "compiled_mfu" if model.gradient_checkpointing else "kept_mfu"


def sync_seconds(
    sizes: ModelSizes, gpu: Gpu, assumed: Assumptions, servers: int, transfer: Transfer
) -> tuple[float, float]:
    """Return two times in seconds.

    The first is to publish new weights, while servers continue; the second is to load them, while servers wait.
    """
    moved, tensors = 2 * sizes.parameters, sizes.tensors * assumed.tensor_seconds
    if transfer == "adapter":
        return assumed.adapter_publish, assumed.adapter_load
    if transfer == "file":
        return moved / assumed.write_bandwidth, assumed.sync_seconds + servers * moved / assumed.shared_bandwidth
    if transfer == "delta":
        put = moved / assumed.delta_bandwidth
        return put, assumed.sync_seconds + put + servers * assumed.delta_share * moved / assumed.shared_bandwidth
    seconds = assumed.sync_seconds + tensors + moved / assumed.load_bandwidth
    return 0.0, seconds + (moved / (gpu.network * assumed.network_share) if transfer == "nccl" else 0.0)


class LanguagePlan:
    """The plan of a recipe of train-vlm on many GPUs of one kind.

    Raises:
        ConfigurationError: a server does not fit on a node, or a rank does not fit on a GPU with any number of ranks.
    """

    def __init__(
        self, settings: TrainVLMSettings, machine: Machine, sizes: ModelSizes, gpu: Gpu, assumed: Assumptions
    ) -> None:
        self.settings, self.machine, self.sizes, self.gpu, self.assumed = settings, machine, sizes, gpu, assumed
        self.rollouts = settings.rollouts.groups_per_step * settings.rollouts.group_size
        self.gpus_per_server, self.fewest_ranks = self._server_size(), self._fewest_ranks()

    def best(self, gpus: int) -> tuple[int, int]:
        """Return the number of servers and the number of ranks that make a step shortest.

        On several nodes the trainer has whole nodes.

        Raises:
            ConfigurationError: a server and the trainer do not fit on so few GPUs.
        """
        node, sharing = self.gpu.per_node, self.machine.trainer.context_parallel
        ranks = [
            each for each in (*((1, 2, 4) if gpus <= node else ()), *range(node, gpus, node)) if not each % sharing
        ]
        fitting = [each for each in ranks if self.fewest_ranks <= each <= gpus - self.gpus_per_server]
        if not fitting:
            raise ConfigurationError(
                f"a server takes {self.gpus_per_server} GPUs of {self.gpu.name} and the trainer {self.fewest_ranks}",
                code="gpus_too_few",
                where=f"--gpus {gpus}",
                remedy="give more GPUs, or larger ones (--gpu)",
            )
        layouts = [((gpus - each) // self.gpus_per_server, each) for each in fitting]
        return min(layouts, key=lambda layout: self.step(*layout).seconds)

    def step(self, servers: int, ranks: int) -> StepTime:
        """Return the seconds of a step, assuming that all episodes except the longest ones are like the mean one."""
        lora, assumed = self.settings.model.lora, self.assumed
        alone = lora is not None and lora.served_as == "adapter"
        transfer: Transfer = "adapter" if alone else self.machine.servers.weight_transfer
        synced = sum(sync_seconds(self.sizes, self.gpu, assumed, servers, transfer))
        return StepTime(
            rollouts=self._rollouts(servers),
            training=self._training(ranks),
            others={"batches are made": assumed.rollout_seconds * self.rollouts, "weights are synced": synced},
            overlaps=self.settings.rollouts.max_staleness > 0,
        )

    def _rollouts(self, servers: int) -> dict[str, float]:
        """Return the seconds of rollouts by activity.

        A forward pass of a server reads all weights once for all sequences that it decodes. The flow's event loop works
        at the same time. Only the seconds by which it takes longer than the servers are counted.
        """
        assumed, gpu = self.assumed, self.gpu
        read = gpu.memory_bandwidth * assumed.memory_share * self.gpus_per_server
        each_pass = assumed.pass_seconds + self.sizes.estimate.server_weights / read
        token = 2 * self.sizes.parameters / (gpu.flops * self.gpus_per_server * assumed.prefill_mfu)
        cache = self.sizes.key_value_bytes / read * assumed.context()
        limit = self.machine.limits.max_concurrent if self.machine.workers.environments else self.rollouts
        # If servers or environments do not have room for all episodes at once, they are played in waves.
        waves = max(1.0, self.rollouts / (servers * self.slots()))
        played = max(1.0, self.rollouts / limit)
        sequences, answers = max(1.0, self.rollouts / servers), assumed.turns * assumed.completion_tokens
        prompts = sequences * (assumed.prompt_tokens / self.settings.rollouts.group_size + assumed.new_tokens())
        environment = assumed.turns * assumed.environment_seconds
        seconds = {
            "servers read weights": waves * answers * each_pass,
            "servers compute tokens": sequences * answers * (token + cache) + prompts * token,
            "the longest episodes": (assumed.longest - 1) * answers * (each_pass + token + cache),
            "environments": environment,
            "too few environments at once": max(0.0, played - waves) * answers * each_pass + (played - 1) * environment,
        }
        requests = self.rollouts * assumed.turns
        flow = requests * (assumed.request_seconds + assumed.images_per_turn * assumed.image_seconds)
        return seconds | {"the flow's event loop": max(0.0, flow - sum(seconds.values()))}

    def _training(self, ranks: int) -> dict[str, float]:
        """Return the seconds of training by activity.

        All rollouts are trained on. They are divided equally among the ranks, but each rank has at least one.
        """
        trainer, sharing = self.settings.trainer, self.machine.trainer.context_parallel
        each = self.assumed.trained_tokens(self.settings.rollouts.group_size, trainer.packing)
        tokens = max(1.0, self.rollouts / (ranks // sharing)) * each
        updates = ceil(self.rollouts / (trainer.samples_per_update or self.rollouts))
        micro_batches = max(updates, ceil(tokens / trainer.max_tokens_per_micro_batch))
        costs = trainer_costs(self.sizes, self.gpu, self.assumed, mfu_of(self.settings.model, trainer), ranks)
        return costs.seconds(tokens / sharing, micro_batches, updates)

    def slots(self) -> int:
        """Return the number of sequences that a server decodes at once, limited by vLLM's setting and by its cache."""
        room = USABLE * self.gpu.memory * self.gpus_per_server - self.sizes.estimate.server_weights
        most = int(self.machine.servers.arguments.get("max_num_seqs", MAX_SEQUENCES))
        sequence = self.sizes.key_value_bytes * self.settings.inference.max_model_len + self.sizes.state_bytes
        return min(most, int(room / sequence))

    def rank_bytes(self, ranks: int) -> int:
        """Return the bytes that one rank needs if the trainer has `ranks` ranks."""
        return self.sizes.estimate.over(ranks, self.machine.trainer.context_parallel).trainer

    def server_bytes(self) -> int:
        """Return the bytes that a server needs on each of its GPUs when all its slots are in use."""
        context = self.settings.inference.max_model_len
        return sum(server_parts(self.sizes, self.gpus_per_server, self.slots(), context).values())

    def _server_size(self) -> int:
        """Return the number of GPUs for one server.

        It is at least the number in the recipe, and half of the GPUs' memory is free for sequences.

        Raises:
            ConfigurationError: a server does not fit on a node.
        """
        first = max((len(each) for each in self.machine.servers.gpus), default=1)
        weights, context = self.sizes.estimate.server_weights, self.settings.inference.max_model_len
        for count in (first, 2 * first, 4 * first, 8 * first):
            room = USABLE * self.gpu.memory * count - weights
            if count <= self.gpu.per_node and room > max(weights, self.sizes.key_value_bytes * context):
                return count
        raise ConfigurationError(
            f"a server with {weights / GIB:.0f} GiB of weights and one sequence of {context} tokens does not fit on "
            f"{self.gpu.per_node} GPUs",
            code="server_does_not_fit",
            where=f"--gpu {self.gpu.name}",
            remedy="use larger GPUs, a smaller model, or a smaller inference.max_model_len",
        )

    def _fewest_ranks(self) -> int:
        for ranks in (1, 2, 4, *range(8, 8193, 8)):
            shared = ranks % self.machine.trainer.context_parallel == 0
            if shared and OVERHEAD * self.rank_bytes(ranks) <= self.gpu.memory:
                return ranks
        raise ConfigurationError(
            f"a rank of the trainer needs {self.rank_bytes(8192) / GIB:.0f} GiB even with 8192 ranks, and a GPU has "
            f"{self.gpu.memory / GIB:.0f}: a gathered block and the activations of a micro-batch are not sharded",
            code="trainer_does_not_fit",
            where=f"--gpu {self.gpu.name}, trainer.max_tokens_per_micro_batch",
            remedy="lower trainer.max_tokens_per_micro_batch, set model.gradient_checkpointing = true, raise "
            "machine.trainer.context_parallel, or use larger GPUs",
        )


SIZES = (8, 64, 512)
"""Numbers of GPUs for which a plan is made by default."""
STEP_HEAD = ("step", "rollouts", "training", "others", "rollouts/s", "GPU s each", "bottleneck")


class Plan(NamedTuple):
    """The result of planning, ready to be printed."""

    assumed: Settings
    title: str
    rows: list[list[str]]
    """A table. Its first row has the column names, and each further row is the plan for one number of GPUs."""


def plan_language(recipe: TrainVlm, gpus: Sequence[int], gpu: Gpu, values: Mapping[str, Any]) -> Plan:
    """Plan the steps of a recipe of train-vlm on each of the numbers `gpus` of GPUs.

    Args:
        values: assumptions that replace the defaults, by name.
    """
    settings = recipe.settings_for(TrainVLMSettings)
    sizes, assumed = sizes_of(settings), assumptions(Assumptions, _episodes(settings) | dict(values))
    plan, played = LanguagePlan(settings, recipe.machine, sizes, gpu, assumed), recipe.rollouts
    rows = [["GPUs", "servers", "ranks", "server GiB", "rank GiB", *STEP_HEAD]]
    for count in gpus or SIZES:
        try:
            servers, ranks = plan.best(count)
        except ConfigurationError as error:
            if len(gpus) == 1:
                raise
            rows.append([f"{count:,}", *[""] * (len(rows[0]) - 2), error.what])
            continue
        tensor = f" x {plan.gpus_per_server}" * (plan.gpus_per_server > 1)
        memory = [f"{size / GIB:.0f}" for size in (plan.server_bytes(), plan.rank_bytes(ranks))]
        cells = step_cells(plan.step(servers, ranks), count, plan.rollouts)
        rows.append([f"{count:,}", f"{servers:,}{tensor}", f"{ranks:,}", *memory, *cells])
    title = plan_title(sizes.parameters, played.groups_per_step, played.group_size, played.max_staleness)
    return Plan(assumed, title, rows)


def _episodes(settings: TrainVLMSettings) -> dict[str, Any]:
    """Return the assumptions about episodes that follow from the recipe, by name."""
    environment, sampling = settings.environment, settings.rollouts.sampling
    kind = ENVIRONMENTS[environment.name]
    most = environment.args.get("max_turns") or getattr(kind, "max_turns", None) or 1
    return {
        "turns": 1.0 if most == 1 else most / 2,
        "dialogue": bool(getattr(kind, "dialogue", True)),
        "prompt_tokens": min(512, max(16, settings.inference.max_model_len - sampling.max_tokens)),
        "completion_tokens": sampling.max_tokens / 2,
    }


def plan_title(parameters: int, groups_per_step: int, group_size: int, max_staleness: int) -> str:
    """Return the title of a plan."""
    size, ahead = f"{parameters / 1e9:.3g} billion parameters", f"{max_staleness} steps ahead of the training"
    return f"{size}, {groups_per_step} groups of {group_size} in a step, {ahead}"


def step_cells(step: StepTime, gpus: int, rollouts: int) -> list[str]:
    """Return the cells that describe a step in the table of a plan, in the columns `STEP_HEAD`."""
    sides = (sum(side.values()) for side in (step.rollouts, step.training, step.others))
    seconds = [f"{each:,.1f} s" for each in (step.seconds, *sides)]
    name, share = step.bottleneck()
    of_rollouts = [f"{rollouts / step.seconds:,.1f}", f"{gpus * step.seconds / rollouts:,.2f}"]
    return [*seconds, *of_rollouts, f"{name} ({share:.0%} of the step)"]


def assumptions(kind: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Return assumptions of class `kind` with the given values and defaults for all others.

    Raises:
        ConfigurationError: an assumption is unknown, or a value is out of bounds.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(
            explain(error, "assume", kind), code=error.errors()[0]["type"], where="--assume"
        ) from error
