"""Memory of training: offloading activations, an estimate before the run, and the choice to recompute activations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from armature.components.families.family import family_of
from armature.components.models.attention import LINEAR
from armature.components.models.blockwise import NF4, SIGNED
from armature.components.models.load import load_config, recomputed_layers
from armature.components.models.lora import quantized_layers, target_modules
from armature.components.models.settings import ModelSettings
from armature.components.training.processes import TrainerProcesses
from armature.components.training.sharding import blocks, n_parameters
from armature.components.vlm.settings import ChunkedLogprobs, TrainerSettings

SMALLEST = 16 * 1024
"""Smallest size in bytes of a tensor that is offloaded."""

Offloaded = Tensor | tuple[torch.device, Tensor]
"""A tensor that stayed where it was, or the device it came from and its copy in main memory."""


@contextmanager
def offloaded_activations() -> Iterator[None]:
    """Keep the tensors that autograd saves within this block in main memory until the backward pass uses them.

    The copies are exact, and pinned for a GPU. They are made in the stream of the computation, so the host does not
    wait for them, and the GPU memory is free for the operations that follow. Weights are not copied: they stay on the
    GPU anyway, and FSDP gathers them again.
    """
    with saved_tensors_hooks(to_main_memory, from_main_memory):
        yield


def to_main_memory(tensor: Tensor) -> Offloaded:
    """Return the tensor's device and a copy on the CPU; small tensors and (views of) weights are returned unchanged."""
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(owner, nn.Parameter) or tensor.nbytes < SMALLEST:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def from_main_memory(offloaded: Offloaded) -> Tensor:
    """Return the tensor from which `to_main_memory` made `offloaded`, on its original device."""
    if isinstance(offloaded, Tensor):
        return offloaded
    device, copy = offloaded
    return copy.to(device, non_blocking=True)


GIB = 2**30
OVERHEAD = 1.15
"""Factor by which the sum of all estimated bytes is multiplied.

It accounts for CUDA's context, NCCL, fragmentation and short-lived tensors.
"""
FREE = 0.05
"""Part of a rank's memory that stays free if activations are kept."""
IMAGE_TOKENS = 1 / 8
"""Assumed part of a micro-batch's tokens that stand for images.

It is 1/14 if 8 answers of 400 tokens share a prompt with an image of 256 tokens, and 1/3 for one answer.
"""
BYTES = {"float32": 4, "bfloat16": 2}


CHUNK = 64
"""Number of tokens after which the chunked rule of linear attention keeps a state."""


def recurrent_layers(text: PreTrainedConfig) -> tuple[int, int]:
    """Return how many layers of a language model have linear attention, and the bytes of the state of one of them.

    The state is fp32: key width x value width for each value head.
    """
    layers = list(getattr(text, "layer_types", None) or ()).count(LINEAR)
    widths = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return layers, 4 * prod(getattr(text, name) for name in widths) if layers else 0


def expert_values(text: PreTrainedConfig) -> int:
    """Return how many values a layer's grouped products save for the backward pass, for a token: for each of its
    experts the input, both halves of the first product, the activation of one, their product, and the output."""
    used = getattr(text, "num_experts_per_tok", None) or 0
    return used * (2 * text.hidden_size + 4 * text.moe_intermediate_size) if used else 0


def layer_values(skeleton: PreTrainedModel, model: ModelSettings, trainer: TrainerSettings) -> int:
    """Return how many values a text layer saves for the backward pass, for a token.

    Attention saves queries, keys, values and its output, but no scores. The MLP saves gate, activation, up and their
    product. A norm saves its input, its normalized input and its output, and in bf16 the input in fp32 too. Under
    autocast from fp32 weights the sums between layers are fp32, which counts twice.

    Compiled layers save of a norm the input, of the first one the output too, because attention is not compiled with
    it, and of the MLP gate and up; see `armature.components.models.compiled`.
    """
    text = skeleton.config.get_text_config()
    experts = expert_values(text)
    towers = tuple(f"{prefix}." for prefix in family_of(skeleton.config).vision)
    layers = {name: each for name, each in skeleton.named_modules() if isinstance(each, GradientCheckpointingLayer)}
    layer = [each for name, each in layers.items() if not name.startswith(towers)][-1]
    different = getattr(text, "per_layer_config", None)
    last = text if different is None else different[text.num_hidden_layers - 1]
    hidden, heads = last.hidden_size, last.num_attention_heads
    size = getattr(last, "head_dim", None) or hidden // heads
    attention = (heads + (getattr(last, "num_key_value_heads", None) or heads)) * size
    inner = 0 if experts else last.intermediate_size
    norms = [
        name
        for name, each in layer.named_parameters()
        if "norm" in name and name.endswith("weight") and each.dim() == 1
    ]
    beside_heads = attention * any("q_norm" in name for name in norms)
    around = sum("q_norm" not in name and "k_norm" not in name for name in norms)
    mixed, low = trainer.autocast == "bf16" and model.dtype == "float32", model.dtype == "bfloat16"
    if trainer.torch_compile:
        return hidden * (around + 1 + mixed) + 2 * attention + 2 * inner + beside_heads + experts
    norm = ceil(hidden * around * (6.5 if mixed else 4 if low else 3))
    return norm + 2 * attention + 4 * inner + (3 if low or mixed else 2) * beside_heads + experts


