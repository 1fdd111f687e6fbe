"""Description of a model family, and the registry of families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.joins import Join
from armature.components.families.tiny import TinyRecipe
from armature.components.machine.registry import Registry

Component = Literal["vision", "projector", "language"]
"""Part of a vision-language model: the vision tower, the projector after it, or the language model."""
COMPONENTS: tuple[Component, ...] = ("vision", "projector", "language")


@dataclass(frozen=True)
class VideoInputs:
    """Describes how a video becomes an image of several frames, which it is to the trainer: with `image_grid_thw`
    (1, 3) of its t > 1 groups of two frames, and positions (time, height, width) as vLLM computes them.

    Attributes:
        token: token that takes one feature of a video, as text or as a path from the processor.
        outputs: names of the video processor's outputs, and of the image inputs that they become.
        seconds: name of the output with the seconds of a group; empty if frames are told apart by text, and all have
            the same time in positions.
    """

    token: str
    outputs: Mapping[str, str]
    seconds: str = ""


@dataclass(frozen=True)
class ImageInputs:
    """Describes which inputs of the model the images of a sample become.

    Attributes:
        feature_token: token that takes one image feature at each occurrence. The processor's expansion of an image says
            how many occurrences an image needs, and in which runs. Given as text, or as a path from the processor if it
            starts with a dot: `".tokenizer.image_token"`.
        joins: for each output of the image processor, the function that joins it across images.
        type_ids: name of the (B, L) input that marks image tokens with 1; None if the model has no such input.
        typed_tokens: texts of the marked tokens; if empty, the feature token.
        reserved: texts of all tokens that only a processor may write and no policy may sample.
        videos: description of video inputs; None if the family's models are not shown videos.
        merge_turns: False if a later image changes the log-probs of earlier tokens, so that turns must not share a
            sequence.
    """

    feature_token: str
    joins: Mapping[str, Join]
    type_ids: str | None = None
    typed_tokens: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()
    videos: VideoInputs | None = None
    merge_turns: bool = True


@dataclass(frozen=True)
class Family:
    """A family of vision-language models.

    Attributes:
        name: name of the family, as in tiny/<name>.
        model_type: the Hugging Face configuration's `model_type`.
        vision, projector, language: name prefixes of each component's parameters. The longest matching prefix decides,
            so `model.visual.merger` may be the projector inside `model.visual`.
        placeholder: the configuration's attribute with the id of the token that an image feature replaces.
        image_tokens: all tokens that stand for images or videos, which must never be sampled.
        wrap_classes: classes of the blocks that FSDP shards and gradient checkpointing recomputes one by one.
        vision_model_type, text_model_type: `model_type` of the vision and of the text configuration, if several
            families share `model_type`.
        image_attention: True if image tokens attend in both directions unless the configuration's `is_mm_prefix_lm` is
            False.
        served_adapters: components whose adapters vLLM (0.32) applies as they are trained.
        served_entries: entries of `config.json`, as "part.name", with the value that vLLM needs, or None for any value.
            Without them vLLM does not start, or computes another model. transformers does not need them.
        whole_tower: True if the model uses only the final output of its vision tower. transformers records no hidden
            states of the layers of a tower that FSDP wraps.
        embeds_features: True if image features only replace the embeddings of their tokens; False if later layers or
            masks also need features or ids.
        images: description of the image inputs; None if they have to be inferred from the processor.
        tiny: recipe of a tiny checkpoint; None if there is no such recipe.

    Example:
        >>> FAMILIES["qwen2-vl"].component_of("model.visual.merger.mlp.0.weight")
        'projector'
    """

    name: str
    model_type: str
    vision: tuple[str, ...]
    projector: tuple[str, ...]
    language: tuple[str, ...]
    placeholder: str
    image_tokens: tuple[str, ...]
    wrap_classes: tuple[str, ...]
    vision_model_type: str | None = None
    text_model_type: str | None = None
    image_attention: bool = False
    served_adapters: tuple[Component, ...] = ("language",)
    served_entries: Mapping[str, object] = field(default_factory=dict)
    whole_tower: bool = False
    embeds_features: bool = True
    images: ImageInputs | None = None
    tiny: TinyRecipe | None = None

    def component_of(self, parameter: str) -> Component:
        """Return the component that a parameter or module belongs to, by its name.

        Raises:
            ConfigurationError: the name has no component's prefix.
        """
        longest: tuple[int, Component] | None = None
        for component in COMPONENTS:
            for prefix in getattr(self, component):
                fits = parameter == prefix or parameter.startswith(prefix + ".")
                if fits and (longest is None or len(prefix) > longest[0]):
                    longest = (len(prefix), component)
        if longest is None:
            raise ConfigurationError(
                f"{parameter!r} belongs to no component of {self.name}",
                code="parameter_without_component",
                remedy="add a matching prefix to the family's file in components/families",
            )
        return longest[1]


LANGUAGE = ("model.language_model", "lm_head")
"""Name prefixes of the language model in most families."""


class _Families(Registry, Mapping[str, Family]):
    """Families by name: this project's families in the order below, then families of other packages."""

    def __iter__(self) -> Iterator[str]:
        return iter([*self._entries, *(name for name in super().__iter__() if name not in self._entries)])

    def __len__(self) -> int:
        return len(self._all())


