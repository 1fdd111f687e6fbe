"""Run by vLLM's own interpreter: several checkpoints after one another, in one process, which starts once.

Reads {"folders": {name: folder}, "conversations": [messages]} from the first argument, a JSON file, and writes
{name: [{"prompt", "sampled", "logprobs"}]} to the second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

SAMPLING = SamplingParams(max_tokens=8, temperature=1.0, seed=0, logprobs=0, skip_special_tokens=False)


def answers(folder: str, conversations: list[Any]) -> list[dict[str, Any]]:
    model = LLM(
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
    )
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


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    found = {name: answers(folder, asked["conversations"]) for name, folder in asked["folders"].items()}
    Path(sys.argv[2]).write_text(json.dumps(found))
