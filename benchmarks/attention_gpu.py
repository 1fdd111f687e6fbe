"""Attention kernels as `model.attn_implementation = "auto"` chooses them, against each that can be named.

Usage: python -m benchmarks.attention_gpu [small] [flex] [FAMILY...]. Models have the released widths, four layers in
the language model and in the vision tower, a small vocabulary and random weights. Each way makes one forward and
backward pass over the same padded rows. FlashAttention is PyTorch's own kernel under flash-attn's names, in
`flash_attention/`. `flex` adds flex_attention, which is compiled for half a minute per family. `small` runs on a CPU.
The rows go to $OUT/attention.json as well.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.contracts.batches import Sample
from armature.components.families.family import tiny_recipe
from armature.components.families.tiny import TinySettings
from armature.components.models.adapters import get_adapter, model_inputs
from armature.components.models.attention import apply_image_attention
from armature.components.models.tiny.build import SMALL
from armature.components.models.tiny.tokenizer import train_tokenizer
from armature.components.models.varlen import choose_kernels
from armature.components.vlm.logprobs import Policy, predicting
from benchmarks.step_case import clean, need_gpu, sync

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
AUTO, NAMED = "auto", ("sdpa", "eager", "flash_attention_2")
ROUNDS, REPEATS = 5, 3
LENGTHS = (300, 380, 420, 500, 540, 620, 700, 900)
"""Number of tokens after the image in each row."""
TEXT = {"hidden_size": 2560, "intermediate_size": 9728, "heads": 32, "key_value_heads": 8}
QWEN_VISION = {"vision_hidden_size": 1280, "vision_intermediate_size": 5120, "vision_heads": 16}
LARGE = {"vision_hidden_size": 1024, "vision_intermediate_size": 4096, "vision_heads": 16}
SO400M = {"vision_hidden_size": 1152, "vision_intermediate_size": 4304, "vision_heads": 16}
QWEN_TEXT = {"hidden_size": 1536, "intermediate_size": 8960, "heads": 12, "key_value_heads": 2}


@dataclass(frozen=True)
class Geometry:
    """Sizes of a family's model. `sizes` are settings of the family's tiny recipe; `text` and `vision` are values that
    the recipe does not set, for the text configuration and the vision configuration."""

    sizes: dict[str, int]
    side: int = 448
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)


GEOMETRIES = {
    "qwen2-vl": Geometry(QWEN_TEXT | QWEN_VISION),
    "qwen2.5-vl": Geometry(
        QWEN_VISION
        | {"hidden_size": 2048, "intermediate_size": 11008, "heads": 16, "key_value_heads": 2}
        | {"vision_intermediate_size": 3420},
        vision={"window_size": 112},
    ),
    "qwen3-vl": Geometry(TEXT | LARGE, text={"head_dim": 128, "mrope_section": [24, 20, 20]}),
    "qwen3.5": Geometry(
        LARGE | {"hidden_size": 2048, "intermediate_size": 6144, "heads": 8, "key_value_heads": 2},
        text={"head_dim": 256, "mrope_section": [11, 11, 10], "linear_num_key_heads": 16}
        | {"linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    "qwen3-vl-moe": Geometry(
        SO400M | {"hidden_size": 2048, "intermediate_size": 6144, "heads": 32, "key_value_heads": 4},
        text={"head_dim": 128, "mrope_section": [24, 20, 20], "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768},
    ),
    "smolvlm": Geometry(
        SO400M | {"hidden_size": 2048, "intermediate_size": 8192, "heads": 32, "key_value_heads": 32}, side=336
    ),
    "internvl": Geometry(QWEN_TEXT | LARGE),
    "molmo2": Geometry(TEXT | SO400M, side=378, text={"head_dim": 128}),
    "gemma3": Geometry(
        SO400M | {"hidden_size": 2560, "intermediate_size": 10240, "heads": 8, "key_value_heads": 4},
        text={"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024},
    ),
    "llava-next": Geometry(
        LARGE | {"hidden_size": 4096, "intermediate_size": 14336, "heads": 32, "key_value_heads": 8}, side=336
    ),
}


def made(family: str, small: bool) -> tuple[Any, Any]:
    """Return a model and its processor. The model is in the state in which the loader has it before it chooses
    kernels."""
    recipe, geometry = tiny_recipe(family), GEOMETRIES[family]
    sizes = geometry.sizes | {"image_side": geometry.side, "layers": 4, "vision_layers": 4, "max_positions": 8192}
    settings: TinySettings = SMALL if small else SMALL.model_copy(update=sizes)
    tokenizer = train_tokenizer(
        recipe.vocabulary, settings.vocabulary_size, [], recipe.template, settings.max_positions
    )
    processor, config = recipe.processor(settings, tokenizer), recipe.config(settings, tokenizer)
    if not small:
        for name, value in geometry.text.items():
            if name == "mrope_section":
                config.text_config.rope_parameters[name] = value
            else:
                setattr(config.text_config, name, value)
        for name, value in geometry.vision.items():
            setattr(config.vision_config, name, value)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        dtype = torch.bfloat16 if CUDA else torch.float32
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="sdpa")
    recipe.initialize(model, settings)
    return apply_image_attention(model), processor


def samples_of(processor: Any, store: ImageStore, allowed: list[int], side: int, small: bool) -> list[Sample]:
    """Return samples with one image each."""
    made, random = [], np.random.default_rng(0)
    for row, tokens in enumerate(LENGTHS[:2] if small else LENGTHS):
        image = Image.fromarray(random.integers(0, 255, (side, side, 3), dtype=np.uint8))
        content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        prompt = processor(text=[text], images=[image])["input_ids"][0]
        ids = np.concatenate([prompt, random.choice(allowed, tokens // 16 if small else tokens)]).astype(np.int32)
        mask, zeros = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
        versions, ref = np.where(mask, 0, -1).astype(np.int32), store.put(encode_png(image))
        made.append(Sample(f"{row}", "g", f"{row}", ids, mask, zeros, versions, zeros, 0.0, (ref,)))
    return made


def family_row(family: str, ways: tuple[str, ...], small: bool) -> dict[str, Any]:
    model, processor = made(family, small)
    with tempfile.TemporaryDirectory() as scratch:
        store = ImageStore(Path(scratch))
        adapter = get_adapter(model.config, processor, store.open)
        forbidden = sorted(adapter.collator.forbidden_token_ids)
        allowed = sorted(set(range(model.get_output_embeddings().out_features)) - set(forbidden))
        side = SMALL.image_side if small else GEOMETRIES[family].side
        batch = adapter.collator.collate(samples_of(processor, store, allowed, side, small), store.open)
    inputs = {name: value.to(DEVICE) for name, value in model_inputs(batch).items()}
    at = predicting(batch.loss_mask, inputs["input_ids"].device)
    policy = Policy(model, logprobs="torch", temperature=1.0, forbidden_token_ids=forbidden).to(DEVICE)

    def chosen(way: str) -> None:
        model.set_attn_implementation("sdpa" if way == AUTO else way)
        if way == AUTO:
            choose_kernels(model)

    def passes() -> torch.Tensor:
        policy.zero_grad()
        logprobs, _ = policy(inputs, at)
        logprobs.mean().backward()
        return logprobs.detach()

    result: dict[str, torch.Tensor] = {}
    failed: dict[str, str] = {}
    for way in (AUTO, *ways):
        try:
            chosen(way)
            result[way] = passes()
            passes()
        except Exception as error:  # what transformers refuses is a result
            failed[way] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    seconds: dict[str, list[float]] = {way: [] for way in result}
    for _ in range(1 if small else ROUNDS):
        for way in result:
            chosen(way)
            seconds[way].append(timed(passes))
    ms = {way: 1e3 * statistics.median(values) for way, values in seconds.items()}
    named = {way: value for way, value in ms.items() if way != AUTO}
    if AUTO not in ms or not named:
        raise SystemExit(f"{family}: nothing to compare: {json.dumps(failed)}")
    best = min(named, key=lambda way: named[way])
    gaps = {way: float((values - result[AUTO]).abs().mean()) for way, values in result.items() if way != AUTO}
    return {
        "family": family,
        "tokens": int(batch.attention_mask.sum()),
        "padded": list(batch.input_ids.shape),
        "ms": ms,
        "spread": {way: [1e3 * min(values), 1e3 * max(values)] for way, values in seconds.items()},
        "best": best,
        "ratio": ms[AUTO] / ms[best],
        "mean_gap": gaps,
        "failed": failed,
    }


def timed(passes: Callable[[], Any]) -> float:
    sync()
    began = time.perf_counter()
    for _ in range(REPEATS):
        passes()
    sync()
    return (time.perf_counter() - began) / REPEATS


def measure(words: list[str]) -> None:
    families = [family for family in GEOMETRIES if family in words] or list(GEOMETRIES)
    ways = NAMED if "flex" not in words else (*NAMED, "flex_attention")
    began, rows = time.perf_counter(), []
    for family in families:
        rows.append(row := family_row(family, ways, "small" in words))
        times = "  ".join(f"{way} {ms:.1f} ms (gap {row['mean_gap'].get(way, 0):.1g})" for way, ms in row["ms"].items())
        print(f"{family:<12}auto / best {row['ratio']:.3f} ({row['best']})  {times}", flush=True)
        for way, reason in row["failed"].items():
            print(f"{'':<12}{way}: {reason}", flush=True)
        clean()
    print(f"largest ratio {max(row['ratio'] for row in rows):.3f}, {time.perf_counter() - began:.0f} s")
    if "OUT" in os.environ:
        device = torch.cuda.get_device_name() if CUDA else "cpu"
        document = {"device": device, "torch": torch.__version__, "rows": rows}
        Path(os.environ["OUT"], "attention.json").write_text(json.dumps(document, indent=1))


def main(words: list[str]) -> None:
    if unknown := set(words) - {"small", "flex", *GEOMETRIES}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}\n{__doc__}")
    if "small" not in words:
        need_gpu("python -m benchmarks.attention_gpu small")
    paths = [str(Path(__file__).parent / "flash_attention")] if CUDA else []  # before transformers is imported
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "benchmarks.attention_gpu", "measure", *words]
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], check=True)


if __name__ == "__main__":
    measure(sys.argv[2:]) if sys.argv[1:2] == ["measure"] else main(sys.argv[1:])
