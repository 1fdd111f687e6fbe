"""Run by vLLM's own interpreter: serves one checkpoint after another in one process, at the word of a test.

Reads commands, one JSON list a line, from the socket whose number is its only argument, and answers each with a line:
["start", folder], ["load", folder] (in place, as our file transfer does) and ["ask", conversations, logit_bias].
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm_answers import load_in_place, start


def ask(model: LLM, conversations: list[Any], logit_bias: dict[str, float]) -> list[dict[str, Any]]:
    sampling = SamplingParams(
        max_tokens=8,
        temperature=0.7,
        seed=0,
        logprobs=0,
        skip_special_tokens=False,
        logit_bias={int(token): bias for token, bias in logit_bias.items()},
    )
    rows = []
    for output in model.chat(conversations, sampling, use_tqdm=False):
        sampled = list(output.outputs[0].token_ids)
        chosen = zip(sampled, output.outputs[0].logprobs, strict=True)
        rows.append(
            {
                "prompt": list(output.prompt_token_ids),
                "sampled": sampled,
                "logprobs": [entries[token].logprob for token, entries in chosen],
                "text": output.outputs[0].text,
            }
        )
    return rows


def main() -> None:
    model: LLM | None = None
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rw") as lines:
        for line in lines:
            name, *arguments = json.loads(line)
            answer: Any = None
            if name == "start":
                del model
                model = start(*arguments)
            elif name == "load":
                load_in_place(model, arguments[0] + "/")
            else:
                answer = ask(model, *arguments)
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    os._exit(0)  # vLLM's engine does not end by itself in time


if __name__ == "__main__":
    main()
