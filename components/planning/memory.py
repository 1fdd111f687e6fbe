"""Model sizes computed without weights, and the memory that a trainer and a server need on one GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.files import foreign
from armature.components.families.family import family_of
from armature.components.machine.registry import suggestion
from armature.components.models.gguf import model_source
from armature.components.models.settings import ModelSettings
from armature.components.models.source import local_code_options
from armature.components.rl.recipe import TrainVlm
from armature.components.rl.settings import TrainVLMSettings
from armature.components.training.processes import SERVER_SHARE, TrainerProcesses
from armature.components.training.sharding import blocks, n_parameters
from armature.components.vlm.memory import GIB, OVERHEAD, MemoryEstimate, estimate_memory_of, recurrent_layers
from armature.components.vlm.settings import TrainerSettings

CAPACITIES = (24e9, 48e9, 80e9, 141e9)
"""Memory of common GPUs in bytes, smallest first."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet describes it."""

    name: str
    memory: float
    """Bytes of memory."""
    flops: float
    """Dense bf16 operations per second."""
    memory_bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second of NVLink in one direction."""
    network: float
    """Bytes per second of one GPU's share of its node's InfiniBand."""
    source: str
    """The data sheets with these numbers."""
    per_node: int = 8
    """Number of GPUs of a node."""

    def collective(self, ranks: int) -> float:
        """Return the bytes per second that a collective reaches in a ring of `ranks` ranks.

        Between nodes each byte enters a node once, over the network of all its GPUs together.
        """
        return self.link if ranks <= self.per_node else min(self.link, self.per_node * self.network)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80e9, 312e12, 2.039e12, 300e9, 25e9, "data sheets of A100 80GB SXM and DGX A100 (8 x 200 Gb/s)"),
        Gpu("h100", 80e9, 989e12, 3.35e12, 450e9, 50e9, "data sheets of H100 SXM and DGX H100 (8 x 400 Gb/s)"),
        Gpu("h200", 141e9, 989e12, 4.8e12, 450e9, 50e9, "data sheets of H200 SXM and DGX H200 (8 x 400 Gb/s)"),
    )
}


def gpu_memory(name: str) -> float:
    """Return the bytes of memory of a GPU that is named as in `GPUS`, or by its size, such as 24GiB.

    Raises:
        ConfigurationError: the name is unknown, or the size is not a positive number of GiB.
    """
    size = re.fullmatch(r"([1-9]\d*) ?GiB", name)
    if size is None and name[:1].isdigit():
        raise ConfigurationError(
            f"{name!r} is not a size of a GPU", code="gpu_unknown", where="--gpu", remedy="whole GiB, such as 24GiB"
        )
    return int(size[1]) * float(GIB) if size else gpu_named(name).memory


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if name not in GPUS:
        raise ConfigurationError(
            f"GPU {name!r} is unknown", code="gpu_unknown", where="--gpu", remedy=suggestion(name, GPUS)
        )
    return GPUS[name]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a vision-language model."""

    tensors: int
    """Number of parameter tensors."""
    blocks: int
    """Number of layers, vision tower included."""
    root: int
    """Number of parameters outside of blocks."""
    key_value_bytes: int
    """Bytes of the KV cache for one token, over all layers with attention, in 16 bits."""
    state_bytes: int
    """Bytes of the recurrent states of one sequence, over all layers with linear attention."""
    estimate: MemoryEstimate

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.estimate.parameters

    @property
    def trained(self) -> float:
        """Share of the parameters that is trained."""
        return min(1.0, self.estimate.trainable / self.parameters)


def read_config(settings: ModelSettings) -> Any:
    """Return the configuration of a model without reading its weights.

    The model is a folder, a hub name, or a tiny model.

    Raises:
        DataError: the configuration is not on this machine, and the hub does not answer.
    """
    if settings.tiny is not None and settings.tiny_family is not None:
        from armature.components.families.family import tiny_recipe
        from armature.components.models.tiny.tokenizer import train_tokenizer

        recipe, tiny = tiny_recipe(settings.tiny_family), settings.tiny
        tokenizer = train_tokenizer(
            recipe.vocabulary, tiny.vocabulary_size, tiny.corpus, recipe.template, tiny.max_positions
        )
        return recipe.config(tiny, tokenizer)
    source = model_source(settings.source)
    remedy = "use a folder with the model's config.json, no other file is needed: --set model.source=/a/folder"
    with foreign("the model's configuration cannot be read", where=source, remedy=remedy):
        return AutoConfig.from_pretrained(
            Path(source) if Path(source).is_dir() else source,
            revision=settings.revision,
            **local_code_options(settings.trust_remote_code),
        )


def model_sizes(config: Any, model: ModelSettings, trainer: TrainerSettings, server_dtype: str) -> ModelSizes:
    """Return the sizes of a model, which are counted on the meta device.

    Each layer of the vision tower counts as a block, as in the measurements behind the assumed times.
    """
    with torch.device("meta"):
        skeleton = AutoModelForImageTextToText.from_config(config, trust_remote_code=model.trust_remote_code)
    layers = replace(family_of(config), whole_tower=False)
    units = [n_parameters(module) for module, _ in blocks(skeleton, layers, None)][:-1]
    estimate = estimate_memory_of(skeleton, model, trainer, server_dtype)
    text = config.get_text_config()
    stateful, state = recurrent_layers(text)
    return ModelSizes(
        tensors=sum(1 for _ in skeleton.parameters()),
        blocks=len(units),
        root=estimate.parameters - sum(units),
        key_value_bytes=2 * _cached_values(text, stateful),
        state_bytes=stateful * state,
        estimate=estimate,
    )


