"""Which model is trained and how it is loaded."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from armature.components.contracts.settings import Settings
from armature.components.families.family import FAMILIES, Component
from armature.components.families.tiny import TinySettings
from armature.components.machine.registry import suggestion

TINY_PREFIX = "tiny/"
ImageAttention = Literal["causal", "bidirectional"]


class AdapterSettings(Settings):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): a layer's output gets alpha / rank * B A x, with B = 0 at
    first."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Scale: an adapter's output is multiplied by alpha / rank."""


class LoraSettings(AdapterSettings):
    """Low-rank adapters of a language model."""

    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Last names of the linear layers that get adapters, e.g. q_proj; 'all' for every linear."""
    scope: Literal["language", "all"] = "language"
    """Where targets are looked for: in the language model, or in all of the model."""
    served_as: Literal["merged", "adapter"] = "merged"
    """What servers get at a sync: the whole weights with the adapters merged in, or, beside the weights that they
    started with, the adapters alone. These are megabytes, and cost time in sampling."""


class ModelSettings(Settings):
    """The model: where its weights come from and what of it is trained."""

    source: str
    """A hub name, a folder (/x, ./x, ../x), or tiny/FAMILY for a checkpoint made from a seed."""
    revision: str | None = None
    """Commit, tag or branch; needed for a hub name. A commit cannot be moved."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention kernels: those of torch that suit the model and the device, or by their names in transformers."""
    image_attention: ImageAttention | None = None
    """Attention among an image's tokens, where the family has the choice (Gemma3, Molmo2): written into a tiny
    checkpoint, compared with any other. Leave out for what the checkpoint says."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint; a hub name then needs a full commit hash."""
    freeze: tuple[Component, ...] = ()
    """Components that are not trained."""
    lora: LoraSettings | None = None
    """Train adapters instead of the weights; leave out for none."""
    quantization: Literal["nf4"] | None = None
    """Keep the language model's frozen weights, below its adapters, in 4 bits (QLoRA): nf4. Servers get what these
    stand for, in model.dtype."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Recompute activations in the backward pass to save memory; auto: where by the estimate of `armature check` the
    memory does not hold them. Numbers are the same."""
    tiny: TinySettings | None = None
    """Sizes for tiny/FAMILY; leave out for other sources."""

    @field_validator("source")
    @classmethod
    def _known_family(cls, source: str) -> str:
        family = source.removeprefix(TINY_PREFIX)
        if source.startswith(TINY_PREFIX) and family not in FAMILIES:
            raise ValueError(f"no {FAMILIES.noun} is called {family!r}; {suggestion(family, FAMILIES)}")
        return source

    @property
    def tiny_family(self) -> str | None:
        """The family of a tiny/<family> source, else None."""
        return self.source.removeprefix(TINY_PREFIX) if self.source.startswith(TINY_PREFIX) else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.tiny_family is None) != (self.tiny is None):
            raise ValueError("source = tiny/<family> and the section tiny belong together; give both or neither")
        local = self.source.startswith(("/", "./", "../", TINY_PREFIX))
        if self.trust_remote_code and not local and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError(
                f"trust_remote_code needs revision pinned to a full commit hash, not {self.revision!r}: "
                "a branch or a tag can be moved to other code"
            )
        if self.quantization is not None and self.lora is None:
            raise ValueError("weights in 4 bits are not trained themselves: quantization needs the section lora")
        if self.lora is None and {"vision", "projector", "language"} <= set(self.freeze):
            raise ValueError("freeze names every component and there is no lora: nothing would be trained")
        return self
