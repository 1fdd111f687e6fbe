"""What training takes of memory, computed before, and whether activations have to be recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForImageTextToText, PreTrainedModel

from armature.components.families.family import family_of
from armature.components.models.blockwise import NF4, SIGNED
from armature.components.models.load import load_config
from armature.components.models.lora import quantized_layers, target_modules
from armature.components.models.settings import ModelSettings
from armature.components.training.processes import TrainerProcesses
from armature.components.training.sharding import blocks, n_parameters
from armature.components.vlm.settings import ChunkedLogprobs, TrainerSettings

# What the backward pass needs, in main memory until then.

SMALLEST = 16 * 1024
"""Bytes of the tensors that are worth a copy."""

Kept = Tensor | tuple[torch.device, Tensor]


@contextmanager
def offloaded_activations() -> Iterator[None]:
    """What autograd keeps of what is computed in here lies in main memory, pinned for a GPU, until it is used.

    The copies are the same bits. They are made in the stream of the computation, so nobody waits for them on the host
    and memory is free for what comes next. Weights stay: they are there anyway, and FSDP gathers them again.
    """
    with saved_tensors_hooks(to_main_memory, from_main_memory):
        yield


def to_main_memory(tensor: Tensor) -> Kept:
    """A copy on the CPU and where it came from; small tensors, and weights or views of them, as they are."""
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(owner, nn.Parameter) or tensor.nbytes < SMALLEST:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def from_main_memory(kept: Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, copy = kept
    return copy.to(device, non_blocking=True)


GIB = 2**30
OVERHEAD = 1.15
"""CUDA's context, NCCL, fragmentation and what is short-lived, over the estimate."""
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank of the trainer, and of one server's weights.

    `models` is 2 where there is a frozen copy for the KL to the initial model. `optimizer` counts fp32 gradients, two
    AdamW moments and, of a model in bf16, what its weights have besides 16 bits: the other 16 of each master with
    trainer.weights = "bfloat16", else an fp32 copy; `main_memory` has what of these trainer.optimizer_states = "cpu"
    keeps there. Of a model that is split over `shards` ranks, weights
    are fp32, and `gathered` is what a rank has whole besides its shards: what is in no block, and the two largest of
    them; a whole vision tower is one, see `armature.components.training.sharding.blocks`.
    `activations` is what a transformer layer keeps for the backward pass (34 bytes per token and hidden unit in
    bf16, arXiv 2205.05198 without the attention scores), once per layer, or once with gradient checkpointing, or where
    they are offloaded;
    `logits` is one chunk of log-probs in fp32 with its gradient, of `triton` the gradient alone in the dtype of the
    products, or all of a micro-batch with logprobs = normal.
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
    main_memory: int = 0

    @property
    def trainer(self) -> int:
        gathered = self.gathered if self.shards > 1 else 0
        return self.weights + self.optimizer + gathered + self.activations + self.logits

    def over(self, shards: int, sharing: int = 1) -> MemoryEstimate:
        """The same training with the model split over `shards` ranks (FSDP2), and sequences over `sharing`."""
        if sharing > 1:
            return replace(self, activations=ceil(self.activations / sharing)).over(shards)
        if shards == 1:
            return self
        weights, moments = self.models * self.parameters * 4, self.trainable * 8
        optimizer = self.trainable * 4 + (0 if self.main_memory else moments)
        main_memory = moments if self.main_memory else 0
        return replace(
            self,
            shards=shards,
            weights=weights // shards,
            optimizer=optimizer // shards,
            main_memory=main_memory // shards,
        )

    def lines(self, available: int | None, where: str) -> list[str]:
        """`available`: bytes that are free `where` a rank is; None: it is on a node that is not known yet."""
        free = "of a node of the cluster" if available is None else f"{available / GIB:.2f} GiB free on {where}"
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
        if self.main_memory:
            states = f"optimizer states       {self.main_memory / GIB:.2f} GiB of main memory, pinned for a GPU"
            table.append(states + (f", for each of {self.shards} ranks" if self.shards > 1 else ""))
        return [
            f"parameters             {self.parameters / 1e6:,.1f} M, {self.trainable / 1e6:,.1f} M trained",
            f"trainer needs          {self.trainer / GIB:.2f} GiB {split}; {free}",
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
    units = [n_parameters(module) for module, _ in blocks(skeleton, family, None)][:-1]
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
    if trainer.activation_offloading:
        layers, kept = 1, 0
    master = {"float32": 4, "bfloat16": 2}[trainer.weights] if model.dtype == "bfloat16" else 0
    low = master if trainer.weights == "bfloat16" else 0
    states = {"device": 8 + low, "cpu": 0, "8bit": 2 + 2 * 4 / SIGNED.block + low}[trainer.optimizer_states]
    few_bits = sum(layer.weight.numel() for _, layer in quantized_layers(skeleton, family)) if model.quantization else 0
    models = 2 if trainer.kl_coefficient and model.lora is None else 1
    chunked = trainer.logprobs if isinstance(trainer.logprobs, ChunkedLogprobs) else None
    chunk = min(chunked.chunk_tokens, tokens) if chunked else tokens
    triton = chunked is not None and chunked.name == "triton"
    return MemoryEstimate(
        parameters=parameters,
        trainable=trainable,
        models=models,
        weights=models * ((parameters - few_bits) * BYTES[model.dtype] + few_bits // 2 + 4 * NF4.blocks(few_bits)),
        optimizer=ceil(trainable * (4 + states + master - low)),
        main_memory=trainable * (8 + low) if trainer.optimizer_states == "cpu" else 0,
        gathered=(parameters - sum(sorted(units)[:-2])) * width,
        activations=17 * width * tokens * text.hidden_size * layers + kept,
        logits=chunk * text.vocab_size * (width if triton else 8),
        server_weights=parameters * {"float32": 4}.get(server_dtype, 2),
    )


def chosen_recomputation(
    source: Path, model: ModelSettings, trainer: TrainerSettings, processes: TrainerProcesses, available: int
) -> ModelSettings:
    """`model` with gradient checkpointing on or off where it is "auto": on if the `available` bytes of a rank do not
    hold the activations of a micro-batch as well. Numbers are the same either way.
    """
    if model.gradient_checkpointing != "auto":
        return model
    kept = model.model_copy(update={"gradient_checkpointing": False})
    here = trainer.model_copy(update={"activation_offloading": False})  # to recompute is faster than to offload it all
    estimate = estimate_memory(source, kept, here, "bfloat16").over(processes.shards, processes.context_parallel)
    return kept.model_copy(update={"gradient_checkpointing": estimate.trainer * OVERHEAD > available})


def keeps_gathered(
    source: Path, model: ModelSettings, trainer: TrainerSettings, processes: TrainerProcesses, available: int
) -> bool:
    """Whether the `available` bytes of a rank hold all weights from a forward pass to its backward pass, so that they
    are gathered once for both. Numbers are the same either way.
    """
    estimate = estimate_memory(source, model, trainer, "bfloat16").over(processes.shards, processes.context_parallel)
    width = 2 if trainer.autocast == "bf16" or model.dtype == "bfloat16" else 4
    return replace(estimate, gathered=estimate.parameters * width).trainer * OVERHEAD <= available


def memory_of_rank(processes: TrainerProcesses, gpu: torch.device | int | None) -> int:
    """Bytes that a rank has for training: those of `gpu` that are free and no server of the run takes, or its part of
    main memory.
    """
    if gpu is None:
        return psutil.virtual_memory().available // processes.processes
    free, total = torch.cuda.mem_get_info(gpu)
    return min(free, int(total * (1 - (processes.server_share or 0.0))))