def _cached_values(text: Any, stateful: int) -> int:
    """Return how many values of keys and values are cached for one token, over all layers of a language model.

    The last layers of Gemma 4 reuse keys and values of earlier ones, and its layers have heads of two widths.

    Args:
        stateful: number of layers with a state in place of keys and values.
    """
    count = text.num_hidden_layers - stateful - getattr(text, "num_kv_shared_layers", 0)
    each = getattr(text, "per_layer_config", None)
    layers = [text] * count if each is None else [each[index] for index in range(count)]
    values = 0
    for layer in layers:
        heads: int = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        width: int = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        values += 2 * heads * width
    return values


def sizes_of(settings: TrainVLMSettings) -> ModelSizes:
    """Return the sizes of the model in a recipe.

    Raises:
        DataError: see `read_config`.
    """
    return model_sizes(read_config(settings.model), settings.model, settings.trainer, settings.inference.dtype)


@dataclass(frozen=True)
class RecipeMemory:
    """Estimated bytes of the processes of a run, by purpose."""

    trainer: Mapping[str, int]
    """Bytes that one rank of the trainer needs, by purpose."""
    ranks: int
    server: Mapping[str, int]
    """Bytes that one GPU of a model server, or of the policy that plays, needs at least, by purpose.

    Empty if the run starts none.
    """
    servers: int
    """Number of GPUs of model servers, or of policies that play."""
    together: bool
    """True if trainer and server are on the same GPU."""
    server_share: float | None
    """Part of a GPU that a vLLM server takes; None for a policy, which takes only what it needs."""
    on_gpu: bool
    """True if the estimated memory is on GPUs; False if all of it is main memory."""
    served: str = "a server"

    def fits(self, capacity: float) -> bool:
        """Tell if a GPU of `capacity` bytes, or a machine with so much main memory, is enough."""
        trainer, server = OVERHEAD * sum(self.trainer.values()), float(sum(self.server.values()))
        if not self.on_gpu:
            return self.ranks * trainer + self.servers * server <= capacity
        share = self.server_share if self.server else 0.0
        if share is None:
            policy = OVERHEAD * server
            return (trainer + policy if self.together else max(trainer, policy)) <= capacity
        return server <= share * capacity and trainer <= (1 - share * self.together) * capacity

    def lines(self, capacity: float | None, where: str) -> list[str]:
        """Return lines that say how much memory is needed and where it fits.

        Args:
            capacity: bytes of the GPU or machine `where`; None to name the smallest common GPU that is large enough.
        """
        unit = "GPUs" if self.on_gpu else "processes"
        table = [
            f"memory of {role:<19}{sum(parts.values()) / GIB:.2f} GiB on each of {count} {unit}: "
            + ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
            for role, parts, count in (
                ("the trainer", self.trainer, self.ranks),
                (self.served, self.server, self.servers),
            )
            if parts
        ]
        shared = ", which both share" * (self.together and self.on_gpu)
        if capacity is not None:
            verdict = "fits" if self.fits(capacity) else "WARNING: does not fit"
            return [*table, f"memory: {verdict} {capacity / GIB:.1f} GiB of {where}{shared}"]
        enough = [size for size in CAPACITIES if self.fits(size)]
        verdict = f"fits a GPU of {enough[0] / 1e9:.0f} GB" if enough else "WARNING: does not fit a GPU of 141 GB"
        return [*table, f"memory: {verdict}{shared}"]


def server_parts(sizes: ModelSizes, gpus: int, sequences: int, context: int) -> dict[str, int]:
    """Return the bytes that a server needs on each of its `gpus` GPUs, by purpose.

    They include the KV cache of `sequences` sequences.

    Args:
        context: number of tokens of each sequence.
    """
    return {
        "weights": sizes.estimate.server_weights // gpus,
        f"KV cache of {sequences} x {context:,} tokens": sequences * context * sizes.key_value_bytes // gpus,
        "recurrent states": sequences * sizes.state_bytes // gpus,
    }


def trainer_parts(estimate: MemoryEstimate) -> dict[str, int]:
    """Return the bytes that one rank of the trainer needs, by purpose. Their sum is `MemoryEstimate.trainer`."""
    return {
        "weights": estimate.weights,
        "gradients and optimizer": estimate.optimizer,
        "gathered": estimate.gathered if estimate.shards > 1 else 0,
        "activations": estimate.activations,
        "activations of images": estimate.images,
        "log-probs": estimate.logits,
    }


def recipe_memory(recipe: TrainVlm) -> RecipeMemory:
    """Return the memory that a recipe of train-vlm needs on its machine.

    A server is counted with its weights and one sequence. `model.gradient_checkpointing = "auto"` counts as on, which
    is what it becomes if memory is short.

    Raises:
        DataError: see `read_config`.
    """
    settings, machine = recipe.settings_for(TrainVLMSettings), recipe.machine
    sizes, processes = sizes_of(settings), TrainerProcesses.of(machine)
    per_server = max(1, len(machine.gpus_of_server(0)))
    servers = 0 if machine.joins_servers else machine.servers.count
    return RecipeMemory(
        trainer=trainer_parts(sizes.estimate.over(processes.shards, processes.context_parallel)),
        ranks=processes.ranks,
        server=server_parts(sizes, per_server, 1, settings.inference.max_model_len) if servers else {},
        servers=servers * per_server,
        together=processes.server_share is not None,
        server_share=float(machine.servers.arguments.get("gpu_memory_utilization", SERVER_SHARE)),
        on_gpu=bool(processes.gpus),
    )
