"""Run by vLLM's own interpreter: several checkpoints after one another, in one process, which starts once.

Reads {"folders": {name: [folder, ...]}, "conversations": [messages]} from the first argument, a JSON file, and writes
{name: [[{"prompt", "sampled", "logprobs"}], ...]} to the second: one list for each folder. Of a name's folders the
first is started with, and those behind it are loaded in place: from the folder, as our file transfer does, where the
name ends in /, else tensor by tensor, as vLLM's NCCL engine does.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.plugins import load_general_plugins

gc.unfreeze = lambda: None  # vLLM does at each end, and to collect all that was imported takes half of the time

SAMPLING = SamplingParams(max_tokens=8, temperature=1.0, seed=0, logprobs=0, skip_special_tokens=False)


def register_class(folder: str) -> None:
    """By its class instead of its name, which vLLM would look up in another process: it imports vLLM again, in 10 s."""
    load_general_plugins()
    (architecture,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def start(folder: str) -> LLM:
    register_class(folder)
    gc.freeze()
    return LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=8192,
        max_num_seqs=8,
        enable_chunked_prefill=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        limit_mm_per_prompt={"image": 4},
        num_gpu_blocks_override=512,
    )


def load_in_place(model: LLM, folder: str) -> None:
    if folder.endswith("/"):
        model.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    else:
        weights = load_file(Path(folder) / "model.safetensors")
        config = model.llm_engine.model_config

        def receive(module: Any) -> None:
            initialize_layerwise_reload(module)
            for item in weights.items():
                module.load_weights([item])
            finalize_layerwise_reload(module, config)

        model.apply_model(receive)
    model.reset_prefix_cache()
    model.llm_engine.reset_mm_cache()
    model.llm_engine.reset_encoder_cache()


def answers(model: LLM, conversations: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for messages in conversations:
        (output,) = model.chat(messages, SAMPLING, use_tqdm=False)
        sampled = list(output.outputs[0].token_ids)
        chosen = zip(sampled, output.outputs[0].logprobs, strict=True)
        rows.append(
            {
                "prompt": list(output.prompt_token_ids),
                "sampled": sampled,
                "logprobs": [entries[token].logprob for token, entries in chosen],
            }
        )
    return rows


def all_answers(folders: list[str], conversations: list[Any]) -> list[list[dict[str, Any]]]:
    model = start(folders[0])
    found = [answers(model, conversations)]
    for folder in folders[1:]:
        load_in_place(model, folder)
        found.append(answers(model, conversations))
    return found


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    found = {name: all_answers(folders, asked["conversations"]) for name, folders in asked["folders"].items()}
    Path(sys.argv[2]).write_text(json.dumps(found))
