"""`MultimodalGRPOTrainer`: the loop, with a transformers model that samples in the place of the server."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from PIL import Image

from components.adapters import MultimodalAdapter
from components.configuration import load_recipe
from components.contracts.batches import MultimodalBatch
from components.contracts.errors import ConfigurationError
from components.contracts.rollouts import GenerateOutputs, LogProbs, TokenIds
from components.inference.probe import ProbeAnswer, make_probe
from components.models.load import load_model
from components.training import MultimodalGRPOTrainer, MultimodalRLConfig

from .conftest import LORA, Tiny, model_settings

COLORS = load_recipe("train-vlm/colors").dump()["environment"]["args"]


@dataclass
class Answer:
    prompt_token_ids: TokenIds
    token_ids: TokenIds
    logprobs: LogProbs
    text: str
    finish_reason: str
    policy_version: int


class LocalSampler:
    """Samples with the weights that it was last given, as a server would: weights come as folders only."""

    def __init__(self, tiny: Tiny, folder: Path, version: int, forbidden: Sequence[int]) -> None:
        self.tiny, self.version, self.forbidden = tiny, version, list(forbidden)
        self.model = load_model(folder, model_settings())
        self.weights = SimpleNamespace(probe=make_probe(384, self.forbidden, 64, images=False))
        self.synced: list[int] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def sync(self, folder: Path, version: int, answer: ProbeAnswer) -> None:
        """The trainer's answer to the probe has to be that of the weights which it published."""
        self.model, self.version = load_model(folder, model_settings()), version
        tokens = torch.tensor([self.weights.probe.tokens])
        with torch.no_grad():
            logprobs = self.model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(answer.logprobs, own, atol=1e-4)
        self.synced.append(version)

    async def complete(self, messages: Sequence[dict[str, Any]], sampling: Any, seed: int) -> Answer:
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in urls]
        chat = json.loads(json.dumps(messages).replace('"image_url"', '"image"'))
        text = self.tiny.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = self.tiny.processor(text=[text], images=images or None, return_tensors="pt")
        ids, generator = inputs["input_ids"], torch.Generator().manual_seed(seed)
        prompt_length, logprobs = ids.shape[1], []
        extra = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
        for _ in range(sampling.max_tokens):
            types = (ids == self.tiny.collator.image_token_id).long()
            with torch.no_grad():
                logits = self.model(
                    input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **extra
                ).logits[0, -1]
            logits[self.forbidden] = float("-inf")
            distribution = (logits / sampling.temperature).log_softmax(-1)
            token = torch.multinomial(distribution.exp(), 1, generator=generator)
            logprobs.append(distribution[token].item())
            ids = torch.cat([ids, token[None]], 1)
        tokens = ids[0, prompt_length:].numpy().astype(np.int32)
        prompt = ids[0, :prompt_length].numpy().astype(np.int32)
        reply = self.tiny.adapter.tokenizer.decode(tokens)
        return Answer(prompt, tokens, np.array(logprobs, np.float32), reply, "length", self.version)


def config(folder: Path, **options: Any) -> MultimodalRLConfig:
    values = {"rollouts_per_step": 8, "rollouts_per_example": 4, "max_steps": 3, "max_tokens": 3, "env_tasks": 16}
    values |= {"output_dir": folder, "learning_rate": 1e-2, "log_every_steps": 1, "save_steps": 2, "temperature": 1.3}
    return MultimodalRLConfig(**(values | options))


