"""Which model is trained and how it is loaded."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from armature.components.contracts.settings import Settings
from armature.components.models.families import Component
from armature.components.models.tiny_families import TINY_FAMILIES
from armature.components.registry import suggestion

TINY_PREFIX = "tiny/"
ImageAttention = Literal["causal", "bidirectional"]


class Transcript(Settings):
    """A conversation that teaches the answer format.

    In `user`, `{image}` stands for an image; in `assistant`, `{answer}` for an answer drawn at random.
    """

    user: tuple[str, ...] = Field(description="The user's turns, e.g. '{image}What color is this?'.", min_length=1)
    assistant: tuple[str, ...] = Field(description="The assistant's turns, as many.", min_length=1)

    @model_validator(mode="after")
    def _turns_alternate(self) -> Self:
        if len(self.user) != len(self.assistant):
            raise ValueError(f"{len(self.user)} user turns, but {len(self.assistant)} assistant turns")
        return self


class FormatSettings(Settings):
    """Next-token training on conversations whose images are all blank.

    It gives random weights what every pretrained model has: the environment's answer format, at chance accuracy.
    """

    system: str = Field("", description="System prompt of every conversation; empty for none.")
    transcripts: tuple[Transcript, ...] = Field(description="Conversations, used in turn.", min_length=1)
    answers: tuple[str, ...] = Field(description="What {answer} is drawn from, each equally often.", min_length=1)
    image_side: PositiveInt = Field(56, description="Width and height of the blank images, in pixels.")
    steps: PositiveInt = Field(150, description="Optimizer steps.")
    batch_size: PositiveInt = Field(32, description="Conversations per step.")
    learning_rate: PositiveFloat = Field(
        1e-2, description="Peak learning rate of AdamW, after a warm-up of five steps and before a cosine decay."
    )
    trained: Literal["embeddings", "language"] = Field(
        "embeddings",
        description="What learns the format: the input and output embeddings, or the whole language model.",
    )


class TinySettings(Settings):
    """Sizes of a checkpoint made from a seed. Attention heads must be 32, 64, 80, 96, 112 or 128 wide for vLLM."""

    seed: NonNegativeInt = Field(0, description="Seed of the weights.")
    hidden_size: PositiveInt = Field(64, description="Width of the language model.", multiple_of=32)
    intermediate_size: PositiveInt = Field(128, description="Width of its feed-forward layers.")
    layers: PositiveInt = Field(2, description="Layers of the language model.")
    heads: PositiveInt = Field(2, description="Attention heads of the language model.")
    key_value_heads: PositiveInt = Field(2, description="Key and value heads of the language model.")
    vision_hidden_size: PositiveInt = Field(64, description="Width of the vision tower.", multiple_of=32)
    vision_intermediate_size: PositiveInt = Field(128, description="Width of its feed-forward layers.")
    vision_layers: PositiveInt = Field(1, description="Layers of the vision tower.")
    vision_heads: PositiveInt = Field(2, description="Attention heads of the vision tower.")
    image_side: PositiveInt = Field(
        224,
        description="Largest (Qwen, Pixtral) or fixed (others) side of an image or its crops in pixels.",
        multiple_of=28,
    )
    max_positions: PositiveInt = Field(2048, description="Longest sequence in tokens.")
    vocabulary_size: PositiveInt = Field(384, description="Most tokens the tokenizer may have.", ge=300)
    corpus: tuple[str, ...] = Field(
        (), description="Texts that the tokenizer learns before its own few sentences, to write them in few tokens."
    )
    initializer_range: PositiveFloat = Field(0.02, description="Standard deviation of the language model's weights.")
    vision_initializer_range: PositiveFloat = Field(
        0.02, description="Standard deviation of the vision tower's weights."
    )
    tie_embeddings: bool = Field(False, description="Whether input and output embeddings are one matrix.")
    format: FormatSettings | None = Field(None, description="Teaches an answer format; leave out for none.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        for width, heads, where in (
            (self.hidden_size, self.heads, "heads"),
            (self.vision_hidden_size, self.vision_heads, "vision_heads"),
        ):
            if width % heads or width // heads not in (32, 64, 80, 96, 112, 128, 192, 256):
                raise ValueError(f"{where} = {heads} over a width of {width} gives no head size that vLLM serves")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of key_value_heads = {self.key_value_heads}")
        return self


class LoraSettings(Settings):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685)."""

    rank: PositiveInt = Field(16, description="Rank of each adapter.")
    alpha: PositiveFloat = Field(32.0, description="Scale: an adapter's output is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Last names of the linear layers that get adapters, e.g. q_proj; 'all' for every linear.",
        min_length=1,
    )
    scope: Literal["language", "all"] = Field(
        "language", description="Where targets are looked for: in the language model, or in all of the model."
    )
    served_as: Literal["merged", "adapter"] = Field(
        "merged",
        description="What servers get at a sync: the whole weights with the adapters merged in, or, beside the weights "
        "that they started with, the adapters alone. These are megabytes, and cost time in sampling.",
    )


class ModelSettings(Settings):
    """The model: where its weights come from and what of it is trained."""

    source: str = Field(
        description="A hub name, a folder (/x, ./x, ../x), or tiny/FAMILY for a checkpoint made from a seed."
    )
    revision: str | None = Field(
        None, description="Commit, tag or branch; needed for a hub name. A commit cannot be moved."
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Data type of the weights.")
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto",
        description="Attention kernels: those of torch that suit the model and the device, or by their names in "
        "transformers.",
    )
    image_attention: ImageAttention | None = Field(
        None,
        description="Attention among an image's tokens, where the family has the choice (Gemma3, Molmo2): written into "
        "a tiny checkpoint, compared with any other. Leave out for what the checkpoint says.",
    )
    trust_remote_code: bool = Field(
        False, description="Run code that comes with the checkpoint; a hub name then needs a full commit hash."
    )
    freeze: tuple[Component, ...] = Field((), description="Components that are not trained.")
    lora: LoraSettings | None = Field(None, description="Train adapters instead of the weights; leave out for none.")
    quantization: Literal["nf4"] | None = Field(
        None,
        description="Keep the language model's frozen weights, below its adapters, in 4 bits (QLoRA): nf4. Servers get "
        "what these stand for, in model.dtype.",
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        False,
        description="Recompute activations in the backward pass to save memory; auto: where by the estimate of "
        "`armature check` the memory does not hold them. Numbers are the same.",
    )
    tiny: TinySettings | None = Field(None, description="Sizes for tiny/FAMILY; leave out for other sources.")

    @field_validator("source")
    @classmethod
    def _known_family(cls, source: str) -> str:
        family = source.removeprefix(TINY_PREFIX)
        if source.startswith(TINY_PREFIX) and family not in TINY_FAMILIES:
            raise ValueError(f"no {TINY_FAMILIES.noun} is called {family!r}; {suggestion(family, TINY_FAMILIES)}")
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
