"""Shared prompts of Qwen3.5 against the same rows with nothing shared, and fla-core's kernels against plain torch.

Usage: python -m benchmarks.delta_gpu [small]. The model has the widths of a model of 2 B parameters, three layers of
Gated DeltaNet, one of attention, a small vocabulary and random weights. Each way makes forward and backward passes over
four groups of eight answers to a prompt with an image: `shared` computes a prompt once, `apart` packs rows that share
nothing, `padded` is transformers' own forward. The table of errors compares with padded rows in fp32 and plain torch.
`small` runs on a CPU. Results go to $OUT/delta.json as well.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import unwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.contracts.batches import Sample
from armature.components.models import packed_delta
from armature.components.models.adapters import get_adapter, model_inputs
from armature.components.models.packed import complete_packing
from armature.components.models.varlen import choose_kernels
from armature.components.vlm.loader import FeatureCache
from armature.components.vlm.logprobs import Policy, predicting
from armature.components.vlm.packing import packed_batch
from benchmarks.attention_gpu import CUDA, DEVICE, GEOMETRIES, ROUNDS, SMALL, made, timed
from benchmarks.step_case import clean, need_gpu, peak_gib

GROUPS, ANSWERS = 4, 8
PROMPT, SHORTEST, LONGEST = 800, 64, 512
"""Number of tokens of a prompt beside its image, and of the answers to it."""
WAYS = ("shared", "apart", "padded")
Pass = tuple[dict[str, Tensor], tuple[Tensor, Tensor], Any]
"""A batch on the device: inputs of the model, positions that predict trained tokens, and the packing, if any."""


def samples_of(processor: Any, store: ImageStore, allowed: list[int], small: bool) -> list[Sample]:
    """Return groups of answers, each to a prompt with an image and text of its own."""
    random, rows = np.random.default_rng(0), []
    groups, answers, shrink = (2, 3, 16) if small else (GROUPS, ANSWERS, 1)
    side = SMALL.image_side if small else GEOMETRIES["qwen3.5"].side
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    chat = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    for group in range(groups):
        image = Image.fromarray(random.integers(0, 255, (side, side, 3), dtype=np.uint8))
        ref = store.put(encode_png(image))
        begin = processor(text=[text], images=[image])["input_ids"][0]
        prompt = [*begin, *random.choice(allowed, PROMPT // shrink)]
        for answer in range(answers):
            length = random.integers(SHORTEST // shrink, LONGEST // shrink)
            ids = np.array([*prompt, *random.choice(allowed, length)], np.int32)
            mask, zeros = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
            versions = np.where(mask, 0, -1).astype(np.int32)
            name = f"{group}/{answer}"
            rows.append(Sample(name, f"{group}", name, ids, mask, zeros, versions, zeros, 0.0, (ref,)))
    return rows


def batches_of(policy: Policy, adapter: Any, store: ImageStore, samples: list[Sample], folder: Path) -> dict[str, Pass]:
    """Return the batch of each way."""
    collator, features = adapter.collator, FeatureCache(adapter.collator, store, folder)
    firsts = [token for token in range(len(policy.forbidden)) if token not in collator.forbidden_token_ids]
    apart = []
    for sample, first in zip(samples, firsts[-len(samples) :], strict=True):
        apart.append(replace(sample, input_ids=np.array([first, *sample.input_ids[1:]], np.int32)))
    device, batches = torch.device(DEVICE), {}
    for way in WAYS:
        rows, packing = apart if way == "apart" else samples, None
        if way == "padded":
            batch = collator.collate_features(rows, features)
        else:
            batch = packed_batch(collator, rows, features)
            packing = complete_packing(policy.model, model_inputs(batch), batch.grids, batch.packing).to(device)
        inputs = {name: value.to(device) for name, value in model_inputs(batch).items()}
        batches[way] = inputs, predicting(batch.loss_mask, device), packing
    return batches


def passes(policy: Policy, batch: Pass) -> tuple[Tensor, dict[str, Tensor]]:
    """Make a forward and a backward pass. Return log-probs, and gradients by parameter name."""
    policy.zero_grad()
    logprobs, _ = policy(*batch)
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).mean().backward()
    return logprobs.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute the recurrence in plain torch within this block, in packed rows and in transformers."""
    rule = unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    with (
        patch.object(packed_delta, "_fla_rule", packed_delta.torch_rule),
        patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", rule),
    ):
        yield


