"""Peak memory of log-probs, forward and backward: of trained tokens alone against logits everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rollouts import FAMILY
from benchmarks.table import Row

ROWS, LENGTH, RESPONSE, VOCABULARY, CHUNK = 4, 512, 64, 32_768, 64

_SIDE = """
import json, resource, sys, threading, time
import torch
from benchmarks.logprobs import CHUNK, batch_of
from benchmarks.rollouts import model_settings
from armature.components.models.load import load_model
from armature.components.vlm.logprobs import Policy, predicting
from pathlib import Path

folder, kind = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
model = load_model(folder, model_settings(folder))
ids, mask, types = batch_of()
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def run(rows):
    part = {name: value[:rows] for name, value in inputs.items()}
    if kind != "everywhere":
        logprobs, _ = Policy(model, logprobs=kind, temperature=1.0, chunk_tokens=CHUNK)(part, predicting(mask[:rows]))
    else:
        logits = model(**part).logits[:, :-1].float()
        chosen = mask[:rows, 1:]
        everything = logits.log_softmax(-1)
        picked = everything.gather(-1, part["input_ids"][:, 1:, None]).squeeze(-1)
        with torch.no_grad():
            -(everything.exp() * everything).sum(-1)
        logprobs = picked[chosen]
    (-logprobs.mean()).backward()
    return logprobs

run(1)  # what torch allocates once
model.zero_grad(set_to_none=True)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
before, peak, going = resident(), 0, True

def watch():
    global peak
    while going:
        peak = max(peak, resident())
        time.sleep(0.0005)

watcher = threading.Thread(target=watch)
watcher.start()
began = time.perf_counter()
logprobs = run(len(ids))
seconds = time.perf_counter() - began
going = False
watcher.join()
gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
print(json.dumps({"peak": peak - before, "seconds": seconds, "mean": logprobs.mean().item(),
                  "gradient": gradient.norm().item()}))
"""


def batch_of():  # type: ignore[no-untyped-def]
    """Return a batch of text with shape (ROWS, LENGTH). The last RESPONSE tokens of each row are trained on."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(300, VOCABULARY - 300, (ROWS, LENGTH), generator=generator)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -RESPONSE:] = True
    return ids, mask, torch.zeros_like(ids)


def measure() -> list[Row]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from armature.components.models.tiny import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_checkpoint(FAMILY, Path(scratch) / "tiny", 0)
        model = AutoModelForImageTextToText.from_pretrained(folder)
        model.resize_token_embeddings(VOCABULARY)
        wide = Path(scratch) / "wide"
        model.save_pretrained(wide)
        AutoProcessor.from_pretrained(folder).save_pretrained(wide)
        torch, normal, naive = (_measure(wide, kind) for kind in ("torch", "normal", "everywhere"))
    for ours in (torch, normal):
        assert abs(ours["mean"] - naive["mean"]) < 1e-4, (ours, naive)
        assert abs(ours["gradient"] / naive["gradient"] - 1) < 1e-3, (ours, naive)
    shape = f"{ROWS} x {LENGTH} tokens, {RESPONSE} of each trained, vocabulary {VOCABULARY:,}"
    return [
        Row("peak memory, torch", torch["peak"] / 2**20, naive["peak"] / 2**20, "all logits", "MiB", "lower", shape),
        Row("time, torch", torch["seconds"], naive["seconds"], "all logits", "s", "lower"),
        Row("peak memory, normal", normal["peak"] / 2**20, naive["peak"] / 2**20, "all logits", "MiB", "lower"),
        Row("time, normal", normal["seconds"], naive["seconds"], "all logits", "s", "lower"),
    ]


def _measure(folder: Path, kind: str) -> dict[str, float]:
    command = [sys.executable, "-c", _SIDE, str(folder), kind]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    result: dict[str, float] = json.loads(line)
    return result
