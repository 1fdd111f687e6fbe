"""Test if the trainer's log-probs in bf16 can equal vLLM's bit for bit: kernel by kernel, with the cost.

Usage: python -m benchmarks.bitwise_gpu [small] [layers=8] [prompts=16] [answers=128] [steps=3] [PART...], each part in
a process of its own, by default `PARTS`. Random weights of Qwen2.5-VL-3B's widths in bf16, the last norm scaled so that
a next token has about `NATS` of entropy.

`kernels`: each kernel of the server against the one that the trainer runs, and whether a row depends on the others.
A server of `SERVERS`: it samples, and is compared with itself: again, alone, and as prompts; then its speed.
`score`: the trainer's log-probs of those samples with its own kernels, with the server's, and with all of those but
one; then where modules give something else. The file has every module.
`update`: two updates with either's kernels, twice from one seed, and the time of each; with "any order", gradients may
be added up as they come.
`run`, or `run=SERVER`: `steps` steps of reinforcement learning in one process, twice from one seed: two turns of each
episode are sampled, scored and learned from with the server's kernels, and the server has the new weights.

The lines go to $OUT/bitwise.json as well. ARMATURE_TEST_VLLM_PYTHON names the Python of the servers, by default this
one; on a GPU this one needs vLLM too, whose kernels the trainer runs. `small` runs on a CPU: what stands in for the
kernels there shows that the code runs, and no more.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from benchmarks import bitwise_kernels, step_case
from benchmarks.bitwise_kernels import ALL, CUDA, TEXT, VISION, logprobs, rotations, switchable, use
from benchmarks.bitwise_server import PAGE, SERVERS, Server, engine, make_images, unwatch, watch
from benchmarks.step_case import clean, make_model, peak_gib, sync

DEVICE = "cuda" if CUDA else "cpu"
PYTHON = os.environ.get("ARMATURE_TEST_VLLM_PYTHON", sys.executable)
PARTS = ("kernels", "default", "invariant", "patched", "graphs", "score", "update", "run")
LIMIT = 300.0
"""Largest number of seconds that one part of the benchmark may take."""
NATS, GROUP, LEARNING_RATE = 2.0, 4, 3e-6
BEST = ("patched", "graphs", "invariant", "eager", "default")
"""Names of servers, best first. The first one that has sampled is compared with every set of trainer kernels. The other
servers are compared with the trainer's usual kernels and with all of the server's kernels."""


@dataclass(frozen=True)
class Sizes:
    """Args:
    layers: of the language model; the small one has 2.
    prompts: of each case, 23 at most.
    answers: tokens of an answer.
    steps: of the run.
    """

    small: bool = not CUDA
    layers: int = 8
    prompts: int = 16
    answers: int = 128
    steps: int = 3


def make(folder: Path, sizes: Sizes) -> None:
    """Write the checkpoint to `folder`/base and the processor of the images beside it."""
    from armature.components.models.load import load_processor
    from armature.components.models.settings import ModelSettings
    from armature.components.models.tiny.build import SMALL, make_tiny_checkpoint
    from armature.components.training.ranks import Ranks
    from armature.components.vlm.publish import Publisher

    side = 112 if sizes.small else 448
    settings = SMALL.model_copy(update={"image_side": side, "max_positions": 32_768})
    tiny = make_tiny_checkpoint("qwen2.5-vl", folder / "tiny", 0, settings)
    for file in tiny.glob("*.safetensors"):
        file.unlink()  # only the processor is wanted
    processor = load_processor(tiny, ModelSettings(source=str(tiny)))
    with patch.dict(step_case.TEXT, num_hidden_layers=sizes.layers):
        model = make_model(tiny, "sdpa", DEVICE, sizes.small)
    config = model.config.text_config
    spread = math.sqrt(2 * (math.log(config.vocab_size) - NATS))  # of normally distributed logits
    generator = torch.Generator(DEVICE).manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=DEVICE) * 0.1)
                parameter.add_(1.0 if "norm" in name or "ln_q" in name else 0.0)
            if name.endswith("language_model.norm.weight"):
                parameter.mul_(spread / (0.02 * math.sqrt(config.hidden_size)))
    ranks = Ranks(device=torch.device(DEVICE))
    Publisher(model, processor, folder / "processor").publish(model, folder / "base", ranks)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B weights, logits {spread:.1f} wide", flush=True)


@torch.no_grad()
def compare_kernels(_: Path, sizes: Sizes, __: str) -> Iterator[dict[str, Any]]:
    """Compare each of the server's kernels with PyTorch's. Also compare the kernel's results for different numbers of
    rows in one launch."""
    theirs, text = bitwise_kernels.kernels(), step_case.SMALL_TEXT if sizes.small else step_case.TEXT
    width, wide = text["hidden_size"], text["intermediate_size"]
    heads, groups = text["num_attention_heads"], text["num_key_value_heads"]
    size, rows, eps = width // heads, 512 if sizes.small else 4096, 1e-6
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=DEVICE) * scale).bfloat16()

    x, weight, both = random(rows, width), random(width, 2 * wide, scale=0.02), random(rows, 2 * wide)
    q, k, v = random(rows, heads, size), random(rows, groups, size), random(rows, groups, size)
    logits, ids = random(64, text["vocab_size"], scale=4.0), torch.arange(64, device=DEVICE) * 7
    norm = qwen.Qwen2_5_VLRMSNorm(width, eps).to(DEVICE, torch.bfloat16)
    norm.weight.copy_(random(width, scale=0.1) + 1)
    angles = torch.arange(rows, device=DEVICE)[:, None] * torch.logspace(0, -6, size // 2, device=DEVICE)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rotated() -> Tensor:
        full = [torch.cat([part, part], -1)[None] for part in (cos, sin)]
        out, _ = qwen.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *full)
        return out[0].transpose(0, 1).reshape(rows, -1)

    def attention(count: int) -> Tensor:
        ends = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        return theirs.attention(q[:count], k[:count], v[:count], ends, count, size**-0.5, True)[0]

    def own_attention() -> Tensor:
        wider = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        query, key, value = (x.transpose(0, 1)[None] for x in (q, *wider))
        return scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)

    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "matmul 16": (lambda: theirs.matmul(x[:16], weight), lambda: x[:16] @ weight),
        f"matmul {rows}": (lambda: theirs.matmul(x, weight), lambda: x @ weight),
        "norm": (lambda: theirs.norm(x, norm.weight, eps), lambda: norm(x)),
        "fused_norm": (lambda: theirs.fused_norm(x, norm.weight, eps), lambda: theirs.norm(x, norm.weight, eps)),
        "silu": (lambda: theirs.silu(both), lambda: silu(both[:, :wide]) * both[:, wide:]),
        "rotary": (lambda: theirs.rotary(q.view(rows, -1), k.view(rows, -1), cos, sin, size)[0], rotated),
        "logprobs": (
            lambda: theirs.logprobs(logits, ids),
            lambda: logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0],
        ),
        "attention": (lambda: attention(rows), own_attention),
    }
    for name, (one, ours) in pairs.items():
        yield attempt(name, partial(pair_row, name, one, ours))
    alone: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        "matmul": (x, lambda x: theirs.matmul(x, weight)),
        "matmul, cuBLAS": (x, lambda x: x @ weight),
        "norm": (x, lambda x: theirs.norm(x, norm.weight, eps)),
        "fused_norm": (x, lambda x: theirs.fused_norm(x, norm.weight, eps)),
        "norm, torch": (x, norm),
        "logprobs": (logits, lambda x: theirs.logprobs(x, ids[: len(x)])),
        "attention": (q, lambda x: attention(len(x))),
    }
    for name, (arguments, kernel) in alone.items():
        yield attempt(name, partial(rows_row, name, kernel, arguments))
    if CUDA:
        for count in (1, 17, 130, 600, rows - 1):
            for splits in (1, 0):
                name = f"attention, decode at {count}, splits {splits or 'free'}"
                result = gap(decoded(q, k, v, count, splits), attention(rows)[count - 1 : count])
                yield {"row": "kernel", "kernel": name, **result}


def pair_row(name: str, one: Callable[[], Tensor], other: Callable[[], Tensor]) -> dict[str, Any]:
    times = {"server_ms": timed(one), "torch_ms": timed(other)}
    return {"row": "kernel", "kernel": name} | gap(other(), one()) | times


def rows_row(name: str, kernel: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Any]:
    """Return a row with those numbers n for which the kernel's result for the first n rows differs in some bit from its
    result for all rows at once."""
    whole = kernel(x)
    numbers = [n for n in (1, 2, 8, 16, 64, 128, 255, 256, 512, 1024) if n < len(x)]
    others = [n for n in numbers if not torch.equal(kernel(x[:n]), whole[:n])]
    return {"row": "rows", "kernel": name, "others_at": others}


def decoded(q: Tensor, k: Tensor, v: Tensor, count: int, splits: int) -> Tensor:
    """Return the attention of query number `count` to the first `count` keys, which are stored in pages as when a
    server decodes."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    pages = -(-len(k) // PAGE)
    keys, values = (torch.cat([x, x[: pages * PAGE - len(x)]]).view(pages, PAGE, *x.shape[1:]) for x in (k, v))
    return flash_attn_varlen_func(
        q[count - 1 : count], keys, values, 1, torch.tensor([0, 1], dtype=torch.int32, device=q.device), count,
        seqused_k=torch.tensor([count], dtype=torch.int32, device=q.device), softmax_scale=q.shape[-1] ** -0.5,
        causal=True, window_size=[-1, -1], num_splits=splits, fa_version=3,
        block_table=torch.arange(pages, dtype=torch.int32, device=q.device)[None],
    )  # fmt: skip