def errors(policy: Policy, batches: dict[str, Pass]) -> list[dict[str, Any]]:
    """Compare log-probs in nats, and gradients relative to their norm, with padded rows in plain torch in fp32.

    Afterwards the policy is in fp32.
    """
    rows: list[dict[str, Any]] = []
    policy.model.bfloat16().float()  # both dtypes have the same weights
    with plain_torch():
        reference, expected = passes(policy, batches["padded"])
        expected = {name: value.clone() for name, value in expected.items()}
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    for dtype in (torch.bfloat16, torch.float32):
        policy.model.to(dtype)
        for rule in ("plain torch", "fla-core") if CUDA and packed_delta.has_fla() else ("plain torch",):
            for way in ("shared", "padded"):
                with plain_torch() if rule == "plain torch" else torch.enable_grad():
                    logprobs, gradients = passes(policy, batches[way])
                gaps = {name: (gradients[name].float() - value).norm() for name, value in expected.items()}
                worst = max(expected, key=lambda name: float(gaps[name] / (expected[name].norm() + 1e-6 * norm)))
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "rule": rule,
                    "way": way,
                    "largest": float((logprobs - reference).abs().max()),
                    "mean": float((logprobs - reference).abs().mean()),
                    "gradient": float(torch.stack([*gaps.values()]).norm() / norm),
                    "worst": float(gaps[worst] / expected[worst].norm()),
                    "parameter": worst,
                }
                rows.append(row)
                print(
                    f"{row['dtype']:<9} {rule:<12} {way:<7} log-probs {row['largest']:.1e} at most, {row['mean']:.1e} "
                    f"on average; gradient {row['gradient']:.1e}, worst {row['worst']:.1e} ({worst})",
                    flush=True,
                )
    return rows


def main(words: list[str]) -> None:
    small = words == ["small"]
    if words and not small:
        raise SystemExit(__doc__)
    if not small:
        need_gpu("python -m benchmarks.delta_gpu small")
    model, processor = made("qwen3.5", small)
    choose_kernels(model)
    with tempfile.TemporaryDirectory() as scratch:
        store = ImageStore(Path(scratch) / "images")
        adapter = get_adapter(model.config, processor, store.open)
        forbidden = sorted(adapter.collator.forbidden_token_ids)
        policy = Policy(model, logprobs="torch", temperature=1.0, forbidden_token_ids=forbidden, packing=True)
        policy.to(DEVICE)
        allowed = [token for token in range(len(policy.forbidden)) if token not in set(forbidden)]
        samples = samples_of(processor, store, allowed, small)
        batches = batches_of(policy, adapter, store, samples, Path(scratch))
    policy.model.to(torch.bfloat16 if CUDA else torch.float32)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    memory: dict[str, float] = {}
    for way in WAYS:
        clean()
        passes(policy, batches[way])
        passes(policy, batches[way])
        memory[way] = peak_gib()
    for _ in range(1 if small else ROUNDS):
        for way in WAYS:
            seconds[way].append(timed(lambda way=way: passes(policy, batches[way])))
    ratios = sorted(a / b for a, b in zip(seconds["shared"], seconds["apart"], strict=True))
    tokens = {way: batches[way][0]["input_ids"].numel() for way in WAYS}
    tokens |= {way: len(batches[way][2].rows) for way in ("shared", "apart")}
    for way in WAYS:
        low, middle, high = (1e3 * pick(seconds[way]) for pick in (min, statistics.median, max))
        print(f"{way:<7} {tokens[way]:,} tokens, {middle:.1f} ms ({low:.1f} to {high:.1f}), {memory[way]:.1f} GiB")
    print(f"shared / apart: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})", flush=True)
    differences = errors(policy, batches)
    if "OUT" in os.environ:
        device = torch.cuda.get_device_name() if CUDA else "cpu"
        document = {"device": device, "torch": torch.__version__, "tokens": tokens, "seconds": seconds}
        document |= {"ratios": ratios, "gib": memory, "errors": differences}
        Path(os.environ["OUT"], "delta.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
