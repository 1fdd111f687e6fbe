"""The work of both sides of the GPU benchmark of robot policies: MolmoAct2's released sizes, weights and examples.

Knows nothing of this project: LeRobot's half imports it too.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import sys
import time
import traceback
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

ACTIONS, CHUNK, DRAWS = 7, 10, 8
IMAGES, PROMPT = 2, 90
EOS, PAD, IM_START, IM_END, IM_PATCH, ACTION_START, ACTION_END, FIRST_ACTION = (
    151_645,
    151_643,
    *(154_624, 154_625, 154_626),
    *(151_932, 151_933, 151_934),
)
CASES = ("expert 8", "expert 32", "lora 8", "lora 32", "full 8", "full 32", "answer 1", "answer 8", "answer 32")
"""Names of the cases. A training case has the trained parts and the number of examples per update; "answer N" computes
N answers at once."""
COMPARED, FLOW_SEED = 2, 7
"""Number of examples for which both sides compute loss and gradient, and the seed of the flow times and noise used for
them."""
RELEASED: dict[str, Any] = {
    "model_type": "molmoact2",
    "vit_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "image_default_input_size": [378, 378],
        "image_num_pos": 729,
    },
    "adapter_config": {
        "vit_layers": [-3, -9],
        "pooling_attention_mask": True,
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "intermediate_size": 9728,
        "text_hidden_size": 2560,
    },
    "text_config": {
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 154_624,
        "additional_vocab_size": 128,
        "qkv_bias": False,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "max_position_embeddings": 16_384,
        "rope_theta": 5e6,
        "use_qk_norm": True,
        "qk_norm_type": "qwen3",
    },
    "action_expert_config": {
        "hidden_size": 768,
        "num_layers": 36,
        "num_heads": 8,
        "mlp_ratio": 4.0,
        "ffn_multiple_of": 256,
        "timestep_embed_dim": 256,
    },
    "image_start_token_id": IM_START,
    "image_end_token_id": IM_END,
    "image_patch_id": IM_PATCH,
    "action_start_token_id": ACTION_START,
    "action_end_token_id": ACTION_END,
    "action_token_start_id": FIRST_ACTION,
    "num_action_tokens": 2048,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "pad_token_id": PAD,
    "max_action_dim": 32,
    "max_action_horizon": CHUNK,
}


def sizes(small: bool) -> dict[str, Any]:
    """Return the released configuration. With `small`, return one with small layers, for a trial run on a CPU."""
    made = copy.deepcopy(RELEASED)
    if small:
        heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
        image = {
            "intermediate_size": 96,
            "num_hidden_layers": 5,
            "image_default_input_size": [70, 70],
            "image_num_pos": 25,
        }
        text = {
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "max_position_embeddings": 512,
        }
        made["vit_config"] |= heads | image
        made["adapter_config"] |= heads | {"vit_layers": [-3, -4], "intermediate_size": 96, "text_hidden_size": 64}
        made["text_config"] |= heads | text
        made["action_expert_config"] |= {"hidden_size": 64, "num_layers": 3, "num_heads": 4}
    return made


def patches_of(config: dict[str, Any]) -> int:
    """Return the number of patches along one side of an image."""
    return int(config["vit_config"]["image_default_input_size"][0]) // 14


def examples(config: dict[str, Any], count: int, *, answers: bool) -> Iterator[dict[str, Any]]:
    """Return examples with two images and with texts whose lengths differ as in LIBERO's tasks. If action tokens are
    trained, an example also has 40 of them.

    ids, image_tokens: (S,). pixels: (IMAGES, patches, 588) uint8 levels. windows: (P, 4), of one image. labels: (S,) or
    None. actions: (CHUNK, 32) fp32.
    """
    random = np.random.default_rng(0)
    side = patches_of(config)
    pooled = -(-side // 2)
    grid = np.full((2 * pooled, 2 * pooled), -1)
    grid[:side, :side] = np.arange(side * side).reshape(side, side)
    windows = grid.reshape(pooled, 2, pooled, 2).transpose(0, 2, 1, 3).reshape(-1, 4)
    image = [IM_START, *[IM_PATCH] * pooled**2, IM_END]
    for _ in range(count):
        words = random.integers(0, 150_000, int(random.integers(PROMPT - 12, PROMPT + 12))).tolist()
        prompt = [EOS, *image * IMAGES, *words]
        bins = (FIRST_ACTION + random.integers(0, 1024, 40)).tolist()
        answer = [ACTION_START, *bins, ACTION_END, EOS] if answers else []
        ids = np.array(prompt + answer)
        actions = np.zeros((CHUNK, config["max_action_dim"]), np.float32)
        actions[:, :ACTIONS] = random.uniform(-1, 1, (CHUNK, ACTIONS))
        yield {
            "ids": ids,
            "image_tokens": np.isin(ids, (IM_START, IM_END, IM_PATCH)),
            "pixels": random.integers(0, 256, (IMAGES, side * side, 588), dtype=np.uint8),
            "windows": windows,
            "labels": np.array([-100] * len(prompt) + answer) if answer else None,
            "actions": actions,
        }


def flow_samples(config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flow times (COMPARED, DRAWS) and noise (COMPARED, DRAWS, CHUNK, 32)."""
    random = np.random.default_rng(FLOW_SEED)
    times = random.beta(1.0, 1.5, (COMPARED, DRAWS)).astype(np.float32) * 0.998 + 0.001
    noise = random.standard_normal((COMPARED, DRAWS, CHUNK, config["max_action_dim"])).astype(np.float32)
    return torch.from_numpy(times), torch.from_numpy(noise)


