"""`python -m benchmarks.model_memory` writes the table of memory in docs/models.md: the estimate of `check`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from armature.components.models.settings import LoraSettings, ModelSettings
from armature.components.vlm.memory import GIB, OVERHEAD, MemoryEstimate, estimate_memory
from armature.components.vlm.settings import TrainerSettings
from benchmarks.model_sizes import config_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- written by benchmarks/model_memory.py -->\n", "<!-- end -->\n"
HEAD = (
    "| model | parameters | all weights | on | LoRA, rank 16 | on | in 4 bits | on | weights of a server |\n"
    "|---|---:|---:|---|---:|---|---:|---|---:|\n"
)
TOKENS = 16_384


MODELS: Mapping[str, str] = {
    "Qwen2-VL-2B": "Qwen/Qwen2-VL-2B-Instruct",
    "Qwen2.5-VL-3B": "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen2.5-VL-7B": "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen3-VL-2B": "Qwen/Qwen3-VL-2B-Instruct",
    "Qwen3-VL-4B": "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen3-VL-8B": "Qwen/Qwen3-VL-8B-Instruct",
    "Gemma-3-4B": "google/gemma-3-4b-it",
    "LLaVA-1.5-7B": "llava-hf/llava-1.5-7b-hf",
}
"""Sources of the models, by the name on the benchmark page."""


def estimates(source: str) -> tuple[MemoryEstimate, MemoryEstimate, MemoryEstimate]:
    """Estimate the memory of three trainings: all weights, LoRA of rank 16 on the language model's linear layers, and
    the same LoRA above 4-bit weights."""
    trainer = TrainerSettings(learning_rate=1e-6, max_steps=1, autocast="bf16", max_tokens_per_micro_batch=TOKENS)
    common = {"revision": "main", "gradient_checkpointing": True}
    with tempfile.TemporaryDirectory() as folder:
        config_of(source).save_pretrained(folder)
        whole, lora, few_bits = (
            estimate_memory(Path(folder), ModelSettings(source=folder, **ours, **common), trainer, "bfloat16")
            for ours in ({}, {"lora": LoraSettings()}, {"lora": LoraSettings(), "quantization": "nf4"})
        )
    return whole, lora, few_bits


def gpus(estimate: MemoryEstimate) -> str:
    """Return the smallest number of GPUs of each usual size that suffices when FSDP2 shards weights, gradients and
    moments."""
    for count in (1, 2, 4, 8):
        for size in (24, 48, 80):
            if estimate.over(count).trainer * OVERHEAD <= size * 1e9:
                return f"{count}\u00a0x\u00a0{size}\u00a0GB"
    return "more than 8\u00a0x\u00a080\u00a0GB"


def row(name: str) -> str:
    whole, lora, few_bits = estimates(MODELS[name])
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