FAMILIES = _Families(
    "model family",
    "armature.families",
    {
        "qwen2-vl": "armature.components.families.qwen:QWEN2_VL",
        "qwen2.5-vl": "armature.components.families.qwen:QWEN2_5_VL",
        "qwen3-vl": "armature.components.families.qwen:QWEN3_VL",
        "qwen3-vl-moe": "armature.components.families.qwen:QWEN3_VL_MOE",
        "qwen3.5": "armature.components.families.qwen:QWEN3_5",
        "qwen3.5-moe": "armature.components.families.qwen:QWEN3_5_MOE",
        "llava": "armature.components.families.llava:LLAVA",
        "llava-next": "armature.components.families.llava:LLAVA_NEXT",
        "pixtral": "armature.components.families.pixtral:PIXTRAL",
        "mistral3": "armature.components.families.pixtral:MISTRAL3",
        "internvl": "armature.components.families.internvl:INTERNVL",
        "internvl3.5": "armature.components.families.internvl:INTERNVL3_5",
        "idefics3": "armature.components.families.smolvlm:IDEFICS3",
        "smolvlm": "armature.components.families.smolvlm:SMOLVLM",
        "glm4v": "armature.components.families.glm4v:GLM4V",
        "glm4v-moe": "armature.components.families.glm4v:GLM4V_MOE",
        "gemma3": "armature.components.families.gemma3:GEMMA3",
        "gemma4": "armature.components.families.gemma4:GEMMA4",
        "molmo2": "armature.components.families.molmo2:MOLMO2",
    },
)


def family_of(config: Any) -> Family:
    """Return the family of a Hugging Face configuration, or of a `model_type`.

    Raises:
        ConfigurationError: no family has this `model_type`.

    Example:
        >>> family_of("qwen2_5_vl").name
        'qwen2.5-vl'
    """
    model_type = config if isinstance(config, str) else config.model_type
    vision, text = (getattr(getattr(config, f"{part}_config", None), "model_type", None) for part in ("vision", "text"))
    candidates = [family for family in FAMILIES.values() if family.model_type == model_type]
    for family in sorted(candidates, key=lambda family: family.vision_model_type is family.text_model_type is None):
        if family.vision_model_type in (None, vision) and family.text_model_type in (None, text):
            return family
    raise ConfigurationError(
        f"no model family has the model_type {model_type!r}",
        code="unknown_model_type",
        remedy="use a checkpoint of one of the families "
        + ", ".join(f"{family.name} ({family.model_type})" for family in FAMILIES.values()),
    )


def tiny_recipe(name: str) -> TinyRecipe:
    """Return the recipe of a family's tiny checkpoint.

    Raises:
        ConfigurationError: the family does not exist, or has no such recipe.
    """
    recipe = FAMILIES[name].tiny
    if recipe is None:
        raise ConfigurationError(
            f"the model family {name!r} has no tiny checkpoint",
            code="tiny_checkpoint_unsupported",
            where=f"model.source = tiny/{name}",
            remedy="add `tiny` to its `Family`, or name a checkpoint",
        )
    return recipe


class _Tokenizer(Protocol):
    def get_vocab(self) -> dict[str, int]: ...


def image_token_ids(family: Family, tokenizer: _Tokenizer) -> tuple[int, ...]:
    """Sorted ids of the family's image tokens that the tokenizer has; they must never be sampled."""
    vocabulary = tokenizer.get_vocab()
    return tuple(sorted(vocabulary[token] for token in family.image_tokens if token in vocabulary))
