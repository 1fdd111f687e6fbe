"""Recipes for tiny checkpoints: sizes, vocabulary, chat template, configuration and processor of a family. Nothing
imports torch.

Every chat template accepts content as a string or as a list of parts (text, image, image_url) in any turn, a system
message, and any number of turns. An assistant's turn ends with the token that the model samples to stop, so the next
prompt begins with the previous prompt and completion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from armature.components.contracts.settings import Settings

PATCH = 14  # side of a patch in pixels, in all families but Qwen3-VL


class Transcript(Settings):
    """A conversation that teaches the answer format.

    In `user`, `{image}` stands for an image; in `assistant`, `{answer}` stands for a randomly drawn answer.
    """

    user: tuple[str, ...] = Field(min_length=1)
    """The user's turns, e.g. '{image}What color is this?'."""
    assistant: tuple[str, ...] = Field(min_length=1)
    """The assistant's turns, as many as the user's."""

    @model_validator(mode="after")
    def _turns_alternate(self) -> Self:
        if len(self.user) != len(self.assistant):
            raise ValueError(f"{len(self.user)} user turns, but {len(self.assistant)} assistant turns")
        return self


class FormatSettings(Settings):
    """Next-token training on conversations whose images are all blank.

    It gives random weights what pretrained models have: the environment's answer format, at chance accuracy.
    """

    system: str = ""
    """System prompt of every conversation; empty for none."""
    transcripts: tuple[Transcript, ...] = Field(min_length=1)
    """Conversations, used one after the other, again and again."""
    answers: tuple[str, ...] = Field(min_length=1)
    """Answers that replace {answer}, each equally often."""
    image_side: PositiveInt = 56
    """Width and height of the blank images, in pixels."""
    steps: PositiveInt = 150
    """Optimizer steps."""
    batch_size: PositiveInt = 32
    """Conversations per optimizer step."""
    learning_rate: PositiveFloat = 1e-2
    """Peak learning rate of AdamW, after a warm-up of five steps and before a cosine decay."""
    trained: Literal["embeddings", "language"] = "embeddings"
    """Weights that learn the format: the input and output embeddings, or the whole language model."""


class TinySettings(Settings):
    """Sizes of a checkpoint made from a seed. vLLM requires attention heads of size 32, 64, 80, 96, 112 or 128."""

    seed: NonNegativeInt = 0
    """Seed of the weights."""
    hidden_size: PositiveInt = Field(64, multiple_of=32)
    """Width of the language model."""
    intermediate_size: PositiveInt = 128
    """Width of the language model's feed-forward layers."""
    layers: PositiveInt = 2
    """Layers of the language model."""
    heads: PositiveInt = 2
    """Attention heads of the language model."""
    key_value_heads: PositiveInt = 2
    """Key and value heads of the language model."""
    vision_hidden_size: PositiveInt = Field(64, multiple_of=32)
    """Width of the vision tower."""
    vision_intermediate_size: PositiveInt = 128
    """Width of the vision tower's feed-forward layers."""
    vision_layers: PositiveInt = 1
    """Layers of the vision tower."""
    vision_heads: PositiveInt = 2
    """Attention heads of the vision tower."""
    image_side: PositiveInt = Field(224, multiple_of=28)
    """Side in pixels of an image or of its crops: the largest for Qwen and Pixtral, a fixed one for other families."""
    max_positions: PositiveInt = 2048
    """Longest sequence in tokens."""
    vocabulary_size: PositiveInt = Field(384, ge=300)
    """Largest number of tokens of the tokenizer."""
    corpus: tuple[str, ...] = ()
    """Texts that the tokenizer is trained on before its own sentences, so that it encodes them in few tokens."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the language model's weights."""
    vision_initializer_range: PositiveFloat = 0.02
    """Standard deviation of the vision tower's weights."""
    tie_embeddings: bool = False
    """Use one matrix for input and output embeddings."""
    format: FormatSettings | None = None
    """Training that teaches an answer format; leave it out for none."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        for width, heads, where in (
            (self.hidden_size, self.heads, "heads"),
            (self.vision_hidden_size, self.vision_heads, "vision_heads"),
        ):
            if width % heads or width // heads not in (32, 64, 80, 96, 112, 128, 192, 256):
                raise ValueError(f"{where} = {heads} and a width of {width} give a head size unknown to vLLM")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of key_value_heads = {self.key_value_heads}")
        return self


@dataclass(frozen=True)
class TinyVocabulary:
    """Special tokens of a family.

    Attributes:
        markers: special tokens with the first ids, in this order.
        words: ordinary texts that are one token each.
        inputs_only: special tokens with the last ids, for which the output head has no rows.
        named: tokens by attribute name, e.g. image_token, which some processors read.
    """

    markers: tuple[str, ...]
    pad: str
    eos: str
    bos: str | None = None
    words: tuple[str, ...] = ()
    inputs_only: tuple[str, ...] = ()
    named: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TinyRecipe:
    """Recipe of a family's tiny checkpoint.

    Attributes:
        config, processor: build the Hugging Face objects from settings and tokenizer.
        initialize: overwrites random weights from which the model would not learn to use its images.
    """

    vocabulary: TinyVocabulary
    template: str
    config: Callable[[TinySettings, Any], Any]
    processor: Callable[[TinySettings, Any], Any]
    initialize: Callable[[Any, TinySettings], None] = lambda model, settings: None


def vision_sizes(settings: TinySettings) -> dict[str, int]:
    """Return the configuration entries that most vision towers have in common."""
    return {
        "hidden_size": settings.vision_hidden_size,
        "intermediate_size": settings.vision_intermediate_size,
        "num_hidden_layers": settings.vision_layers,
        "num_attention_heads": settings.vision_heads,
    }


def text_sizes(settings: TinySettings, tokenizer: Any) -> dict[str, Any]:
    """Return the configuration entries that all language models have in common."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_value_heads,
        "max_position_embeddings": settings.max_positions,
        "initializer_range": settings.initializer_range,
        "tie_word_embeddings": settings.tie_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


