"""Sizes of a model without its weights, and the memory of a trainer and of a server on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.files import foreign
from armature.components.families.family import family_of
from armature.components.machine.project import project_source
from armature.components.machine.registry import suggestion
from armature.components.models.settings import ModelSettings
from armature.components.models.source import local_code_options
from armature.components.rl.recipe import TrainVlm
from armature.components.rl.settings import TrainVLMSettings
from armature.components.training.processes import SERVER_SHARE, TrainerProcesses
from armature.components.training.sharding import blocks, n_parameters
from armature.components.vlm.memory import GIB, OVERHEAD, MemoryEstimate, estimate_memory_of
from armature.components.vlm.settings import TrainerSettings

CAPACITIES = (24e9, 48e9, 80e9, 141e9)
"""Bytes of the GPUs that are common, from the smallest."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet describes it.

    `flops`: dense bf16 operations per second; `memory_bandwidth`, `link`, `network`: bytes per second of one GPU.
    `link` is NVLink in one direction, `network` the share of a GPU in the InfiniBand of a node of `per_node` GPUs.
    """

    name: str
    memory: float
    flops: float
    memory_bandwidth: float
    link: float
    network: float
    source: str
    per_node: int = 8

    def collective(self, ranks: int) -> float:
        """Bytes per second of a ring of `ranks`: each byte enters a node once, over the network of all its GPUs."""
        return self.link if ranks <= self.per_node else min(self.link, self.per_node * self.network)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80e9, 312e12, 2.039e12, 300e9, 25e9, "data sheets of A100 80GB SXM and DGX A100 (8 x 200 Gb/s)"),
        Gpu("h100", 80e9, 989e12, 3.35e12, 450e9, 50e9, "data sheets of H100 SXM and DGX H100 (8 x 400 Gb/s)"),
        Gpu("h200", 141e9, 989e12, 4.8e12, 450e9, 50e9, "data sheets of H200 SXM and DGX H200 (8 x 400 Gb/s)"),
    )
}


def gpu_named(name: str) -> Gpu:
    """Raises ConfigurationError if no data sheet has this name."""
    if name not in GPUS:
        raise ConfigurationError(
            f"no GPU is called {name!r}", code="gpu_unknown", where="--gpu", remedy=suggestion(name, GPUS)
        )
    return GPUS[name]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a vision-language model.

    `tensors`: number of its parameters' tensors; `blocks`: layers, of the vision tower too; `root`: parameters that are
    in no block; `key_value_bytes`: what a server keeps for a token, over all layers, in 16 bits.
    """

    tensors: int
    blocks: int
    root: int
    key_value_bytes: int
    estimate: MemoryEstimate

    @property
    def parameters(self) -> int:
        return self.estimate.parameters

    @property
    def trained(self) -> float:
        """Trained parameters over all parameters."""
        return min(1.0, self.estimate.trainable / self.parameters)


def read_config(settings: ModelSettings) -> Any:
    """Return the configuration of a folder or a hub name, without its weights, or of a tiny model.

    Raises:
        DataError: there is no configuration here, and the hub does not answer.
    """
    if settings.tiny is not None and settings.tiny_family is not None:
        from armature.components.families.family import tiny_recipe
        from armature.components.models.tiny.tokenizer import train_tokenizer

        recipe, tiny = tiny_recipe(settings.tiny_family), settings.tiny
        tokenizer = train_tokenizer(
            recipe.vocabulary, tiny.vocabulary_size, tiny.corpus, recipe.template, tiny.max_positions
        )
        return recipe.config(tiny, tokenizer)
    source = project_source(settings.source)
    remedy = "give a folder that has the model's config.json, which is all that is read: --set model.source=/a/folder"
    with foreign("the model's configuration cannot be read", where=source, remedy=remedy):
        return AutoConfig.from_pretrained(
            Path(source) if Path(source).is_dir() else source,
            revision=settings.revision,
            **local_code_options(settings.trust_remote_code),
        )