def vision_tower(config: PreTrainedConfig) -> tuple[int, int, float]:
    """Return the layers of the vision tower, its width, and the number of its patches that become one token."""
    vision = config.vision_config
    width = getattr(vision, "embed_dim", None) or vision.hidden_size  # both: hidden_size is the language model's
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    if tokens := getattr(config, "mm_tokens_per_image", None):
        return layers, width, (vision.image_size // vision.patch_size) ** 2 / tokens
    if ratio := getattr(config, "downsample_ratio", None):
        return layers, width, ratio**-2
    names = ("spatial_merge_size", "scale_factor", "pooling_kernel_size")
    sides = (getattr(part, name, None) for part in (vision, config) for name in names)
    return layers, width, next(filter(None, sides), 2 if config.model_type == "molmo2" else 1) ** 2


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes of one rank of the trainer, and of one server's weights."""

    parameters: int
    """Number of the model's parameters."""
    trainable: int
    """Number of trained parameters."""
    models: int
    """Number of models in memory: 2 if there is a frozen copy for the KL to the initial model."""
    weights: int
    """Bytes of the weights. In a sharded model they are fp32."""
    optimizer: int
    """Bytes of fp32 gradients, two AdamW moments and, for a model in bf16, the fp32 part of its weights: the other 16
    bits of each master with trainer.weights = "bfloat16", else an fp32 copy."""
    gathered: int
    """With a sharded model: bytes that a rank holds unsharded besides its shards. These are the weights outside of
    blocks, and the two largest blocks; see `armature.components.training.sharding.blocks`."""
    activations: int
    """Bytes that transformer layers save for the backward pass; see `layer_values`. With gradient checkpointing or
    offloading, one layer counts. A layer with linear attention also saves a state in fp32 for every 64 tokens."""
    images: int
    """Bytes that the layers of a trained vision tower save for the backward pass, for the assumed part of images in a
    micro-batch; see `IMAGE_TOKENS`."""
    logits: int
    """Bytes of one chunk of logits in fp32 with its gradient; with `triton` the gradient alone, in the dtype of matrix
    products; with `normal` the logits of a whole micro-batch."""
    server_weights: int
    shards: int = 1
    """Number of ranks over which the model is sharded."""
    main_memory: int = 0
    """Bytes of optimizer states in main memory, with trainer.optimizer_states = "cpu"."""

    @property
    def trainer(self) -> int:
        """Return the estimated bytes that one rank of the trainer needs on its device."""
        gathered = self.gathered if self.shards > 1 else 0
        return self.weights + self.optimizer + gathered + self.activations + self.images + self.logits

    def over(self, shards: int, sharing: int = 1) -> MemoryEstimate:
        """Return the estimate for the model sharded over `shards` ranks, with sequences shared by `sharing` ranks."""
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
        """Return the lines of a report.

        Args:
            available: bytes that are free for a rank; None if its node is not chosen yet.
            where: the GPU or machine on which they are free.
        """
        free = "on a node of the cluster" if available is None else f"{available / GIB:.2f} GiB free on {where}"
        parts = {
            "weights": self.weights,
            "gradients, AdamW, master weights": self.optimizer,
            "activations of a micro-batch": self.activations,
            "activations of its images": self.images,
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
        """Return a line that says if the trainer fits on a GPU of `total` bytes beside a server with `share` of it."""
        server, lacking = int(share * total), self.trainer + int(share * total) - available
        line = f"a server beside it      {server / GIB:.2f} GiB, {share:.0%} of the GPU (gpu_memory_utilization)"
        if self.server_weights > server:
            return line + f"; WARNING: its weights are {self.server_weights / GIB:.2f} GiB"
        if lacking > 0:
            return line + f"; WARNING: {lacking / GIB:.2f} GiB are missing for both"
        return line + f"; {-lacking / GIB:.2f} GiB are left"


def estimate_memory(source: Path, model: ModelSettings, trainer: TrainerSettings, server_dtype: str) -> MemoryEstimate:
    """Estimate the memory of training the model in the folder `source`, without reading its weights."""
    return estimate_memory_of(_skeleton(source, model), model, trainer, server_dtype)


def _skeleton(source: Path, model: ModelSettings) -> Any:
    """Return the model in the folder `source` without weights."""
    config = load_config(source, model)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, trust_remote_code=model.trust_remote_code)


def estimate_memory_of(
    skeleton: PreTrainedModel, model: ModelSettings, trainer: TrainerSettings, server_dtype: str
) -> MemoryEstimate:
    """Estimate the memory of training from a model without weights, on the meta device."""
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
    layers, inputs = _layers_in_memory(text.num_hidden_layers, model, trainer)
    tower, hidden, patches = vision_tower(config)
    seen = ceil(tokens * IMAGE_TOKENS * patches) if _trains_vision(model) else 0
    tower, tower_inputs = _layers_in_memory(tower, model, trainer)
    stateful, state = recurrent_layers(text)
    states = min(layers, stateful) * ceil(tokens / CHUNK) * state
    master = {"float32": 4, "bfloat16": 2}[trainer.weights] if model.dtype == "bfloat16" else 0
    low = master if trainer.weights == "bfloat16" else 0
    moments = {"device": 8 + low, "cpu": 0, "8bit": 2 + 2 * 4 / SIGNED.block + low}[trainer.optimizer_states]
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
        optimizer=ceil(trainable * (4 + moments + master - low)),
        main_memory=trainable * (8 + low) if trainer.optimizer_states == "cpu" else 0,
        gathered=(parameters - sum(sorted(units)[:-2])) * width,
        activations=layer_values(skeleton, model, trainer) * width * tokens * layers
        + states
        + inputs * tokens * text.hidden_size * width,
        images=hidden * width * seen * (17 * tower + tower_inputs),
        logits=chunk * text.vocab_size * (width if triton else 8),
        server_weights=parameters * {"float32": 4}.get(server_dtype, 2),
    )


