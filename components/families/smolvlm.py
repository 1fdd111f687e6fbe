"""The families Idefics3 and SmolVLM: an image is encoded in tiles and, after them, as a whole.

The first SmolVLM checkpoints are Idefics3 models; SmolVLM2 has a `model_type` of its own, and takes videos.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from armature.components.families.family import COMPONENTS, Family, ImageInputs
from armature.components.families.joins import Features, pad_cat
from armature.components.families.tiny import (
    PATCH,
    TinyRecipe,
    TinySettings,
    TinyVocabulary,
    smol,
    text_sizes,
    vision_sizes,
)

if TYPE_CHECKING:
    from torch import Tensor

SCALE = 2  # 2 x 2 patches become one token
IMAGE_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
VOCABULARY = TinyVocabulary(
    markers=("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", *IMAGE_TOKENS),
    pad="<|endoftext|>",
    eos="<end_of_utterance>",
    bos="<|im_start|>",
    named={
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
)


def make_num2words_optional() -> None:
    """Let transformers build a SmolVLM processor without the package num2words.

    The processor spells numbers of video frames with it, and refuses to be built without it. Servers do the same, see
    `armature_served.num2words`.
    """
    from transformers.models.smolvlm import processing_smolvlm

    if processing_smolvlm.num2words is None:
        processing_smolvlm.num2words = _refuse_video


def _refuse_video(number: int) -> NoReturn:
    raise ImportError("videos of SmolVLM need the package num2words: pip install num2words")


def _cat_tiles(parts: Sequence[Tensor], features: Sequence[Features]) -> Tensor:
    """Join the tiles of all images, (1, tiles of an image, ...), along dim 1. Tiles of different sizes are padded with
    zeros.

    The processor makes a row of each conversation and fills it with black tiles, which the model drops again.
    """
    return pad_cat([part[0] for part in parts], features)[None]


def _config(kind: str) -> Callable[[TinySettings, Any], Any]:
    """Return a function that builds a configuration of class `kind`."""

    def build(settings: TinySettings, tokenizer: Any) -> Any:
        import transformers

        vision = vision_sizes(settings) | {
            "image_size": settings.image_side,
            "patch_size": PATCH,
            "initializer_range": settings.vision_initializer_range,
        }
        return getattr(transformers, kind)(
            text_config=transformers.LlamaConfig(**text_sizes(settings, tokenizer)),
            vision_config=vision,
            scale_factor=SCALE,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            tie_word_embeddings=settings.tie_embeddings,
        )

    return build


def _sizes(settings: TinySettings) -> dict[str, Any]:
    """Return options of an image processor that cuts images into two tiles along their longer side."""
    side = settings.image_side
    return {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}}


def _tokens_per_tile(settings: TinySettings) -> int:
    return (settings.image_side // PATCH // SCALE) ** 2


def _idefics3_processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    return Idefics3Processor(
        Idefics3ImageProcessor(**_sizes(settings)),
        tokenizer,
        image_seq_len=_tokens_per_tile(settings),
        chat_template=tokenizer.chat_template,
    )


def _smolvlm_processor(settings: TinySettings, tokenizer: Any) -> Any:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    make_num2words_optional()
    side = {"longest_edge": settings.image_side}
    return SmolVLMProcessor(
        SmolVLMImageProcessor(**_sizes(settings)),
        tokenizer,
        SmolVLMVideoProcessor(size=side, max_image_size=side, fps=1, num_frames=8),
        image_seq_len=_tokens_per_tile(settings),
        chat_template=tokenizer.chat_template,
    )


IDEFICS3 = Family(
    name="idefics3",
    model_type="idefics3",
    vision=("model.vision_model",),
    projector=("model.connector",),
    language=("model.text_model", "lm_head"),
    placeholder="image_token_id",
    image_tokens=IMAGE_TOKENS,
    wrap_classes=("LlamaDecoderLayer", "Idefics3EncoderLayer"),
    served_adapters=COMPONENTS,
    images=ImageInputs(
        feature_token=".image_token", joins={"pixel_values": _cat_tiles, "pixel_attention_mask": _cat_tiles}
    ),
    tiny=TinyRecipe(VOCABULARY, smol("<image>"), _config("Idefics3Config"), _idefics3_processor),
)
SMOLVLM = replace(
    IDEFICS3,
    name="smolvlm",
    model_type="smolvlm",
    wrap_classes=("LlamaDecoderLayer", "SmolVLMEncoderLayer"),
    tiny=TinyRecipe(VOCABULARY, smol("<image>"), _config("SmolVLMConfig"), _smolvlm_processor),
)
