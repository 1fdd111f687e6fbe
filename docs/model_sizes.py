"""The table of memory in docs/models.md by the estimate of `armature check`; `python docs/model_sizes.py` writes it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from components.models.settings import LoraSettings, ModelSettings
from components.vlm.memory import GIB, OVERHEAD, MemoryEstimate, estimate_memory
from components.vlm.settings import TrainerSettings

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- written by docs/model_sizes.py -->\n", "<!-- end -->\n"
HEAD = (
    "| model | parameters | all weights | on | LoRA, rank 16 | on | in 4 bits | on | weights of a server |\n"
    "|---|---:|---:|---|---:|---|---:|---|---:|\n"
)
TOKENS = 16_384


def text_sizes(hidden: int, layers: int, heads: int, kv: int, inner: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


def qwen3_vl(text: dict[str, Any], vision: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "text_config": text | {"head_dim": 128, "tie_word_embeddings": tied},
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": tied,
    }


SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
QWEN2_5_TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-VL-2B": (
        "qwen2_vl",
        {
            "text_config": text_sizes(1536, 28, 12, 2, 8960, 151_936),
            "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4},
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        {
            "text_config": text_sizes(2048, 36, 16, 2, 11008, 151_936),
            "vision_config": QWEN2_5_TOWER | {"out_hidden_size": 2048},
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        {
            "text_config": text_sizes(3584, 28, 28, 4, 18944, 152_064),
            "vision_config": QWEN2_5_TOWER | {"out_hidden_size": 3584},
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-VL-2B": ("qwen3_vl", qwen3_vl(text_sizes(2048, 28, 16, 8, 6144, 151_936), SMALL_TOWER, True)),
    "Qwen3-VL-4B": ("qwen3_vl", qwen3_vl(text_sizes(2560, 36, 32, 8, 9728, 151_936), SMALL_TOWER, True)),
    "Qwen3-VL-8B": ("qwen3_vl", qwen3_vl(text_sizes(4096, 36, 32, 8, 12288, 151_936), TOWER, False)),
    "Gemma-3-4B": (
        "gemma3",
        {
            "text_config": text_sizes(2560, 34, 8, 4, 10240, 262_208) | {"head_dim": 256},
            "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
        },
    ),
    "LLaVA-1.5-7B": (
        "llava",
        {
            "text_config": text_sizes(4096, 32, 32, 32, 11008, 32_064) | {"model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": 336,
                "patch_size": 14,
            },
        },
    ),
}
"""Model type and published sizes."""


def estimates(model_type: str, sizes: dict[str, Any]) -> tuple[MemoryEstimate, MemoryEstimate, MemoryEstimate]:
    """Training all weights, LoRA of rank 16 on the language model's linear layers, and these above 4 bits."""
    trainer = TrainerSettings(learning_rate=1e-6, max_steps=1, autocast="bf16", max_tokens_per_micro_batch=TOKENS)
    common = {"revision": "main", "gradient_checkpointing": True}
    with tempfile.TemporaryDirectory() as folder:
        CONFIG_MAPPING[model_type](**sizes).save_pretrained(folder)
        whole, lora, few_bits = (
            estimate_memory(Path(folder), ModelSettings(source=folder, **own, **common), trainer, "bfloat16")
            for own in ({}, {"lora": LoraSettings()}, {"lora": LoraSettings(), "quantization": "nf4"})
        )
    return whole, lora, few_bits


def gpus(estimate: MemoryEstimate) -> str:
    """The fewest GPUs of usual sizes over which FSDP2 shards weights, gradients and moments."""
    for count in (1, 2, 4, 8):
        for size in (24, 48, 80):
            if estimate.over(count).trainer * OVERHEAD <= size * 1e9:
                return f"{count}\u00a0x\u00a0{size}\u00a0GB"
    return "more than 8\u00a0x\u00a080\u00a0GB"


def row(name: str) -> str:
    whole, lora, few_bits = estimates(*MODELS[name])
    return (
        f"| {name} | {whole.parameters / 1e9:.2f} B | {whole.trainer / GIB:.0f} GiB | {gpus(whole)} | "
        f"{lora.trainer / GIB:.0f} GiB | {gpus(lora)} | {few_bits.trainer / GIB:.0f} GiB | {gpus(few_bits)} | "
        f"{whole.server_weights / GIB:.0f} GiB |\n"
    )


def main() -> None:
    table = BEGIN + HEAD + "".join(map(row, MODELS)) + END
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