def _layers_in_memory(layers: int, model: ModelSettings, trainer: TrainerSettings) -> tuple[int, int]:
    """Return how many layers of a stack have all activations in memory at once, and how many have only their inputs.

    The backward pass frees all kept activations before the first layers recompute theirs.
    """
    if trainer.activation_offloading:
        return 1, 0
    share = model.gradient_checkpointing
    recomputed = recomputed_layers(1 if share == "auto" else share, layers)
    return max(1, layers - recomputed), recomputed


def _trains_vision(model: ModelSettings) -> bool:
    return "vision" not in model.freeze and (model.lora is None or model.lora.scope == "all")


def chosen_recomputation(
    source: Path, model: ModelSettings, trainer: TrainerSettings, processes: TrainerProcesses, available: int
) -> ModelSettings:
    """Return `model` with gradient checkpointing "auto" resolved to False, True, or the share of layers that recompute.

    It is the smallest share with which the activations of a micro-batch leave `FREE` of the `available` bytes of a
    rank, or True if no share does. Results are the same either way.
    """
    if model.gradient_checkpointing != "auto":
        return model
    skeleton = _skeleton(source, model)
    layers = skeleton.config.get_text_config().num_hidden_layers
    # Estimate without offloading: recomputing activations is faster than offloading all of them.
    in_memory = trainer.model_copy(update={"activation_offloading": False})

    def with_recomputed(count: int) -> ModelSettings:
        share = count / layers if 0 < count < layers else count == layers
        return model.model_copy(update={"gradient_checkpointing": share})

    def fits(count: int) -> bool:
        estimate = estimate_memory_of(skeleton, with_recomputed(count), in_memory, "bfloat16")
        needed = estimate.over(processes.shards, processes.context_parallel).trainer * OVERHEAD
        return needed <= available * (1 - FREE)

    return with_recomputed(bisect_left(range(layers), True, key=fits))


def keeps_gathered(
    source: Path, model: ModelSettings, trainer: TrainerSettings, processes: TrainerProcesses, available: int
) -> bool:
    """Check that a rank's `available` bytes have room for all weights between a forward pass and its backward pass.

    Then FSDP gathers them once for both passes. Results are the same either way.
    """
    estimate = estimate_memory(source, model, trainer, "bfloat16").over(processes.shards, processes.context_parallel)
    width = 2 if trainer.autocast == "bf16" or model.dtype == "bfloat16" else 4
    return replace(estimate, gathered=estimate.parameters * width).trainer * OVERHEAD <= available


def memory_of_rank(processes: TrainerProcesses, gpu: torch.device | int | None) -> int:
    """Return the bytes that a rank has for training.

    On a GPU these are the free bytes, less the share of a server of the run; on a CPU an equal part of main memory.
    """
    if gpu is None:
        return psutil.virtual_memory().available // processes.processes
    free, total = torch.cuda.mem_get_info(gpu)
    return min(free, int(total * (1 - (processes.server_share or 0.0))))
