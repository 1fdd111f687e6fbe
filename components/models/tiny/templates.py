"""Chat templates of the tiny checkpoints, after those of each family.

Every template takes content as a string or as a list of parts (text, image, image_url) in any turn, a system
message, and any number of turns; an assistant's turn ends with the token that the model samples to stop, so a
later prompt begins with the earlier prompt and completion.
"""

from __future__ import annotations

_PARTS = (
    "{%- macro render(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content -%}"
    "{%- if part['type'] in ('image', 'image_url') -%}{{ 'IMAGE' }}{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
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


def chatml(image: str) -> str:
    """The template of Qwen and InternVL; `image` is the text that stands for one image."""
    return _with(image, _CHATML)


def vicuna(image: str) -> str:
    """The template of LLaVA."""
    return _with(image, _VICUNA)


def mistral(image: str) -> str:
    """The template of Pixtral and Mistral3."""
    return _with(image, _MISTRAL)


def gemma(image: str) -> str:
    """The template of Gemma3; a system message is a turn of its own."""
    return _with(image, _GEMMA)


def _with(image: str, body: str) -> str:
    return _PARTS.replace("IMAGE", image.replace("\n", "\\n")) + body
