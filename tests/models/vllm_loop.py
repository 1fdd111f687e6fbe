"""Serve one checkpoint after another in one vLLM process; runs in vLLM's own Python environment.

The only argument is the number of a socket. Each line from it is a command as a JSON list, answered with one line:
["start", folder, videos, rank of adapters, in towers], ["load", folder] (in place, like this project's file transfer),
["load in pieces", folder] (tensor by tensor, like vLLM's NCCL engine), ["adapt", folder of adapters] and
["ask", conversations, temperature, logit_bias].
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.plugins import load_general_plugins

gc.unfreeze = lambda: None  # vLLM calls it at each shutdown; collecting all imported objects takes half of the time


def register_class(folder: str) -> None:
    """Register the class of the model in `folder` with vLLM. Without this, vLLM would look the class up by name in
    another process, which takes 10 s to import vLLM."""
    load_general_plugins()
    (architecture,) = json.loads((Path(folder) / "config.json").read_text())["architectures"]
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def start(folder: str, videos: int = 0, rank: int = 0, towers: bool = False) -> LLM:
    register_class(folder)
    text = json.loads((Path(folder) / "config.json").read_text())["text_config"]
    gc.freeze()
    return LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=8192,
        max_num_seqs=8,
        enable_chunked_prefill=False,
        enable_prefix_caching=False if "linear_num_key_heads" in text else None,  # as this project's CPU servers set it
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        limit_mm_per_prompt={"image": 4, "video": videos},
        num_gpu_blocks_override=512,
        enable_return_routed_experts="num_experts_per_tok" in text,
        enable_lora=rank > 0,
        max_lora_rank=-(-rank // 8) * 8 or 16,
        enable_tower_connector_lora=towers,
    )


def load(model: LLM, folder: str) -> None:
    model.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    forget(model)


def load_in_pieces(model: LLM, folder: str) -> None:
    weights = load_file(Path(folder) / "model.safetensors")
    config = model.llm_engine.model_config

    def receive(module: Any) -> None:
        initialize_layerwise_reload(module)
        for item in weights.items():
            module.load_weights([item])
        finalize_layerwise_reload(module, config)

    model.apply_model(receive)
    forget(model)


def adapt(model: LLM, folder: str) -> None:
    """Answer with the adapters in `folder` from now on."""
    model.adapter = LoRARequest(folder, 1, folder)


def forget(model: LLM) -> None:
    model.reset_prefix_cache()
    model.llm_engine.reset_mm_cache()
    model.llm_engine.reset_encoder_cache()


def ask(model: LLM, conversations: list[Any], temperature: float, logit_bias: dict[str, float]) -> list[dict[str, Any]]:
    bias = {int(token): value for token, value in logit_bias.items()}
    sampling = SamplingParams(
        max_tokens=8, temperature=temperature, seed=0, logprobs=0, skip_special_tokens=False, logit_bias=bias or None
    )
    rows = []
    for output in model.chat(conversations, sampling, use_tqdm=False, lora_request=getattr(model, "adapter", None)):
        sampled = list(output.outputs[0].token_ids)
        chosen = zip(sampled, output.outputs[0].logprobs, strict=True)
        rows.append(
            {
                "prompt": list(output.prompt_token_ids),
                "sampled": sampled,
                "logprobs": [entries[token].logprob for token, entries in chosen],
                "text": output.outputs[0].text,
                "experts": None if (routes := output.outputs[0].routed_experts) is None else routes.tolist(),
            }
        )
    return rows


def main() -> None:
    model: LLM | None = None
    commands = {"load": load, "load in pieces": load_in_pieces, "adapt": adapt, "ask": ask}
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rw") as lines:
        for line in lines:
            name, *arguments = json.loads(line)
            answer: Any = None
            if name == "start":
                del model
                model = start(*arguments)
            else:
                answer = commands[name](model, *arguments)
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    os._exit(0)  # vLLM's engine takes too long to shut down


if __name__ == "__main__":
    main()
