"""The description of a model family, and the families by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from armature.components.contracts.errors import ConfigurationError
from armature.components.families.joins import Join
from armature.components.families.tiny import TinyRecipe
from armature.components.machine.registry import Registry

Component = Literal["vision", "projector", "language"]
COMPONENTS: tuple[Component, ...] = ("vision", "projector", "language")


@dataclass(frozen=True)
class ImageInputs:
    """How the images of a sample enter the tensors of a batch.

    Args:
        feature_token: each one of these in the token ids takes one feature of an image. How many an image needs,
            and in which runs, comes from the processor's own expansion of one image. Written as the token's text, or
            as a path from the processor when it starts with a dot: `".tokenizer.image_token"`.
        joins: every output of the image processor, and the function that joins it across images.
        type_ids: the name of the (B, L) input that marks image tokens with 1; None if the model needs none.
        typed_tokens: the texts of the tokens so marked; the feature token if empty.
        reserved: the texts of all tokens that only a processor may write and no policy may sample.
        merge_turns: False where a later image changes the log-probs of earlier tokens.
    """

    feature_token: str
    joins: Mapping[str, Join]
    type_ids: str | None = None
    typed_tokens: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()
    merge_turns: bool = True


@dataclass(frozen=True)
class Family:
    """One family.

    `model_type` and `vision_model_type` are those of the Hugging Face configuration; the second is named only
    where several families share the first. A parameter belongs to the component that has the longest prefix of
    its name (so `model.visual.merger` may be the projector inside `model.visual`). `placeholder` is the
    configuration's attribute with the id of the token that one image feature replaces. `image_tokens` are all
    tokens that stand for images or videos and must never be sampled. `wrap_classes` are the block classes that
    FSDP shards and gradient checkpointing recomputes one by one. `image_attention` is True where the tokens of an
    image attend in both directions unless the configuration's `is_mm_prefix_lm` is False. `served_adapters` are
    the components whose adapters vLLM (0.32) applies as they are trained. `whole_tower` is True where a model uses the
    output of its vision tower and no hidden states of the layers: of a tower that FSDP wraps transformers records none.
    `embeds_features` is True where the features of images only replace the embeddings of their tokens, and False where
    later layers or masks need them, or the ids, as well. `images` describes its inputs, and `tiny` makes a checkpoint
    of it from a seed; None where nobody wrote one.
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
    image_attention: bool = False
    served_adapters: tuple[Component, ...] = ("language",)
    whole_tower: bool = False
    embeds_features: bool = True
    images: ImageInputs | None = None
    tiny: TinyRecipe | None = None

    def component_of(self, parameter: str) -> Component:
        """The component that the parameter or module called `parameter` belongs to.

        Raises:
            ConfigurationError: no component's prefix fits.
        """
        found: tuple[int, Component] | None = None
        for component in COMPONENTS:
            for prefix in getattr(self, component):
                fits = parameter == prefix or parameter.startswith(prefix + ".")
                if fits and (found is None or len(prefix) > found[0]):
                    found = (len(prefix), component)
        if found is None:
            raise ConfigurationError(
                f"{parameter!r} belongs to no component of {self.name}",
                code="parameter_without_component",
                remedy="add its prefix to the family's file in components/families",
            )
        return found[1]


LANGUAGE = ("model.language_model", "lm_head")


class _Families(Registry, Mapping[str, Family]):
    """Families by name: ours in the order below, then those of other packages by name."""

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
        "llava": "armature.components.families.llava:LLAVA",
        "llava-next": "armature.components.families.llava:LLAVA_NEXT",
        "pixtral": "armature.components.families.pixtral:PIXTRAL",
        "mistral3": "armature.components.families.pixtral:MISTRAL3",
        "internvl": "armature.components.families.internvl:INTERNVL",
        "gemma3": "armature.components.families.gemma3:GEMMA3",
        "molmo2": "armature.components.families.molmo2:MOLMO2",
    },
)


def family_of(config: Any) -> Family:
    """The family of a Hugging Face configuration, or of the `model_type` alone.

    Raises:
        ConfigurationError: no family has this `model_type`.
    """
    model_type = config if isinstance(config, str) else config.model_type
    vision = None if isinstance(config, str) else getattr(getattr(config, "vision_config", None), "model_type", None)
    candidates = [family for family in FAMILIES.values() if family.model_type == model_type]
    for family in sorted(candidates, key=lambda family: family.vision_model_type is None):
        if family.vision_model_type in (None, vision):
            return family
    raise ConfigurationError(
        f"no model family has the model_type {model_type!r}",
        code="unknown_model_type",
        remedy="use a checkpoint of one of the families "
        + ", ".join(f"{family.name} ({family.model_type})" for family in FAMILIES.values()),
    )


def tiny_recipe(name: str) -> TinyRecipe:
    """The parts of a tiny checkpoint of the family called `name`.

    Raises:
        ConfigurationError: no such family, or nobody wrote these parts for it.
    """
    recipe = FAMILIES[name].tiny
    if recipe is None:
        raise ConfigurationError(
            f"the model family {name!r} makes no tiny checkpoint",
            code="tiny_checkpoint_unsupported",
            where=f"model.source = tiny/{name}",
            remedy="give its `Family` a `tiny`, or name a checkpoint",
        )
    return recipe


class _Tokenizer(Protocol):
    def get_vocab(self) -> dict[str, int]: ...


def image_token_ids(family: Family, tokenizer: _Tokenizer) -> tuple[int, ...]:
    """The ids, in rising order, of the family's image tokens that the tokenizer knows: never to be sampled."""
    vocabulary = tokenizer.get_vocab()
    return tuple(sorted(vocabulary[token] for token in family.image_tokens if token in vocabulary))