def serve(folder: Path, sizes: Sizes, name: str) -> Iterator[dict[str, Any]]:
    """Sample answers with the server `name` in this process, and compare the log-probs of repeated runs on it."""
    how = SERVERS[name]
    began = time.perf_counter()
    llm = engine(folder / "base", how)
    runner = getattr(llm.llm_engine.vllm_config, "use_v2_model_runner", None)
    yield {"row": "server", "start_s": time.perf_counter() - began, "v2_runner": runner}
    server = Server(llm, folder, sizes.small, sizes.prompts, sizes.answers)
    everyone = range(sizes.prompts)
    cases: dict[str, list[dict[str, Any]]] = {}
    document: dict[str, Any] = {"name": name, "cases": cases, "dumps": {}}

    def one_case(case: str) -> dict[str, Any]:
        first = case.rstrip("2")
        cases[case] = server.first(case, everyone) if first == case else server.second(first, everyone, cases[first])
        values = np.concatenate([sample["logprobs"] for sample in cases[case]])
        return {"row": "sampled", "case": case, "tokens": len(values), "mean_logprob": float(values.mean())}

    def itself(what: str, case: str) -> dict[str, Any]:
        server.forget()
        if what == "prefill":
            values = np.concatenate([sample["logprobs"] for sample in cases[case]])
            result = differences(server.as_prompts(cases[case]), values)
        elif what == "again":
            result = themselves(cases[case], server.first(case, everyone))
        else:
            result = themselves(cases[case][:2], [server.first(case, [i], seed=i)[0] for i in everyone[:2]])
        return {"row": "itself", "what": what, "case": case} | result

    def dump(case: str) -> dict[str, Any]:
        document["dumps"][case] = result = server.dump(case)
        return {"row": "dump", "case": case, "modules": len(result["seen"])}

    for case in ("text", "image", "text2", "image2"):
        yield attempt(case, partial(one_case, case))
    for what, case in (("again", "text"), ("alone", "text"), ("alone", "image"), ("prefill", "text")):
        yield attempt(f"{what} {case}", partial(itself, what, case))
    if how["mode"] == "eager":
        for case in ("text", "image"):
            yield attempt(f"dump {case}", partial(dump, case))
    torch.save(document, folder / f"{name}.samples.pt")
    yield attempt("speed", lambda: {"row": "served", **server.speed()})