def model_sizes(config: Any, model: ModelSettings, trainer: TrainerSettings, server_dtype: str) -> ModelSizes:
    """Count on the meta device. A block is a layer, of a vision tower too, as the seconds of a step were measured."""
    with torch.device("meta"):
        skeleton = AutoModelForImageTextToText.from_config(config, trust_remote_code=model.trust_remote_code)
    layers = replace(family_of(config), whole_tower=False)
    units = [n_parameters(module) for module, _ in blocks(skeleton, layers, None)][:-1]
    estimate = estimate_memory_of(skeleton, model, trainer, server_dtype)
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelSizes(
        tensors=sum(1 for _ in skeleton.parameters()),
        blocks=len(units),
        root=estimate.parameters - sum(units),
        key_value_bytes=2 * prod((2, heads, width, text.num_hidden_layers)),
        estimate=estimate,
    )


def sizes_of(settings: TrainVLMSettings) -> ModelSizes:
    """Raises DataError as `read_config` does."""
    return model_sizes(read_config(settings.model), settings.model, settings.trainer, settings.inference.dtype)


@dataclass(frozen=True)
class RecipeMemory:
    """Bytes of each process of a run, by what they are for.

    `trainer` is one of `ranks`; `server`, one of the GPUs of a model server, or the policy that plays, holds at least
    that; there are `servers` of them. Empty: there is none. `together`: both are on one GPU, of which a vLLM server
    takes `server_share`, and a policy (None) what it needs. `on_gpu` is false where all of it is in main memory.
    """

    trainer: Mapping[str, int]
    ranks: int
    server: Mapping[str, int]
    servers: int
    together: bool
    server_share: float | None
    on_gpu: bool
    served: str = "a server"

    def fits(self, capacity: float) -> bool:
        """Tell whether a GPU of `capacity` bytes, or the machine's main memory, is enough."""
        trainer, server = OVERHEAD * sum(self.trainer.values()), float(sum(self.server.values()))
        if not self.on_gpu:
            return self.ranks * trainer + self.servers * server <= capacity
        share = self.server_share if self.server else 0.0
        if share is None:
            policy = OVERHEAD * server
            return (trainer + policy if self.together else max(trainer, policy)) <= capacity
        return server <= share * capacity and trainer <= (1 - share * self.together) * capacity

    def lines(self, capacity: float | None, where: str) -> list[str]:
        """Say what is needed, and whether `where`, of so many bytes, has it; None: which GPUs do."""
        unit = "GPUs" if self.on_gpu else "processes"
        found = [
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
            return [*found, f"memory: {verdict} {capacity / GIB:.1f} GiB of {where}{shared}"]
        enough = [size for size in CAPACITIES if self.fits(size)]
        verdict = f"fits a GPU of {enough[0] / 1e9:.0f} GB" if enough else "WARNING: does not fit a GPU of 141 GB"
        return [*found, f"memory: {verdict}{shared}"]


def server_parts(sizes: ModelSizes, gpus: int, sequences: int, context: int) -> dict[str, int]:
    """Bytes of one of the `gpus` of a server, with the cache of `sequences` of `context` tokens."""
    return {
        "weights": sizes.estimate.server_weights // gpus,
        f"KV cache of {sequences} x {context:,} tokens": sequences * context * sizes.key_value_bytes // gpus,
    }


def trainer_parts(estimate: MemoryEstimate) -> dict[str, int]:
    """Bytes of a rank, as `MemoryEstimate.trainer` adds them up."""
    return {
        "weights": estimate.weights,
        "gradients and optimizer": estimate.optimizer,
        "gathered": estimate.gathered if estimate.shards > 1 else 0,
        "activations": estimate.activations,
        "log-probs": estimate.logits,
    }


def recipe_memory(recipe: TrainVlm) -> RecipeMemory:
    """Memory of a recipe of train-vlm on its machine. A server needs its weights and one sequence at least.

    `model.gradient_checkpointing = "auto"` counts as on, as where memory is short. Raises DataError as `read_config`.
    """
    settings, machine = recipe.settings_for(TrainVLMSettings), recipe.machine
    sizes, processes = sizes_of(settings), TrainerProcesses.of(machine)
    per_server = max(1, len(machine.gpus_of_server(0)))
    servers = 0 if machine.joins_servers else machine.servers
    return RecipeMemory(
        trainer=trainer_parts(sizes.estimate.over(processes.shards, processes.context_parallel)),
        ranks=processes.ranks,
        server=server_parts(sizes, per_server, 1, settings.inference.max_model_len) if servers else {},
        servers=servers * per_server,
        together=processes.server_share is not None,
        server_share=float(machine.server_arguments.get("gpu_memory_utilization", SERVER_SHARE)),
        on_gpu=bool(processes.gpus),
    )
