"""Know before a run whether the machine and the model fit: memory, then log-probs of both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from components.contracts.machine import Machine
from components.contracts.stages import Artifact, StageContext
from components.inference.command import server_environment
from components.models.families import family_of
from components.models.load import load_config
from components.models.lora import target_modules
from components.models.settings import ModelSettings
from components.models.source import locate
from components.rl.open import open_run
from components.rl.settings import TrainVLMSettings
from components.stages import open_store
from components.training.processes import TrainerProcesses
from components.vlm.settings import ChunkedLogprobs, TrainerSettings

GIB = 2**30
SERVER_SHARE = 0.92
"""vLLM's gpu_memory_utilization (0.26 to 0.32)."""
BYTES = {"float32": 4, "bfloat16": 2}


def check(settings: TrainVLMSettings, inputs: Mapping[str, Artifact], context: StageContext) -> None:
    """Say what the run needs of memory and how well trainer and server agree. Joined servers stay as they are.

    Raises:
        MismatchError: they do not agree; training would be off-policy without knowing it.
    """
    weights = locate(inputs["model"].path, settings.model.revision)
    estimate = estimate_memory(weights, settings.model, settings.trainer, settings.inference.dtype)
    processes = TrainerProcesses.of(context.machine)
    memory = estimate.over(processes.shards)
    available, where = available_memory(processes)
    for line in memory.lines(available, where):
        context.events.message(line)
    if (share := server_share(context.machine, processes)) is not None:
        context.events.message(memory.beside_server(share, torch.cuda.mem_get_info(processes.gpus[0])[1], available))
    if (scaled := scaled_servers(context.machine, memory.server_weights)) is not None:
        context.events.message(scaled)
    with open_run(settings, inputs, context, open_store(context.machine), load_on_join=False) as (run, _):
        for line in run.preflight().lines():
            context.events.message(line)
    context.events.message("trainer and server agree: ready to train")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank of the trainer, and of one server's weights.

    `models` is 2 where there is a frozen copy for the KL to the initial model. `optimizer` counts fp32 gradients, two
    AdamW moments and, of a model in bf16, what its weights have besides 16 bits: the other 16 of each master with
    trainer.weights = "bfloat16", else an fp32 copy. Of a model that is split over `shards` ranks, weights
    are fp32, and `gathered` is what a rank has whole besides its shards: what is in no block, and two blocks.
    `activations` is what a transformer layer keeps for the backward pass (34 bytes per token and hidden unit in
    bf16, arXiv 2205.05198 without the attention scores), once per layer, or once with gradient checkpointing;
    `logits` is one chunk of log-probs in fp32 with its gradient, or all of a micro-batch with logprobs = normal.
    """

    parameters: int
    trainable: int
    models: int
    weights: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    server_weights: int
    shards: int = 1

    @property
    def trainer(self) -> int:
        gathered = self.gathered if self.shards > 1 else 0
        return self.weights + self.optimizer + gathered + self.activations + self.logits

    def over(self, shards: int) -> MemoryEstimate:
        """The same training with the model split over `shards` ranks (FSDP2)."""
        if shards == 1:
            return self
        weights, optimizer = self.models * self.parameters * 4, self.trainable * (4 + 8)
        return replace(self, shards=shards, weights=weights // shards, optimizer=optimizer // shards)

    def lines(self, available: int, where: str) -> list[str]:
        parts = {
            "weights": self.weights,
            "gradients, AdamW, master weights": self.optimizer,
            "activations of a micro-batch": self.activations,
            "log-prob chunk": self.logits,
        }
        split = "unsharded"
        if self.shards > 1:
            parts["gathered at a time"], split = self.gathered, f"on each of {self.shards} ranks"
        table = [f"  {name:<34}{size / GIB:8.2f} GiB" for name, size in parts.items()]
        return [
            f"parameters             {self.parameters / 1e6:,.1f} M, {self.trainable / 1e6:,.1f} M trained",
            f"trainer needs          {self.trainer / GIB:.2f} GiB {split}; {available / GIB:.2f} GiB free on {where}",
            *table,
            f"server weights         {self.server_weights / GIB:.2f} GiB, and its KV cache",
        ]

    def beside_server(self, share: float, total: int, available: int) -> str:
        """Whether the trainer fits on a GPU of `total` bytes with a server that takes `share` of it."""
        server, lacking = int(share * total), self.trainer + int(share * total) - available
        line = f"a server beside it      {server / GIB:.2f} GiB, {share:.0%} of the GPU (gpu_memory_utilization)"
        if self.server_weights > server:
            return line + f"; WARNING: its weights are {self.server_weights / GIB:.2f} GiB"
        if lacking > 0:
            return line + f"; WARNING: {lacking / GIB:.2f} GiB are missing for both"
        return line + f"; {-lacking / GIB:.2f} GiB are left"


def server_share(machine: Machine, processes: TrainerProcesses) -> float | None:
    """The part of the trainer's first GPU that a server of this run takes; None: it is not on it."""
    if not processes.gpus or processes.gpus[0] not in machine.started_server_gpus:
        return None
    return float(machine.server_arguments.get("gpu_memory_utilization", SERVER_SHARE))