def attempt(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row that `make` returns. If it fails, return a row with the error instead."""
    try:
        return make()
    except Exception:
        return {"row": "failed", "what": name, "why": traceback.format_exc()[-1500:]}


def differences(mine: Any, theirs: Any) -> dict[str, float]:
    """Return statistics of the differences between two lists of log-probs. The mismatch KL is defined in
    `armature.components.rl.agreement`."""
    both = np.stack([np.asarray(mine, np.float32), np.asarray(theirs, np.float32)])
    gap = both[0].astype(np.float64) - both[1]
    return {
        "tokens": gap.size,
        "equal": float((both[0] == both[1]).mean()),
        "mean": float(np.abs(gap).mean()),
        "max": float(np.abs(gap).max()),
        "kl": float(np.mean(np.expm1(np.minimum(gap, 50.0)) - gap)),
    }


def against(episodes: list[dict[str, Any]], mine: list[Any]) -> dict[str, float]:
    """Compare log-probs of episodes with the log-probs recorded when the episodes were sampled."""
    return differences(np.concatenate(mine), np.concatenate([episode["logprobs"] for episode in episodes]))


def themselves(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare two lists of answers to the same prompts. The log-probs of each answer are compared up to the first token
    that differs; `same_answers` is the share of answers without such a token."""
    mine, theirs, same = [], [], 0
    for a, b in zip(one, two, strict=True):
        equal = np.array(a["answer"]) == np.array(b["answer"])
        until = len(equal) if equal.all() else int(equal.argmin())
        same += bool(equal.all())
        mine.append(a["logprobs"][:until])
        theirs.append(b["logprobs"][:until])
    return {"same_answers": same / len(one)} | differences(np.concatenate(mine), np.concatenate(theirs))


def gap(mine: Tensor, theirs: Tensor) -> dict[str, float]:
    mine, theirs = mine.float(), theirs.float()
    away = (mine - theirs).abs()
    return {
        "equal": (mine == theirs).float().mean().item(),
        "mean": away.mean().item(),
        "max": away.max().item(),
        "relative": (away.norm() / theirs.norm()).item(),
    }


def load(folder: Path, sizes: Sizes) -> tuple[Any, dict[int | None, dict[str, Tensor] | None]]:
    """Return the trainer's model, and the model's inputs for each image by the image's number."""
    base = folder / "base"
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16, attn_implementation="sdpa")
    process = AutoProcessor.from_pretrained(base).image_processor
    images: dict[int | None, dict[str, Tensor] | None] = {None: None}
    for i, image in enumerate(make_images(folder / "tiny", sizes.small, sizes.prompts)):
        arguments = process(images=[image], return_tensors="pt")
        images[i] = {name: arguments[name].to(DEVICE) for name in ("pixel_values", "image_grid_thw")}
    return switchable(model.to(DEVICE).eval()), images