@pytest.fixture
def samplers(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> list[LocalSampler]:
    made: list[LocalSampler] = []

    def pool(self: MultimodalGRPOTrainer, weights: Path, version: int) -> LocalSampler:
        made.append(LocalSampler(tiny, weights, version, self.forbidden))
        return made[-1]

    monkeypatch.setattr(MultimodalGRPOTrainer, "_pool", pool)
    return made


def run(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reward(trainer: MultimodalGRPOTrainer) -> None:
    """Colors that an untrained model cannot name give no signal; what it says a lot of does."""
    assert trainer.environment is not None
    played = trainer.environment.episode

    def episode(task: Any) -> Any:
        one = played(task)
        step = one.step

        async def rewarded(action: str) -> Any:
            outcome = await step(action)
            return type(outcome)(None, {"correct": float(action.count("e")), "format": float(len(action))})

        one.step = rewarded
        return one

    trainer.environment.episode = episode  # type: ignore[method-assign]


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_every_step_is_on_policy_and_weights_reach_the_sampler(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], lora: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = MultimodalGRPOTrainer(tiny.model(lora=lora), tiny.processor, None, config(tmp_path))
    trainer.set_environment("colors", **COLORS)
    reward(trainer)
    trainer.train()
    metrics = run(tmp_path)
    assert [one["step"] for one in metrics] == [1, 2, 3]
    assert samplers[0].synced == [1, 2, 3]
    for one in metrics:
        assert one["mismatch_kl"] < 1e-5
        assert one["importance_ratio"] == pytest.approx(1.0, abs=1e-3)
        assert one["policy_version/min"] == one["step"] - 1
        assert one["reward/std"] > 0
        assert one["grad_norm"] > 0
    printed = capsys.readouterr()
    for line in ("Loading environment: colors", "Server is up!", "Starting training...", "Step 1/3: loss="):
        assert line in printed.out
    assert all(f"{key}=" in printed.err for key in ("loss", "ir", "ent", "kl", "rew"))
    assert (tmp_path / "final" / "config.json").exists()


def test_it_continues_where_it_was(tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]) -> None:
    for folder, stops in ((tmp_path / "straight", [4]), (tmp_path / "stopped", [2, 4])):
        for max_steps in stops:
            trainer = MultimodalGRPOTrainer(str(tiny.folder), config=config(folder, max_steps=max_steps))
            trainer.set_environment("colors", **COLORS)
            reward(trainer)
            trainer.train()
    straight, stopped = run(tmp_path / "straight"), run(tmp_path / "stopped")
    assert [one["step"] for one in stopped] == [1, 2, 3, 4]
    assert [one["loss"] for one in stopped] == [one["loss"] for one in straight]


class MinimalAdapter(MultimodalAdapter):
    """What a user writes: `build_batch` alone, one row per trajectory."""

    def __init__(self, tiny: Tiny, trainer_images: Any) -> None:
        super().__init__(tiny.processor)
        self.tiny, self.open = tiny, trainer_images

    def build_batch(self, outputs: GenerateOutputs) -> MultimodalBatch:
        samples, _ = self.tiny.adapter.samples(outputs)
        batch = self.tiny.collator.collate(samples, self.open)
        batch.advantages = None
        return batch


def test_an_adapter_of_ones_own_and_one_reward_part(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = config(tmp_path, max_steps=1, micro_batch_size=3, primary_reward_key="format")
    trainer = MultimodalGRPOTrainer(tiny.model(), tiny.processor, MinimalAdapter(tiny, None), options)
    adapter = trainer.adapter
    assert isinstance(adapter, MinimalAdapter)
    adapter.open = trainer.images.open
    monkeypatch.setattr(tiny.adapter, "images", trainer.images.open)
    trainer.set_environment("colors", **COLORS)
    reward(trainer)
    metrics = trainer.train()
    assert metrics["sequences"] == 8
    assert metrics["reward/mean"] > 2  # lengths of texts, not counts of a letter


def test_what_is_missing_is_said(tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]) -> None:
    with pytest.raises(ConfigurationError, match="needs a config"):
        MultimodalGRPOTrainer(tiny.model(), tiny.processor)
    trainer = MultimodalGRPOTrainer(tiny.model(), tiny.processor, tiny.adapter, config(tmp_path))
    with pytest.raises(ConfigurationError, match="no environment is set"):
        trainer.train()
    part = config(tmp_path, primary_reward_key="beauty")
    trainer = MultimodalGRPOTrainer(tiny.model(), tiny.processor, None, part)
    trainer.set_environment("colors", **COLORS)
    with pytest.raises(ConfigurationError, match="choose from"):
        trainer.train()