_PARTS = (
    "{%- macro render(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content -%}"
    "{%- if part['type'] in ('image', 'image_url') -%}{{ 'IMAGE' }}{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
"""Jinja macro that renders the content of a message, which is a string or a list of parts."""
_CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{{ render(message['content']) }}{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_VICUNA = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ 'ASSISTANT:' }}{{ render(message['content']) }}{{ '</s>' }}"
    "{%- elif message['role'] == 'system' -%}{{ render(message['content']) }}{{ '\\n' }}"
    "{%- else -%}{{ 'USER: ' }}{{ render(message['content']) }}{{ '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}"
)
_MISTRAL = (
    "{{ '<s>' }}{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ render(message['content']) }}{{ '</s>' }}"
    "{%- elif message['role'] == 'system' -%}"
    "{{ '[SYSTEM_PROMPT]' }}{{ render(message['content']) }}{{ '[/SYSTEM_PROMPT]' }}"
    "{%- else -%}{{ '[INST]' }}{{ render(message['content']) }}{{ '[/INST]' }}{%- endif -%}"
    "{%- endfor -%}"
)
_GEMMA = (
    "{{ '<bos>' }}{%- for message in messages -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\\n' }}{{ render(message['content']) }}{{ '<end_of_turn>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
_SMOL = (
    "{{ '<|im_start|>' }}{%- for message in messages -%}"
    "{{ message['role'] | capitalize + ':' }}{{ render(message['content']) }}{{ '<end_of_utterance>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}"
)
_GLM = (
    "{{ '[gMASK]<sop>' }}{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>\\n' }}{{ render(message['content']) }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
)


def chatml(image: str) -> str:
    """Chat template of Qwen and InternVL; `image` is the text that stands for one image."""
    return _template(image, _CHATML)


def vicuna(image: str) -> str:
    """Chat template of LLaVA."""
    return _template(image, _VICUNA)


def mistral(image: str) -> str:
    """Chat template of Pixtral and Mistral3."""
    return _template(image, _MISTRAL)


def gemma(image: str) -> str:
    """Chat template of Gemma3; a system message is a turn of its own."""
    return _template(image, _GEMMA)


def smol(image: str) -> str:
    """Chat template of Idefics3 and SmolVLM."""
    return _template(image, _SMOL)


def glm(image: str) -> str:
    """Chat template of GLM. An answer ends where the next turn begins, with `<|user|>`."""
    return _template(image, _GLM)


def _template(image: str, body: str) -> str:
    """Return a chat template: the macro for message contents, followed by `body`. `image` is the text that stands for
    one image."""
    return _PARTS.replace("IMAGE", image.replace("\n", "\\n")) + body