def of_episode(model: Any, episode: dict[str, Any], images: dict[int | None, Any]) -> Tensor:
    """Return the trainer's log-probs of the tokens sampled in an episode, which has one turn or two."""
    return logprobs(model, episode["ids"], episode["places"], images[episode["image"]]).float()


def best(folder: Path) -> str | None:
    return next((name for name in BEST if (folder / f"{name}.samples.pt").exists()), None)


@torch.no_grad()
def score(folder: Path, sizes: Sizes, _: str) -> Iterator[dict[str, Any]]:
    model, images = load(folder, sizes)

    def one(samples: list[dict[str, Any]], on: frozenset[str]) -> dict[str, Any]:
        use(on)
        of_episode(model, samples[0], images)
        sync()
        began = time.perf_counter()
        mine = [of_episode(model, sample, images).cpu().numpy() for sample in samples]
        seconds = time.perf_counter() - began
        return against(samples, mine) | {"seconds": seconds}

    for file in sorted(folder.glob("*.samples.pt")):
        served = torch.load(file, weights_only=False)
        for case, samples in served["cases"].items():
            ways = {"base": frozenset[str](), "all": ALL}
            if served["name"] == best(folder) and case in ("text", "image"):
                names = TEXT + (VISION if case == "image" else ())
                ways |= {f"all-{name}": ALL - {name} for name in names}
            for way, on in ways.items():
                row = {"row": "score", "server": served["name"], "case": case, "step": way}
                yield row | attempt(way, partial(one, samples, on)) | {"row": "score"}
        for case, dump in served["dumps"].items():
            for way, on in (("base", frozenset[str]()), ("all", ALL)):
                use(on)
                about = {"server": served["name"], "case": case, "step": way}
                result = attempt(f"modules, {case}", partial(all_modules, model, dump, images, about))
                yield from result.get("rows", [result])


def all_modules(*arguments: Any) -> dict[str, Any]:
    return {"rows": [*modules(*arguments)]}


