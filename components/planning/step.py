"""Seconds of a step of train-vlm on N GPUs by formulas, the best share of the GPUs, and the bottleneck."""

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
"""Of a block in a micro-batch: its weights are gathered forward and backward, its gradients are scattered."""
USABLE = 0.9
"""Of a server's GPU; the rest is CUDA's context, NCCL and fragments."""
MAX_SEQUENCES = 256
"""vLLM's max_num_seqs."""


class Assumptions(Settings):
    """What is neither in a recipe nor on a data sheet. The descriptions say where each is from; GPUs were H200s and
    H100s. The first ones are of the mean episode: `armature plan` takes them from the recipe where it says them.
    """

    turns: PositiveFloat = 1.0
    """assumed: turns of an episode"""
    dialogue: bool = False
    """of the environment: a turn's prompt holds the conversation before it"""
    prompt_tokens: PositiveInt = 512
    """assumed: tokens of the first prompt, images included"""
    turn_tokens: PositiveInt = 256
    """assumed: tokens of a later observation, images included"""
    images_per_turn: NonNegativeInt = 1
    """assumed: images of an observation"""
    completion_tokens: PositiveFloat = 128
    """assumed: tokens of an answer"""
    environment_seconds: NonNegativeFloat = 0.05
    """assumed: of the environment for a turn"""
    longest: float = Field(2.0, ge=1)
    """assumed: tokens of the longest episode, over the mean"""
    trainer_mfu: PositiveFloat = Field(0.26, description="fitted: of the bf16 FLOPs, not packed, two models" + STEP)
    packed_mfu: PositiveFloat = Field(0.4, description="fitted: packed, not compiled, one case" + STEP)
    compiled_mfu: PositiveFloat = Field(0.49, description="fitted: packed and compiled, three cases" + STEP)
    kept_mfu: PositiveFloat = Field(0.64, description="fitted: the same, activations kept, three cases" + STEP)
    # Three micro-batches in place of one took 0.79 s more; a line through three compiled cases leaves 0.115 s.
    eager_layer_seconds: NonNegativeFloat = Field(0.395 / 68 / 3, description="measured: of a layer, each pass" + STEP)
    compiled_layer_seconds: NonNegativeFloat = Field(0.115 / 68 / 3, description="fitted: the same, compiled" + STEP)
    # Two GPUs took 1,775 ms for half of 3,225, and 117 ms besides, less the 42 ms of one GPU, in 207 collectives.
    sharded_loss: NonNegativeFloat = Field(2 * 1775 / 3225 - 1, description="measured: more, beside NCCL" + TWO)
    collective_seconds: NonNegativeFloat = Field(0.075 / 207, description="measured: of a collective, exposed" + TWO)
    prefill_mfu: PositiveFloat = 0.4
    """assumed: of the bf16 FLOPs for prompts and decoded tokens"""
    memory_share: PositiveFloat = 0.7
    """assumed: of the memory bandwidth, when weights are read"""
    network_share: PositiveFloat = 0.7
    """assumed: of NVLink and network, in collectives"""
    pass_seconds: NonNegativeFloat = 0.003
    """assumed: of a server's forward pass besides the GPU's"""
    hop_seconds: NonNegativeFloat = 5e-6
    """assumed: of one rank to the next in a ring"""
    request_seconds: NonNegativeFloat = 0.0015
    """assumed: of the flow's event loop for a turn"""
    image_seconds: NonNegativeFloat = 0.037 / 50
    """measured: of the event loop for an image"""
    rollout_seconds: NonNegativeFloat = 1 / 5259
    """measured: of a rollout in a batch"""
    sync_seconds: NonNegativeFloat = 0.15
    """measured: 0.12 to 0.19 s of a sync of a tiny model"""
    tensor_seconds: NonNegativeFloat = Field(0.125 / 824, description="measured: to publish a tensor" + SYNC)
    load_bandwidth: PositiveFloat = Field(12e9, description="measured: bytes/s that vLLM loads" + SYNC)
    write_bandwidth: PositiveFloat = Field(0.56e9, description="measured: bytes/s of a checkpoint on a disk" + SYNC)
    shared_bandwidth: PositiveFloat = 2e9
    """assumed: bytes/s of the folder that servers load from"""
    delta_bandwidth: PositiveFloat = Field(4e9, description="measured: bytes/s of weights that are compared" + SYNC)
    delta_share: PositiveFloat = Field(0.03, description="measured: moved of weights of which 2 % changed" + SYNC)
    adapter_publish: NonNegativeFloat = Field(0.28, description="measured: seconds to publish adapters" + SYNC)
    adapter_load: NonNegativeFloat = Field(0.94, description="measured: seconds to load 60 MB of adapters" + SYNC)

    def new_tokens(self) -> float:
        """Prompt tokens of an episode after its first prompt that no cache has."""
        return (self.turns - 1) * (self.turn_tokens if self.dialogue else self.prompt_tokens)

    def context(self) -> float:
        """Mean tokens that a decoded token attends to."""
        earlier = (self.turns - 1) / 2 * (self.turn_tokens + self.completion_tokens) if self.dialogue else 0.0
        return self.prompt_tokens + earlier + self.completion_tokens / 2

    def trained_tokens(self, group_size: int, packing: bool) -> float:
        """Tokens that the trainer computes for an episode; packed, the group's first prompt counts once."""
        first = self.prompt_tokens / group_size if packing else self.prompt_tokens
        return first + self.new_tokens() + self.turns * self.completion_tokens


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they are spent on.

    `rollouts` and `training` follow one another, or are at the same time (`overlaps`); `others` come on top.
    """

    rollouts: Mapping[str, float]
    training: Mapping[str, float]
    others: Mapping[str, float]
    overlaps: bool

    @property
    def seconds(self) -> float:
        rollouts, training = sum(self.rollouts.values()), sum(self.training.values())
        return (max(rollouts, training) if self.overlaps else rollouts + training) + sum(self.others.values())

    def bottleneck(self) -> tuple[str, float]:
        """Return the longest part that the step waits for, and its share of the step."""
        sides = [self.rollouts, self.training]
        waited = [max(sides, key=lambda side: sum(side.values()))] if self.overlaps else sides
        parts = {name: seconds for side in (*waited, self.others) for name, seconds in side.items()}
        name = max(parts, key=lambda each: parts[each])
        return name, parts[name] / max(self.seconds, 1e-12)


@dataclass(frozen=True)
class TrainerCosts:
    """Seconds of a rank: for a token; for each micro-batch of the host, to gather weights, and of collectives that
    nothing hides; of an optimizer step."""

    token: float
    micro_batch: float
    gather: float
    exposed: float
    update: float

    def seconds(self, tokens: float, micro_batches: int, updates: int = 1) -> dict[str, float]:
        """Seconds of `tokens` of a rank in micro-batches of one size. Gathering is hidden behind computing."""
        computing = tokens * self.token
        gathered = max(0.0, micro_batches * self.gather - computing)
        return {
            "the trainer computes": computing,
            "the trainer's host launches kernels": micro_batches * self.micro_batch,
            "ranks exchange weights and gradients": gathered + micro_batches * self.exposed,
            "the optimizer updates": updates * self.update,
        }


def trainer_costs(sizes: ModelSizes, gpu: Gpu, assumed: Assumptions, mfu: Mfu, ranks: int) -> TrainerCosts:
    """Seconds of a trainer that splits the model over `ranks`.

    A forward pass is 2 operations for a weight and token, a backward pass 4, or 2 for weights that are not trained;
    recomputation is counted in the share of the FLOPs that is reached. A micro-batch gathers all weights twice and
    scatters the gradients once. Nothing hides the gathering of what is in no block, which comes first, and the
    scattering of its gradients, which comes last.
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
    """Return the share of the FLOPs that was measured of a trainer like this."""
    if not trainer.packing:
        return "trainer_mfu"
    if not trainer.torch_compile:
        return "packed_mfu"
    return "compiled_mfu" if model.gradient_checkpointing else "kept_mfu"