def scaled_servers(machine: Machine, weights: int) -> str | None:
    """Whether the most servers that `server_autoscaling` allows, of `weights` bytes each, fit into main memory; None
    where that is not set, or where servers are on GPUs or on a cluster."""
    plan = machine.server_autoscaling
    if plan is None or machine.server_gpus or machine.server_bundle:
        return None
    cache = float(server_environment(machine, api_key="", gpus=())["VLLM_CPU_KVCACHE_SPACE"] or 0)
    needed, free = plan.max_servers * (weights / GIB + cache), psutil.virtual_memory().available / GIB
    line = f"up to {plan.max_servers} servers        {needed:.2f} GiB of weights and KV cache"
    return line + (f"; WARNING: {free:.2f} GiB free on this machine" if needed > free else f"; {free:.2f} GiB free")


def estimate_memory(source: Path, model: ModelSettings, trainer: TrainerSettings, server_dtype: str) -> MemoryEstimate:
    """Counts parameters on the meta device: no weights are read."""
    config = load_config(source, model)
    with torch.device("meta"):
        skeleton = AutoModelForImageTextToText.from_config(config, trust_remote_code=model.trust_remote_code)
    return estimate_memory_of(skeleton, model, trainer, server_dtype)


def estimate_memory_of(
    skeleton: PreTrainedModel, model: ModelSettings, trainer: TrainerSettings, server_dtype: str
) -> MemoryEstimate:
    """`estimate_memory` of a model without weights."""
    config = skeleton.config
    family = family_of(config)
    sizes = {name: parameter.numel() for name, parameter in skeleton.named_parameters()}
    parameters = sum(sizes.values())
    blocks = [_count(module) for module in skeleton.modules() if type(module).__name__ in family.wrap_classes]
    text = config.get_text_config()
    if model.lora is None:
        trainable = sum(size for name, size in sizes.items() if family.component_of(name) not in model.freeze)
    else:
        names = target_modules(skeleton, family, model.lora)
        adapted = [skeleton.get_submodule(name) for name in names if family.component_of(name) not in model.freeze]
        trainable = model.lora.rank * sum(sum(layer.weight.shape) for layer in adapted)
    width = 2 if trainer.autocast == "bf16" or model.dtype == "bfloat16" else 4
    tokens = trainer.max_tokens_per_micro_batch
    layers = 1 if model.gradient_checkpointing else text.num_hidden_layers
    kept = text.num_hidden_layers * tokens * text.hidden_size * width if model.gradient_checkpointing else 0
    master = {"float32": 4, "bfloat16": 2}[trainer.weights] if model.dtype == "bfloat16" else 0
    models = 2 if trainer.kl_coefficient and model.lora is None else 1
    return MemoryEstimate(
        parameters=parameters,
        trainable=trainable,
        models=models,
        weights=models * parameters * BYTES[model.dtype],
        optimizer=trainable * (4 + 8 + master),
        gathered=(parameters - sum(blocks) + 2 * max(blocks, default=0)) * width,
        activations=17 * width * tokens * text.hidden_size * layers + kept,
        logits=(trainer.logprobs.chunk_tokens if isinstance(trainer.logprobs, ChunkedLogprobs) else tokens)
        * text.vocab_size
        * 4
        * 2,
        server_weights=parameters * {"float32": 4}.get(server_dtype, 2),
    )


def available_memory(processes: TrainerProcesses) -> tuple[int, str]:
    """Free bytes on the trainer's first GPU, or of main memory the part of each rank here."""
    if processes.gpus:
        return torch.cuda.mem_get_info(processes.gpus[0])[0], f"GPU {processes.gpus[0]}"
    where = "this machine" + (f" for each of {processes.processes} ranks" if processes.processes > 1 else "")
    return psutil.virtual_memory().available // processes.processes, where


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