def modules(
    model: Any, dump: dict[str, Any], images: dict[int | None, Any], about: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield for each module how far its output in the trainer is from its output in the server. The tokens of the
    prompt and the tokens decoded later are compared separately."""
    mine: dict[str, list[Tensor]] = {}
    watch(mine, model)
    try:
        of_episode(model, dump["sample"], images)
    finally:
        unwatch()
    theirs, count, first = dump["seen"], dump["sample"]["places"][0], True
    for name, (value,) in mine.items():
        row = {"row": "module", **about, "module": name}
        if name not in theirs or value.shape[1] != theirs[name].shape[1]:
            yield row | {"shapes": [list(x.shape) for x in (value, theirs.get(name, value[:0]))]}
            continue
        rows = min(len(value), len(theirs[name]))
        spans = {"image": (0, rows)} if name[0] == "V" else {"prompt": (0, count), "decoded": (count, rows)}
        for what, (begin, end) in spans.items():
            result = gap(value[begin:end], theirs[name][begin:end])
            other = result["equal"] < 1
            yield row | {"rows": what, **result, "first": first and other}
            first = first and not other


@contextmanager
def one_order(strict: bool = True) -> Iterator[None]:
    """Sum gradients in a fixed order during the block. FlashAttention has a fixed order only with `strict`, since torch
    otherwise merely warns."""
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=CUDA)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def update(folder: Path, sizes: Sizes, _: str) -> Iterator[dict[str, Any]]:
    """Compare updates of the model with the two sets of kernels. The row `gradient` says how far their gradients are
    apart."""
    model, images = load(folder, sizes)
    name = best(folder)
    if name is None:
        raise SystemExit("no server has sampled anything")
    served = torch.load(folder / f"{name}.samples.pt", weights_only=False)
    samples = [sample for case in ("text", "image") for sample in served["cases"][case][:4]]
    episodes = [sample | {"advantage": (-1.0) ** i} for i, sample in enumerate(samples)]
    begun = copy_of(model)
    gradients: dict[str, dict[str, Tensor]] = {}
    ends: dict[str, str] = {}

    def one(way: str, strict: bool) -> dict[str, Any]:
        use(ALL if way == "all" else ())
        model.load_state_dict(begun, strict=False)
        clean()
        optimizer, seconds, kl = new_optimizer(model), [], []
        for number in range(2):
            sync()
            began = time.perf_counter()
            kl.append(learn(model, optimizer, episodes, images)["kl"])
            sync()
            seconds.append(time.perf_counter() - began)
            if number == 0 and way not in gradients:
                gradients[way] = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        label, digest = way if strict else f"{way}, any order", fingerprint(model)
        row = {"row": "update", "server": name, "way": label, "seconds": seconds, "weights": digest[:12]}
        row |= {"kl": kl[0], "peak_gib": peak_gib()}
        if label in ends:
            row["same_weights"] = ends[label] == digest
        ends.setdefault(label, digest)
        return row

    for way in ("all", "base"):
        for strict in (True, True, False):
            with one_order(strict):
                yield attempt(f"update, {way}, {'one' if strict else 'any'} order", partial(one, way, strict))
    if len(gradients) == 2:
        ours, other = gradients["all"], gradients["base"]
        away = sum((ours[key].float() - value.float()).square().sum().item() for key, value in other.items())
        size = sum(value.float().square().sum().item() for value in other.values())
        yield {"row": "gradient", "relative": math.sqrt(away / size)}
    gradients.clear()
    model.zero_grad(set_to_none=True)
    yield from long_row(model, sizes)


def long_row(model: Any, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Measure the forward and backward pass over one long row of text, in ms: with the trainer's kernels and with the
    server's, each with and without a fixed order of sums."""
    count = 64 if sizes.small else 4096
    ids = np.random.default_rng(4).integers(500, 2000, count).tolist()
    places = range(count // 2, count)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        logprobs(model, ids, places).mean().backward()

    def forward() -> None:
        with torch.no_grad():
            logprobs(model, ids, places)

    def one(way: str, strict: bool) -> dict[str, Any]:
        row = {"row": "speed", "way": way if strict else f"{way}, any order", "tokens": count}
        return row | {"forward_ms": timed(forward), "both_ms": timed(step)}

    for way, on in (("base", frozenset[str]()), ("all", ALL)):
        for strict in (False, True):
            use(on)
            with one_order(strict):
                yield attempt(f"speed, {way}", partial(one, way, strict))


def run(folder: Path, sizes: Sizes, name: str) -> Iterator[dict[str, Any]]:
    """Make two equal training runs with the server `name` and compare them. The default server is `graphs` if it has
    sampled before, else `patched`."""
    name = name or ("graphs" if (folder / "graphs.samples.pt").exists() else "patched")
    began = time.perf_counter()
    llm = engine(folder / "base", SERVERS[name])
    server = Server(llm, folder, sizes.small, sizes.prompts, sizes.answers)
    model, images = load(folder, sizes)
    use(ALL)
    begun = copy_of(model)
    yield {"row": "server", "server": name, "start_s": time.perf_counter() - began}
    ends: list[tuple[list[str], str]] = []
    for number in range(2):
        model.load_state_dict(begun, strict=False)
        server.load(model)
        optimizer = new_optimizer(model)
        sampled: list[str] = []
        for step in range(sizes.steps):
            row = {"row": "run", "server": name, "run": number, "step": step}
            sync()
            began = time.perf_counter()
            episodes = play(server, step)
            sampled.append(digest_of(episodes))
            row |= {"tokens_are": sampled[-1][:12], "sampling_s": time.perf_counter() - began}
            began = time.perf_counter()
            with torch.enable_grad(), one_order():
                row |= learn(model, optimizer, episodes, images)
            row["update_s"] = time.perf_counter() - began
            with torch.no_grad():  # whether equality could have been missed: the new weights, the old samples
                again = [of_episode(model, episodes[i], images).cpu().numpy() for i in (0, -1)]
            row["new_weights_kl"] = against([episodes[0], episodes[-1]], again)["kl"]
            began = time.perf_counter()
            server.load(model)
            sync()
            yield row | {"sync_s": time.perf_counter() - began}
        ends.append((sampled, fingerprint(model)))
        yield {"row": "ended", "server": name, "run": number, "weights": ends[-1][1], "peak_gib": peak_gib()}
    (tokens, weights), (others, other) = ends
    same = [one == two for one, two in zip(tokens, others, strict=True)]
    yield {"row": "same", "server": name, "tokens_of_steps": same, "weights": weights == other}


def play(server: Server, step: int) -> list[dict[str, Any]]:
    """Return episodes of two turns, `GROUP` episodes per prompt. Episodes without an image come first."""
    groups, episodes = max(1, server.count // GROUP), []
    which = [(step * groups + i) % server.count for i in range(groups) for _ in range(GROUP)]
    rewards = np.random.default_rng([7, step])
    for case in ("text", "image"):
        seed = 10_000 * (step + 1) + (1000 if case == "image" else 0)
        one = server.first(case, which, seed)
        two = server.second(case, which, one, seed + 500)
        signs = [sign for _ in range(groups) for sign in rewards.permutation([1.0, 1.0, -1.0, -1.0])]
        for a, b, sign in zip(one, two, signs, strict=True):
            if b["ids"][: len(a["ids"])] != a["ids"]:
                raise RuntimeError("the second turn does not continue the first one")
            both = {"places": [*a["places"], *b["places"]], "logprobs": np.concatenate([a["logprobs"], b["logprobs"]])}
            episodes.append(b | both | {"advantage": sign})
    return episodes


def learn(
    model: Any, optimizer: torch.optim.Optimizer, episodes: list[dict[str, Any]], images: dict[int | None, Any]
) -> dict[str, Any]:
    """Make one optimizer step with PPO's objective. The first half of the episodes must be those without images."""
    model.zero_grad(set_to_none=True)
    total = sum(len(episode["places"]) for episode in episodes)
    mine, ratios = [], []
    for episode in episodes:
        result = of_episode(model, episode, images)
        ratio = (result - torch.from_numpy(episode["logprobs"]).to(DEVICE)).exp()
        advantage = episode["advantage"]
        (-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / total).backward()
        mine.append(result.detach().cpu().numpy())
        ratios.append(ratio.detach())
    before = copy_of(model)
    optimizer.step()
    changed = sum((value != before[name]).sum().item() for name, value in model.named_parameters())
    row = against(episodes, mine)
    half = len(episodes) // 2
    for case, part in (("text", slice(half)), ("image", slice(half, None))):
        row[f"equal_{case}"] = against(episodes[part], mine[part])["equal"]
    ratio = torch.cat(ratios)
    return row | {"ratios": [ratio.min().item(), ratio.max().item()], "changed_weights": changed}


def digest_of(episodes: list[dict[str, Any]]) -> str:
    """Return a digest of all tokens in the episodes and of every bit of their log-probs."""
    digest = hashlib.sha256()
    for episode in episodes:
        digest.update(np.array(episode["ids"], np.int32).tobytes() + episode["logprobs"].tobytes())
    return digest.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """Return a digest of every bit of the model's weights."""
    digest = hashlib.sha256()
    for _, value in sorted(model.named_parameters()):
        digest.update(value.detach().view(torch.int16).cpu().numpy())
    return digest.hexdigest()


def timed(what: Callable[[], Any]) -> float:
    """Return the shortest time of five calls, in ms."""
    what()
    best = math.inf
    for _ in range(5):
        sync()
        began = time.perf_counter()
        for _ in range(4):
            what()
        sync()
        best = min(best, (time.perf_counter() - began) / 4)
    return best * 1e3


def line(row: dict[str, Any]) -> str:
    words = []
    for key, value in row.items():
        if isinstance(value, float):
            words.append(f"{key} {value:.6g}")
        elif key != "row":
            words.append(f"{value}" if isinstance(value, str) else f"{key} {value}")
    return f"{row['row']:<8}" + "  ".join(words)


def child(part: str, folder: Path) -> None:
    sizes = Sizes(**json.loads((folder / "sizes.json").read_text()))
    if part == "make":
        make(folder, sizes)
        return
    name, _, of = part.partition("=")
    work = {"kernels": compare_kernels, "score": score, "update": update, "run": run}.get(name, serve)
    with (folder / "rows.jsonl").open("a") as file, rotations():
        for row in work(folder, sizes, part if work is serve else of):
            if row["row"] != "module" or row.get("first") or "shapes" in row:
                print(line(row), flush=True)
            file.write(json.dumps({"part": part} | row) + "\n")
            file.flush()


def environment(part: str) -> dict[str, str]:
    invariant = SERVERS.get(part.removeprefix("run="), {"invariant": True})["invariant"]
    arguments = {
        "VLLM_BATCH_INVARIANT": str(int(invariant and CUDA)),  # in the trainer alone it chooses a launch of `kernels`
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if not CUDA:
        arguments |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if part.startswith(("update", "run")):
        arguments["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms want it
    return os.environ | arguments


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]))
        return
    keys, numbers, wanted = {field.name for field in fields(Sizes)}, dict[str, int](), list[str]()
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key in keys and value:
            numbers[key] = int(value)
        elif word in PARTS or word in SERVERS or (key == "run" and value in SERVERS):
            wanted.append(word)
        elif word != "small":
            raise SystemExit(f"{word!r} is none of {[*PARTS, *SERVERS, *keys]}")
    sizes = Sizes(small="small" in sys.argv or not CUDA, **numbers)
    order = [*SERVERS, *PARTS]  # what servers sampled is used by the others
    wanted = sorted(wanted or PARTS, key=lambda part: order.index(part.partition("=")[0]))
    began, name = time.perf_counter(), torch.cuda.get_device_name() if CUDA else "CPU"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "sizes.json").write_text(json.dumps(asdict(sizes)))
        (folder / "rows.jsonl").touch()
        seconds, failed = {}, list[str]()
        try:
            for part in ([] if wanted == ["kernels"] else ["make"]) + wanted:
                print(f"--- {part}", flush=True)
                start = time.perf_counter()
                python = PYTHON if part in SERVERS or part.startswith("run") else sys.executable
                command = [python, "-m", "benchmarks.bitwise_gpu", "--child", part, scratch]
                try:
                    output = f"exit status {subprocess.run(command, env=environment(part), timeout=LIMIT).returncode}"
                except subprocess.TimeoutExpired:
                    output = "timed out"
                seconds[part] = time.perf_counter() - start
                print(f"--- {part}: {output}, {seconds[part]:.0f} s", flush=True)
                failed += [part] if output != "exit status 0" else []
                if failed == ["make"]:
                    break
        finally:
            rows = [json.loads(text) for text in (folder / "rows.jsonl").read_text().splitlines()]
            document = {"device": name, "torch": torch.__version__, **asdict(sizes), "seconds": seconds, "rows": rows}
            (Path(os.environ.get("OUT", ".")) / "bitwise.json").write_text(json.dumps(document, indent=1) + "\n")
            print(f"{name}, torch {torch.__version__}; all of it took {time.perf_counter() - began:.0f} s")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