@torch.no_grad()
def fill(name: str, tensor: torch.Tensor) -> None:
    """Fill the weight with this released name with values that depend only on the name, so that all sides have equal
    weights. All values but the rotary frequencies are exact in bf16."""
    if name.endswith("rotary_emb.inv_freq"):
        half = tensor.numel()
        exponents = torch.arange(0, 2 * half, 2, dtype=torch.int64).float() / (2 * half)
        tensor.copy_(1.0 / (RELEASED["text_config"]["rope_theta"] ** exponents))
        return
    generator = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(tensor.shape, device=tensor.device).normal_(0.0, 0.02, generator=generator)
    norm = name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_f.weight"))
    tensor.copy_((values + 1.0 if norm else values).to(torch.bfloat16))


def clean() -> None:
    """Release unused GPU memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def norm_of(parameters: Any) -> float:
    """Return the norm of the gradients of these parameters."""
    gradients = [each.grad.float().norm() for each in parameters if each.grad is not None]
    return float(torch.stack(gradients).norm())


def timed(work: Callable[[], object], count: int) -> dict[str, Any]:
    """Call `work` `count` times. Return the seconds of each call, measured with a synchronization at its end, and the
    peak of GPU memory. Our learner begins a new peak when it reports one, so reports count too."""
    cuda, taken, peak = torch.cuda.is_available(), [], 0.0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(count):
        began = time.perf_counter()
        made = work()
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
        if isinstance(made, dict):
            peak = max(peak, made["memory/peak_gib"])
    if cuda:
        peak = max(peak, torch.cuda.max_memory_allocated() / 2**30)
    return {"seconds": taken, "median": statistics.median(taken), "peak_gib": peak}


def lerobot_update(policy: Any, loss_of: Callable[[], torch.Tensor]) -> Callable[[], tuple[float, float]]:
    """Return a function that updates LeRobot's `policy` with LeRobot's optimizer, schedule and clipping, and returns
    the loss and the norm of its gradient."""
    preset = policy.config.get_optimizer_preset()
    optimizer = preset.build(policy.get_optim_params())
    schedule = policy.config.get_scheduler_preset().build(optimizer, 1000)
    policy.train()

    def work() -> tuple[float, float]:
        loss = loss_of()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), preset.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.item(), norm.item()

    return work


class Side(ABC):
    """Commands that a driver sends to one of the compared sides. `open_training` and `open_answer` set `work`, which
    makes one update or one call."""

    def __init__(self, small: bool) -> None:
        self.raw, self.small = sizes(small), small
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.work: Any = None

    def open(self, case: str) -> dict[str, Any]:
        """Prepare a case and warm up `work`. Return facts about the case, which are reported before it is measured."""
        mode, count, *dtype = case.split()
        self.dtype: Any = dtype[0] if dtype else "bfloat16"
        result = self.open_answer(int(count)) if mode == "answer" else self.open_training(mode, int(count))
        timed(self.work, 3)
        return result

    @abstractmethod
    def open_training(self, mode: Any, batch: int) -> dict[str, Any]:
        """Prepare updates. Return the loss of the first examples with fixed flow times and noise and without dropout,
        and the norm of its gradient."""

    @abstractmethod
    def open_answer(self, rows: int) -> dict[str, Any]:
        """Prepare calls that compute `rows` answers at once. Return facts about them."""

    def measure(self, count: int) -> dict[str, Any]:
        return timed(self.work, count)

    def close(self) -> dict[str, Any]:
        self.work = None
        clean()
        return {}


def serve(side: Side) -> None:
    """Answer requests by calling the methods of `side`. Each request is a line of JSON on standard input. All other
    output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = getattr(side, request.pop("do"))(**request)
        except torch.OutOfMemoryError:
            result = {"failed": "out of memory"}
        except Exception:
            result = {"failed": traceback.format_exc()[-1000:]}
        print(json.dumps(result), file=answers, flush=True)
