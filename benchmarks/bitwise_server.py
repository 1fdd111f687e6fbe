"""vLLM in this process, with kernels that give a row the same bits whatever else they compute, and what it samples."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.bitwise_kernels import CUDA
from benchmarks.step_case import Case, sync

SERVERS: dict[str, dict[str, Any]] = {
    "default": {"invariant": False, "mode": "compiled"},  # as it comes, for the speed
    "eager": {"invariant": False, "mode": "eager"},
    "invariant": {"invariant": True, "mode": "eager"},  # VLLM_BATCH_INVARIANT as 0.26 has it
    "patched": {"invariant": True, "mode": "eager", "patched": True},  # see `patch_server`
    "graphs": {"invariant": True, "mode": "graphs", "patched": True},  # the same kernels, CUDA graphs when decoding
}
PAGE, EXTRA = 16, 20
"""Number of tokens in a page of the server's cache, and number of tokens that the user says in the second turn."""


def patch_server() -> None:
    """Check, before the engine is made, which parts VLLM_BATCH_INVARIANT leaves dependent on the batch in vLLM 0.26.

    The norm after a sum, whose kernel is another than that of a norm alone; the vision tower's patches, a product of
    cuBLAS; and its attention: FlashAttention may split a sequence as suits the batch.
    """
    from vllm.model_executor.layers import conv, layernorm
    from vllm.model_executor.layers.batch_invariant import linear_batch_invariant
    from vllm.v1.attention.backends import fa_utils

    norm, ours = layernorm.rms_norm_batch_invariant, getattr(fa_utils, "flash_attn_varlen_func", None)

    def summed(x: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
        if residual is None:
            return norm(x, weight, eps)
        residual = x + residual
        return norm(residual, weight, eps), residual

    def of_patches(self: Any, x: Tensor) -> Tensor:
        flat = x.reshape(len(x), -1)
        return linear_batch_invariant(flat, self.weight.view(len(self.weight), -1), self.bias)[:, :, None, None, None]

    layernorm.rms_norm_batch_invariant = summed
    conv.Conv3dLayer._forward_mulmat = of_patches
    if ours is not None:
        fa_utils.flash_attn_varlen_func = lambda *arguments, **more: ours(*arguments, **{"num_splits": 1} | more)


def engine(model: Path, how: Mapping[str, Any]) -> Any:
    """Return a vLLM engine of the kind `how`, one of the values of `SERVERS`. VLLM_BATCH_INVARIANT is set in the
    environment."""
    from vllm import LLM

    if how.get("patched") and CUDA:
        patch_server()
    more: dict[str, Any] = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
    if CUDA:
        more |= {"kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.5, "block_size": PAGE}
        more |= {"attention_backend": "FLASH_ATTN"}
    if how["mode"] == "graphs" and CUDA:
        captured = [1, 2, 4, 8, 16, 24, 32, 48, 64]
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": captured}
        more["compilation_config"] = graphs
    return LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        limit_mm_per_prompt={"image": 1, "video": 0},
        generation_config="vllm",
        enforce_eager=how["mode"] == "eager" or not CUDA,
        enable_prefix_caching=True,
        seed=0,
        **more,
    )


def make_images(folder: Path, small: bool, count: int) -> list[Any]:
    """Return one image for each of `count` prompts, and one for the prompt whose module outputs are recorded."""
    return [image for letter in "ABC" for (image,) in Case(folder, letter, small).images][: count + 1]


def prompts(folder: Path, small: bool, count: int) -> dict[str, list[list[int]]]:
    """Return the token ids of the prompts of each case, with one token per image. The last prompt of a case is the one
    whose module outputs are recorded."""
    config = json.loads((folder / "base/config.json").read_text())
    random, (low, high) = np.random.default_rng(3), (500, 2000) if small else (1000, 151_000)
    image = [config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    result: dict[str, list[list[int]]] = {"text": [], "image": []}
    for _ in range(count + 1):
        words = [random.integers(low, high, random.integers(40, 100)).tolist() for _ in range(2)]
        result["text"].append(words[0])
        result["image"].append([*words[1][:4], *image, *words[1][4:]])
    return result


class Server:
    """A vLLM engine, with the prompts and images made from `folder`: `count` prompts of each case."""

    def __init__(self, llm: Any, folder: Path, small: bool, count: int, answers: int) -> None:
        self.llm, self.small, self.count, self.answers = llm, small, count, answers
        self.images, self.prompts = make_images(folder / "tiny", small, count), prompts(folder, small, count)
        config = json.loads((folder / "base/config.json").read_text())
        names = ("image", "video", "vision_start", "vision_end")
        self.bias = {config[f"{name}_token_id"]: -100.0 for name in names}

    def forget(self) -> None:
        """Empty the caches: keys and values of prefixes, and encoded images."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def load(self, model: nn.Module) -> None:
        """Copy the weights of a transformers model into the engine, in place."""
        weights = [(name, value.detach()) for name, value in model.named_parameters()]
        if CUDA:
            self.llm.apply_model(partial(_load, weights))
        else:  # packs them for its kernels again
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.forget()

    def first(self, case: str, which: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
        """Sample one answer to each of the prompts with the numbers `which`. `case` is "text" or "image"."""
        return self.sample([self.prompts[case][i] for i in which], self._shown(case, which), seed)

    def second(self, case: str, which: Sequence[int], one: list[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
        """Sample the second turn after the first turns `one`. Keys and values of the first turns may still be in the
        cache."""
        texts, ids = self.prompts["text"], self.prompts[case]
        arguments = [
            [*ids[i], *a["answer"], *texts[self.count - 1 - i][:EXTRA]] for i, a in zip(which, one, strict=True)
        ]
        return self.sample(arguments, self._shown(case, which), seed)

    def sample(
        self, ids: Sequence[list[int]], images: Sequence[int] | None, seed: int = 0, answers: int | None = None
    ) -> list[dict[str, Any]]:
        """Sample an answer to each prompt at temperature 1; prompt i has the seed `seed` + i. In a result, `ids` has
        the whole sequence with all tokens of an image, and `places` has the positions of the sampled tokens."""
        from vllm import SamplingParams

        arguments = [self._prompt(one, images[i] if images else None) for i, one in enumerate(ids)]
        settings = [
            SamplingParams(
                temperature=1.0, seed=seed + i, max_tokens=answers or self.answers, ignore_eos=True, logprobs=0,
                detokenize=False, logit_bias=self.bias,
            )
            for i in range(len(ids))
        ]  # fmt: skip
        result = []
        for i, out in enumerate(self.llm.generate(arguments, settings, use_tqdm=False)):
            answer = out.outputs[0]
            values = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
            ids_of, begin = [*out.prompt_token_ids, *answer.token_ids], len(out.prompt_token_ids)
            episode = {"ids": ids_of, "places": range(begin, len(ids_of)), "image": images[i] if images else None}
            result.append(episode | {"answer": list(answer.token_ids), "logprobs": np.array(values, np.float32)})
        return result

    def as_prompts(self, samples: list[dict[str, Any]]) -> Any:
        """Return the log-probs that the server computes for answers when they are part of the prompt, as one
        concatenated array."""
        from vllm import SamplingParams

        settings = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        arguments = [{"prompt_token_ids": sample["ids"]} for sample in samples]
        values = [
            out.prompt_logprobs[place][sample["ids"][place]].logprob
            for out, sample in zip(self.llm.generate(arguments, settings, use_tqdm=False), samples, strict=True)
            for place in sample["places"]
        ]
        return np.array(values, np.float32)

    def dump(self, case: str) -> dict[str, Any]:
        """Record the outputs of modules for a prompt that the server has not seen before, and for the three decoding
        steps after it."""
        seen: dict[str, list[Tensor]] = {}
        self.forget()
        try:
            self.llm.apply_model(partial(watch, seen))
            sample = self.sample([self.prompts[case][-1]], self._shown(case, [self.count]), answers=4)[0]
        finally:
            unwatch()
        return {"sample": sample, "seen": {key: torch.cat(parts) for key, parts in seen.items()}}

    def speed(self) -> dict[str, float]:
        """Measure the throughput of many concurrent answers, and of prompts alone. Each is the better of two runs."""
        count, answers = (4, 16) if self.small else (64, 256)
        texts = [self.prompts["text"][i % self.count] for i in range(count)]
        many = [[600 + i, *one] for i, one in enumerate(texts)]  # no two begin alike
        long = [[700 + i, *(one * 30)[:1500]] for i, one in enumerate(texts[: count // 4])]
        decoding, prefill = (
            min(self._seconds(arguments, n) for _ in range(2)) for arguments, n in ((many, answers), (long, 1))
        )
        rates = {"tokens_per_s": count * answers / decoding, "prompt_tokens_per_s": sum(map(len, long)) / prefill}
        return {"requests": count, "answer_tokens": answers, **rates}

    def _seconds(self, ids: list[list[int]], answers: int) -> float:
        self.forget()
        sync()
        began = time.perf_counter()
        self.sample(ids, None, answers=answers)
        sync()
        return time.perf_counter() - began

    def _shown(self, case: str, which: Sequence[int]) -> Sequence[int] | None:
        return which if case == "image" else None

    def _prompt(self, ids: list[int], image: int | None) -> dict[str, Any]:
        shown = {"multi_modal_data": {"image": self.images[image]}} if image is not None else {}
        return {"prompt_token_ids": ids} | shown


def _load(weights: list[tuple[str, Tensor]], model: Any) -> int:
    return len(model.load_weights(iter(weights)))


# Outputs of modules on both sides.

PLACES = {
    "patch_embed.proj": (None, "V.patches"),
    "blocks.0.norm1": ("V0.in", "V0.norm1"),
    "blocks.0.attn.proj": ("V0.attn", "V0.o"),
    "blocks.0.norm2": (None, "V0.norm2"),
    "blocks.0.mlp.down_proj": ("V0.act", "V0.down"),
    "merger.ln_q": ("V.out", None),
    "merger.mlp": (None, "V.merged"),
    "layers.0.input_layernorm": ("L0.in", "L0.norm1"),
    "layers.0.self_attn.o_proj": ("L0.attn", "L0.o"),
    "layers.0.post_attention_layernorm": (None, "L0.norm2"),
    "layers.0.mlp.down_proj": ("L0.act", "L0.down"),
    "language_model.norm": (None, "norm"),  # transformers'
    "language_model.model.norm": (None, "norm"),
}
"""Names for the recorded input and output of a module, by the end of the module's name. None: not recorded."""
HOOKS: list[Any] = []


def watch(seen: dict[str, list[Tensor]], model: nn.Module) -> None:
    """Record the inputs and outputs of the modules in `PLACES`. `seen` gets a list for each recorded name, with one
    tensor per forward pass.

    Blocks of vLLM's vision tower call no hooks; what goes into the next one stands for them.
    """

    def add(name: str, use: Callable[[Any], Tensor]) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: Any, *out: Any) -> None:
            value = use(out[0] if out else arguments)
            value = value[0] if value.ndim > 2 and len(value) == 1 else value
            seen.setdefault(name, []).append(value.detach().reshape(len(value), -1).to("cpu", copy=True))

        return hook

    def one(values: Any) -> Tensor:
        return values[0] if isinstance(values, tuple) else values

    for name, module in model.named_modules():
        parts = name.split(".")
        before, after = next((which for place, which in PLACES.items() if name.endswith(place)), (None, None))
        if parts[-2:-1] == ["layers"]:
            after, use = f"L{parts[-1]}.out", lambda out: sum(out[1:], out[0]) if isinstance(out, tuple) else out
        else:
            use = one
        if parts[-3:-2] == ["blocks"] and parts[-1] == "norm1":
            before = f"V{parts[-2]}.in"
        if before:
            HOOKS.append(module.register_forward_pre_hook(add(before, one)))
        if after:
            HOOKS.append(module.register_forward_hook(add(after, use)))


def unwatch() -> None:
    while HOOKS:
        HOOKS.pop().remove()
