"""The vision-language model families: what differs between them, as one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from armature.components.contracts.errors import ConfigurationError

Component = Literal["vision", "projector", "language"]
COMPONENTS: tuple[Component, ...] = ("vision", "projector", "language")


@dataclass(frozen=True, slots=True)
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
    later layers or masks need them, or the ids, as well.
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
                remedy="add its prefix to the family's entry in components/models/families.py",
            )
        return found[1]


QWEN_IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
LANGUAGE = ("model.language_model", "lm_head")


def _qwen(
    name: str,
    model_type: str,
    projector: tuple[str, ...],
    wrap_classes: tuple[str, ...],
    embeds_features: bool = True,
) -> Family:
    return Family(
        name=name,
        model_type=model_type,
        vision=("model.visual",),
        projector=projector,
        language=LANGUAGE,
        placeholder="image_token_id",
        image_tokens=QWEN_IMAGE_TOKENS,
        wrap_classes=wrap_classes,
        served_adapters=COMPONENTS,
        whole_tower=True,
        embeds_features=embeds_features,
    )


def _tower(
    name: str,
    model_type: str,
    image_tokens: tuple[str, ...],
    wrap_classes: tuple[str, ...],
    placeholder: str = "image_token_index",
    vision_model_type: str | None = None,
    newline: tuple[str, ...] = (),
    image_attention: bool = False,
    served_adapters: tuple[Component, ...] = ("language",),
    whole_tower: bool = False,
    embeds_features: bool = True,
) -> Family:
    return Family(
        name=name,
        model_type=model_type,
        vision=("model.vision_tower",),
        projector=("model.multi_modal_projector", *newline),
        language=LANGUAGE,
        placeholder=placeholder,
        image_tokens=image_tokens,
        wrap_classes=wrap_classes,
        vision_model_type=vision_model_type,
        image_attention=image_attention,
        served_adapters=served_adapters,
        whole_tower=whole_tower,
        embeds_features=embeds_features,
    )


MOLMO2_IMAGE_TOKENS = (
    *("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<im_end>", "<im_low>"),
    *("<frame_start>", "<frame_end>", "<|image|>", "<|video|>"),
)

_FAMILIES = (
    _qwen("qwen2-vl", "qwen2_vl", ("model.visual.merger",), ("Qwen2VLDecoderLayer", "Qwen2VLVisionBlock")),
    _qwen(
        "qwen2.5-vl",
        "qwen2_5_vl",
        ("model.visual.merger",),
        ("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"),
    ),
    _qwen(
        "qwen3-vl",
        "qwen3_vl",
        ("model.visual.merger", "model.visual.deepstack_merger_list"),
        ("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"),
        embeds_features=False,
    ),
    _tower("llava", "llava", ("<image>",), ("LlamaDecoderLayer", "CLIPEncoderLayer")),
    _tower(
        "llava-next",
        "llava_next",
        ("<image>",),
        ("LlamaDecoderLayer", "CLIPEncoderLayer"),
        newline=("model.image_newline",),
    ),
    _tower(
        "pixtral",
        "llava",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        ("MistralDecoderLayer", "PixtralAttentionLayer"),
        vision_model_type="pixtral",
    ),
    _tower(
        "mistral3",
        "mistral3",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        ("MistralDecoderLayer", "PixtralAttentionLayer"),
    ),
    _tower(
        "internvl",
        "internvl",
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        ("Qwen2DecoderLayer", "InternVLVisionLayer"),
        placeholder="image_token_id",
    ),
    _tower(
        "gemma3",
        "gemma3",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        ("Gemma3DecoderLayer", "SiglipEncoderLayer"),
        image_attention=True,
        whole_tower=True,
        embeds_features=False,
    ),
    _tower(
        "molmo2",
        "molmo2",
        MOLMO2_IMAGE_TOKENS,
        ("Molmo2DecoderLayer", "Molmo2VisionEncoderLayer"),
        placeholder="image_patch_id",
        image_attention=True,
        served_adapters=(),
        embeds_features=False,
    ),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}


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


class _Tokenizer(Protocol):
    def get_vocab(self) -> dict[str, int]: ...


def image_token_ids(family: Family, tokenizer: _Tokenizer) -> tuple[int, ...]:
    """The ids, in rising order, of the family's image tokens that the tokenizer knows: never to be sampled."""
    return _ids(family.image_tokens, tokenizer.get_vocab())


def _ids(tokens: Iterable[str], vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sorted(vocabulary[token] for token in tokens if token in vocabulary))