def sync_seconds(
    sizes: ModelSizes, gpu: Gpu, assumed: Assumptions, servers: int, transfer: Transfer
) -> tuple[float, float]:
    """Seconds to publish new weights, while servers go on; and seconds to load them, while they wait."""
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
    """Plans a recipe of train-vlm on many GPUs of a kind, `gpus_per_server` to a server.

    Raises:
        ConfigurationError: a server fits on no node, or a rank on no GPU, however many there are.
    """

    def __init__(
        self, settings: TrainVLMSettings, machine: Machine, sizes: ModelSizes, gpu: Gpu, assumed: Assumptions
    ) -> None:
        self.settings, self.machine, self.sizes, self.gpu, self.assumed = settings, machine, sizes, gpu, assumed
        self.rollouts = settings.rollouts.groups_per_step * settings.rollouts.group_size
        self.gpus_per_server, self.fewest_ranks = self._server_size(), self._fewest_ranks()

    def best(self, gpus: int) -> tuple[int, int]:
        """Return the servers and ranks with the shortest step; on several nodes the trainer has whole ones.

        Raises:
            ConfigurationError: so few GPUs do not hold a server and the trainer.
        """
        node, sharing = self.gpu.per_node, self.machine.trainer_context_parallel
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
        """Seconds of a step on so many servers and ranks, with all episodes but the longest like the mean one."""
        lora, assumed = self.settings.model.lora, self.assumed
        alone = lora is not None and lora.served_as == "adapter"
        transfer: Transfer = "adapter" if alone else self.machine.weight_transfer
        synced = sum(sync_seconds(self.sizes, self.gpu, assumed, servers, transfer))
        return StepTime(
            rollouts=self._rollouts(servers),
            training=self._training(ranks),
            others={"batches are made": assumed.rollout_seconds * self.rollouts, "weights are synced": synced},
            overlaps=self.settings.rollouts.max_staleness > 0,
        )

    def _rollouts(self, servers: int) -> dict[str, float]:
        """A forward pass of a server reads all weights once, for all sequences that it decodes. The flow's event loop
        works meanwhile, and counts where it needs longer."""
        assumed, gpu = self.assumed, self.gpu
        read = gpu.memory_bandwidth * assumed.memory_share * self.gpus_per_server
        each_pass = assumed.pass_seconds + self.sizes.estimate.server_weights / read
        token = 2 * self.sizes.parameters / (gpu.flops * self.gpus_per_server * assumed.prefill_mfu)
        cache = self.sizes.key_value_bytes / read * assumed.context()
        limit = self.machine.max_concurrent if self.machine.environment_processes else self.rollouts
        # Episodes follow one another in waves where servers, or environments, have no room for all of them.
        waves = max(1.0, self.rollouts / (servers * self.slots()))
        played = max(1.0, self.rollouts / limit)
        sequences, answers = max(1.0, self.rollouts / servers), assumed.turns * assumed.completion_tokens
        prompts = sequences * (assumed.prompt_tokens / self.settings.rollouts.group_size + assumed.new_tokens())
        environment = assumed.turns * assumed.environment_seconds
        found = {
            "servers read weights": waves * answers * each_pass,
            "servers compute tokens": sequences * answers * (token + cache) + prompts * token,
            "the longest episodes": (assumed.longest - 1) * answers * (each_pass + token + cache),
            "environments": environment,
            "too few environments at once": max(0.0, played - waves) * answers * each_pass + (played - 1) * environment,
        }
        requests = self.rollouts * assumed.turns
        flow = requests * (assumed.request_seconds + assumed.images_per_turn * assumed.image_seconds)
        return found | {"the flow's event loop": max(0.0, flow - sum(found.values()))}

    def _training(self, ranks: int) -> dict[str, float]:
        """All rollouts are trained on; ranks have equal parts, but no rank less than a row."""
        trainer, sharing = self.settings.trainer, self.machine.trainer_context_parallel
        each = self.assumed.trained_tokens(self.settings.rollouts.group_size, trainer.packing)
        tokens = max(1.0, self.rollouts / (ranks // sharing)) * each
        updates = ceil(self.rollouts / (trainer.samples_per_update or self.rollouts))
        micro_batches = max(updates, ceil(tokens / trainer.max_tokens_per_micro_batch))
        costs = trainer_costs(self.sizes, self.gpu, self.assumed, mfu_of(self.settings.model, trainer), ranks)
        return costs.seconds(tokens / sharing, micro_batches, updates)

    def slots(self) -> int:
        """Sequences that a server decodes at once: vLLM's most, or as many as its cache has room for."""
        room = USABLE * self.gpu.memory * self.gpus_per_server - self.sizes.estimate.server_weights
        most = int(self.machine.server_arguments.get("max_num_seqs", MAX_SEQUENCES))
        return min(most, int(room / (self.sizes.key_value_bytes * self.settings.inference.max_model_len)))

    def rank_bytes(self, ranks: int) -> int:
        return self.sizes.estimate.over(ranks, self.machine.trainer_context_parallel).trainer

    def server_bytes(self) -> int:
        """Bytes of one of the GPUs of a server whose slots are all in use."""
        context = self.settings.inference.max_model_len
        return sum(server_parts(self.sizes, self.gpus_per_server, self.slots(), context).values())

    def _server_size(self) -> int:
        """As the recipe says, else the fewest GPUs of a node with half of their memory left for sequences."""
        first = max((len(each) for each in self.machine.server_gpus), default=1)
        weights, context = self.sizes.estimate.server_weights, self.settings.inference.max_model_len
        for count in (first, 2 * first, 4 * first, 8 * first):
            room = USABLE * self.gpu.memory * count - weights
            if count <= self.gpu.per_node and room > max(weights, self.sizes.key_value_bytes * context):
                return count
        raise ConfigurationError(
            f"the weights of a server, {weights / GIB:.0f} GiB, and one sequence of {context} tokens leave too little "
            f"room on {self.gpu.per_node} GPUs",
            code="server_does_not_fit",
            where=f"--gpu {self.gpu.name}",
            remedy="take larger GPUs, a smaller model, or a smaller inference.max_model_len",
        )

    def _fewest_ranks(self) -> int:
        for ranks in (1, 2, 4, *range(8, 8193, 8)):
            shared = ranks % self.machine.trainer_context_parallel == 0
            if shared and OVERHEAD * self.rank_bytes(ranks) <= self.gpu.memory:
                return ranks
        raise ConfigurationError(
            f"a rank of the trainer needs {self.rank_bytes(8192) / GIB:.0f} GiB, however many there are, of "
            f"{self.gpu.memory / GIB:.0f}: a gathered block and the activations of a micro-batch are not split",
            code="trainer_does_not_fit",
            where=f"--gpu {self.gpu.name}, trainer.max_tokens_per_micro_batch",
            remedy="lower trainer.max_tokens_per_micro_batch, set model.gradient_checkpointing = true, raise "
            "machine.trainer_context_parallel, or take larger GPUs",
        )


SIZES = (8, 64, 512)
"""Numbers of GPUs that are planned if none is given."""
STEP_HEAD = ("step", "rollouts", "training", "others", "rollouts/s", "GPU s each", "bottleneck")


class Plan(NamedTuple):
    """Assumptions of a plan, its title, and a table with a row for each number of GPUs below its head."""

    assumed: Settings
    title: str
    rows: list[list[str]]


def plan_language(recipe: TrainVlm, gpus: Sequence[int], gpu: Gpu, values: Mapping[str, Any]) -> Plan:
    """Plan the steps of a recipe of train-vlm, see `Plan`."""
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
    """Return the episodes that the estimate assumes for the recipe."""
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
    size, ahead = f"{parameters / 1e9:.3g} billion parameters", f"{max_staleness} steps ahead of the training"
    return f"{size}, {groups_per_step} groups of {group_size} in a step, {ahead}"


def step_cells(step: StepTime, gpus: int, rollouts: int) -> list[str]:
    sides = (sum(side.values()) for side in (step.rollouts, step.training, step.others))
    seconds = [f"{each:,.1f} s" for each in (step.seconds, *sides)]
    name, share = step.bottleneck()
    of_rollouts = [f"{rollouts / step.seconds:,.1f}", f"{gpus * step.seconds / rollouts:,.2f}"]
    return [*seconds, *of_rollouts, f"{name} ({share:.0%} of the step)"]


def assumptions(kind: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """
    Raises:
        ConfigurationError: an unknown assumption, or a value out of bounds.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(
            explain(error, "assume", kind), code=error.errors()[0]["type"], where="--assume"
        ) from error
