"""Settings of the trained model: its source, dtype and attention, and the weights that are trained."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from armature.components.contracts.settings import Settings
from armature.components.families.family import FAMILIES, Component
from armature.components.families.tiny import TinySettings
from armature.components.machine.registry import suggestion

TINY_PREFIX = "tiny/"
"""Prefix of sources that are made from a seed: tiny/<family>."""
ImageAttention = Literal["causal", "bidirectional"]
Recomputation = bool | Annotated[float, Field(gt=0, lt=1)] | Literal["auto"]


class AdapterSettings(Settings):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685). alpha / rank * B A x is added to a layer's output; B = 0 at
    first."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Scale of an adapter: its output is multiplied by alpha / rank."""


class LoraSettings(AdapterSettings):
    """Low-rank adapters of a vision-language model."""

    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Last names of the linear layers that get adapters, e.g. q_proj; 'all' selects every linear layer but the output
    head."""
    scope: Literal["language", "all"] = "language"
    """Part of the model in which targets are looked for: the language model, or the whole model."""
    served_as: Literal["merged", "adapter"] = "merged"
    """Weights that servers receive at a sync: all of them with the adapters merged in, or only the adapters, to be
    added to the initial weights. Adapters are only megabytes, but slow down sampling."""


class ModelSettings(Settings):
    """The model: the source of its weights, how they are loaded, and which of them are trained.

    Example:
        >>> ModelSettings(source="tiny/llava", tiny=TinySettings(), freeze=("vision",)).tiny_family
        'llava'
    """

    source: str
    """A hub name, a folder (/x, ./x, ../x), a language model in a GGUF file (./x.gguf, or package:NAME for an installed
    package with one), or tiny/FAMILY for a checkpoint made from a seed."""
    revision: str | None = None
    """Commit, tag or branch; required for a hub name. Only a commit always means the same files."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention kernels. auto selects kernels of torch that suit model and device; the others are names of
    transformers."""
    image_attention: ImageAttention | None = None
    """Attention among the tokens of an image, causal or in both directions, for families that support both (Gemma3,
    Molmo2). It is written into a tiny checkpoint; another checkpoint must have the same attention. Leave it out to
    follow the checkpoint."""
    trust_remote_code: bool = False
    """Run Python code from the checkpoint; a hub name then needs a full commit hash."""
    freeze: tuple[Component, ...] = ()
    """Components that are not trained."""
    train_routers: bool = False
    """Train the routers of a mixture of experts too. They are frozen by default, because a trained router may soon send
    most tokens to a few experts; trainer.load_balance_coefficient works against that."""
    lora: LoraSettings | None = None
    """Train adapters in place of the weights; leave it out to train the weights."""
    quantization: Literal["nf4"] | None = None
    """Store the language model's frozen weights, below its adapters, in 4 bits (QLoRA): nf4. Servers get the
    dequantized weights in model.dtype."""
    gradient_checkpointing: Recomputation = False
    """Recompute activations in the backward pass to save memory. A share between 0 and 1 does so in that part of the
    layers, the first ones. auto is the smallest share with which the activations fit in memory by the estimate of
    `armature check`. The numbers are the same either way."""
    tiny: TinySettings | None = None
    """Sizes of a tiny/FAMILY model; leave it out for other sources."""

    @field_validator("source")
    @classmethod
    def _known_family(cls, source: str) -> str:
        family = source.removeprefix(TINY_PREFIX)
        if source.startswith(TINY_PREFIX) and family not in FAMILIES:
            raise ValueError(f"no {FAMILIES.noun} is called {family!r}; {suggestion(family, FAMILIES)}")
        return source

    @property
    def tiny_family(self) -> str | None:
        """The family of a tiny/<family> source; None for other sources."""
        return self.source.removeprefix(TINY_PREFIX) if self.source.startswith(TINY_PREFIX) else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.tiny_family is None) != (self.tiny is None):
            raise ValueError("source = tiny/<family> and the section tiny belong together: set both or neither")
        local = self.source.startswith(("/", "./", "../", TINY_PREFIX))
        if self.trust_remote_code and not local and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError(
                f"trust_remote_code needs revision pinned to a full commit hash, not {self.revision!r}: "
                "a branch or a tag may later point to other code"
            )
        if self.quantization is not None and self.lora is None:
            raise ValueError("4-bit weights cannot be trained themselves: quantization needs the section lora")
        if self.train_routers and (self.lora is not None or "language" in self.freeze):
            raise ValueError("train_routers has no effect, because lora or freeze keep the routers' weights: omit it")
        if self.lora is None and {"vision", "projector", "language"} <= set(self.freeze):
            raise ValueError("freeze names every component and there is no lora: nothing would be trained")
        return self
