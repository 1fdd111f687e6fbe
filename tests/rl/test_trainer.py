"""`MultimodalGRPOTrainer` with a transformers model that samples in place of the server."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers.decoders import DecodeStream

from armature.components.configuration import load_recipe
from armature.components.contracts.batches import MultimodalBatch
from armature.components.contracts.errors import DataError
from armature.components.contracts.rollouts import GenerateOutputs, LogProbs, TokenIds
from armature.components.inference.probe import ProbeAnswer, make_probe
from armature.components.models.adapters import MultimodalAdapter
from armature.components.models.load import load_model
from armature.components.rl.base import TrainingRun
from armature.components.rl.config import MultimodalRLConfig
from armature.components.rl.trainer import MultimodalGRPOTrainer
from armature.components.rollouts.batches.table import read_batch
from armature.components.vlm.client import RECOMPUTES
from armature.components.vlm.learner import Learner
from armature.train_multimodal import InferenceTable, start_server
from tests.refusals import refused
from tests.vlm.conftest import LORA, Tiny, make_tiny, model_settings, tiny

__all__ = ["make_tiny", "tiny"]  # fixtures

COLORS = load_recipe("train-vlm/colors").dump()["environment"]["args"]


@dataclass
class Answer:
    prompt_token_ids: TokenIds
    token_ids: TokenIds
    logprobs: LogProbs
    text: str
    finish_reason: str
    policy_version: int
    server: str = "sampler"
    experts: None = None


class LocalSampler:
    """A replacement of the server pool that samples in this process, with the weights of the last sync."""

    lost_at = 0

    def __init__(self, tiny: Tiny, folder: Path, forbidden: Sequence[int]) -> None:
        self.tiny, self.version, self.forbidden = tiny, 0, list(forbidden)
        self.model = load_model(folder, model_settings())
        self.weights = SimpleNamespace(probe=make_probe(384, self.forbidden, 64, images=False), version=0)
        self.synced: list[int] = []
        self.asked, self.replicas = 0, [self]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def sync(self, folder: Path, version: int, publish: None, answer: ProbeAnswer) -> None:
        """Load the weights, and check that the trainer's probe answer was computed with the same weights."""
        if version == self.lost_at:
            raise ConnectionError("the server is gone")
        self.model, self.version = load_model(folder, model_settings()), version
        self.weights.version = version
        tokens = torch.tensor([self.weights.probe.tokens])
        with torch.no_grad():
            logprobs = self.model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        self.synced.append(version)

    async def reset_caches(self) -> None: ...

    def starting(self) -> list[str]:
        return []

    async def complete(self, messages: Sequence[dict[str, Any]], sampling: Any, seed: int) -> Answer:
        self.asked += 1
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
        stream = DecodeStream(ids=prompt.tolist(), skip_special_tokens=False)  # as vLLM does
        parts = [stream.step(self.tiny.adapter.tokenizer.backend_tokenizer, token) for token in tokens.tolist()]
        reply = "".join(part for part in parts if part is not None)
        return Answer(prompt, tokens, np.array(logprobs, np.float32), reply, "length", self.version)


def config(folder: Path, **options: Any) -> MultimodalRLConfig:
    values = {"rollouts_per_step": 8, "rollouts_per_example": 4, "max_steps": 3, "max_tokens": 3, "env_tasks": 16}
    values |= {"output_dir": folder, "learning_rate": 1e-2, "log_every_steps": 1, "save_steps": 2, "temperature": 1.3}
    return MultimodalRLConfig(**(values | options))


@pytest.fixture
def samplers(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> list[LocalSampler]:
    made: list[LocalSampler] = []

    def pool(self: MultimodalGRPOTrainer, weights: Path) -> LocalSampler:
        made.append(LocalSampler(tiny, weights, self.forbidden))
        return made[-1]

    monkeypatch.setattr(MultimodalGRPOTrainer, "_pool", pool)
    return made


def run(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def reward(environment: Any) -> None:
    """Replace the rewards of `environment` by rewards that an untrained model can earn.

    One of them is the number of letters e in the answer. An untrained model could not earn rewards for naming colors.
    """
    played = environment.episode

    def episode(task: Any) -> Any:
        one = played(task)
        step = one.step

        async def rewarded(action: str) -> Any:
            outcome = await step(action)
            return type(outcome)(None, {"correct": float(action.count("e")), "format": float(len(action))})

        one.step = rewarded
        return one

    environment.episode = episode


def colors_trainer(
    tiny: Tiny, options: MultimodalRLConfig, model: Any = None, adapter: MultimodalAdapter | None = None
) -> MultimodalGRPOTrainer:
    """Make a trainer on the environment "colors", with rewards that an untrained model can earn."""
    trainer = MultimodalGRPOTrainer(tiny.model() if model is None else model, tiny.processor, adapter, options)
    trainer.set_environment("colors", **COLORS)
    reward(trainer.environment)
    return trainer


def test_preflight_warns_if_nothing_can_be_learned(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = MultimodalGRPOTrainer(tiny.model(), tiny.processor, None, config(tmp_path, max_steps=1))
    trainer.set_environment("colors", **COLORS)
    trainer.train()
    assert "nothing could be learned from these 8 rollouts of 2 groups: each earned 0" in capsys.readouterr().out


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_steps_are_on_policy_and_weights_reach_sampler(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], lora: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    colors_trainer(tiny, config(tmp_path), tiny.model(lora=lora)).train()
    metrics = run(tmp_path)
    assert [one["step"] for one in metrics] == [1, 2, 3]
    assert samplers[0].synced == [1, 2]
    for one in metrics:
        assert one["mismatch_kl"] < 1e-5
        assert one["importance_ratio"] == pytest.approx(1.0, abs=1e-3)
        assert one["policy_version/min"] == one["step"] - 1
        assert one["reward/rollout_std"] > 0
        assert one["grad_norm"] > 0
    printed = capsys.readouterr()
    assert "nothing could be learned" not in printed.out
    for line in ("Loading environment: colors", "Server is up!", "Starting training...", "Step 1/3: loss="):
        assert line in printed.out
    assert all(f"{key}=" in printed.out for key in ("loss", "ir", "ent", "kl", "rew"))
    assert (tmp_path / "final" / "config.json").exists()


@pytest.mark.parametrize(
    ("schedule", "save_steps", "before"), [("constant", 2, 3), pytest.param("linear", 10, 5, marks=pytest.mark.long)]
)
def test_trainer_resumes_after_max_steps_has_changed(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], schedule: str, save_steps: int, before: int
) -> None:
    """With a schedule that depends on the last step, all steps are made again, with rollouts of their own weights."""
    options, histories = {"lr_scheduler_type": schedule, "save_steps": save_steps}, []
    for folder, stops in ((tmp_path / "straight", [4]), (tmp_path / "stopped", [before, 4])):
        for max_steps in stops:
            trainer = MultimodalGRPOTrainer(str(tiny.folder), config=config(folder, max_steps=max_steps, **options))
            trainer.set_environment("colors", **COLORS)
            reward(trainer.environment)
            result = trainer.train()
        histories.append([(row["step"], row["loss"]) for row in result.history])
    assert [step for step, _ in histories[1]] == [1, 2, 3, 4]
    assert histories[0] == histories[1]


def test_step_after_checkpoint_is_replayed_from_its_batch(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(folder: Path, lost_at: int = 0) -> None:
        trainer = colors_trainer(tiny, config(folder, save_steps=10))
        with monkeypatch.context() as patch:
            patch.setattr(LocalSampler, "lost_at", lost_at)
            trainer.train()

    trained(tmp_path / "straight")
    with pytest.raises(ConnectionError):
        trained(tmp_path / "stopped", lost_at=2)
    assert [one["step"] for one in run(tmp_path / "stopped")] == [1]
    trained(tmp_path / "stopped")
    preflight_and_step_3 = 16
    assert samplers[-1].asked == preflight_and_step_3 and samplers[-1].synced == [2]
    straight, stopped = (load_file(tmp_path / name / "final/model.safetensors") for name in ("straight", "stopped"))
    assert all(torch.equal(value, stopped[name]) for name, value in straight.items())


def test_last_step_has_no_checkpoint_and_is_repeated_after_a_kill(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(folder: Path) -> dict[str, torch.Tensor]:
        colors_trainer(tiny, config(folder, save_steps=1, max_steps=2)).train()
        return load_file(folder / "final/model.safetensors")

    straight = trained(tmp_path / "straight")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingRun, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        trained(tmp_path / "killed")
    killed = trained(tmp_path / "killed")
    assert samplers[-1].asked == 0 and [one["step"] for one in run(tmp_path / "killed")] == [1, 2, 2]
    assert all(torch.equal(value, killed[name]) for name, value in straight.items())
    for folder in ("straight", "killed"):
        assert {path.parent.name for path in (tmp_path / folder).rglob("state.json")} == {"step-000001"}


def test_step_that_ran_out_of_memory_says_so_once(
    tiny: Tiny,
    tmp_path: Path,
    samplers: list[LocalSampler],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    accumulate, calls = Learner._accumulate, []

    def fails_once(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        accumulate(*arguments)

    monkeypatch.setattr(Learner, "_accumulate", fails_once)
    colors_trainer(tiny, config(tmp_path, max_steps=2)).train()
    assert capsys.readouterr().out.count(RECOMPUTES) == 1 and len(calls) == 3
    assert [row.get("out_of_memory") for row in run(tmp_path)] == [1, None]


def test_sync_interval_is_respected(tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]) -> None:
    for every, synced in ((2, [2, 4]), (0, [])):
        folder = tmp_path / str(every)
        colors_trainer(tiny, config(folder, max_steps=5, sync_to_vllm_every=every, learning_rate=1e-4)).train()
        assert samplers[-1].synced == synced
        versions = [max([0, *(one for one in synced if one < step)]) for step in range(1, 6)]
        assert [one["policy_version/max"] for one in run(folder)] == versions


def test_without_groups_advantage_is_relative_to_whole_step(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]
) -> None:
    colors_trainer(tiny, config(tmp_path, rollouts_per_step=5, rollouts_per_example=None, max_steps=1)).train()
    (batch,) = (tmp_path / "store/batches").glob("*-00001")
    samples = read_batch(batch)
    mean = np.mean([sample.reward for sample in samples])
    assert len({sample.reward for sample in samples}) > 1
    for sample in samples:
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], sample.reward - mean, rtol=1e-5)


class MinimalAdapter(MultimodalAdapter):
    """An adapter such as a user may write. Its only method `build_batch` makes `copies` rows per trajectory."""

    def __init__(self, tiny: Tiny, copies: int = 1, shift: int = 0) -> None:
        super().__init__(tiny.processor)
        self.tiny, self.copies, self.shift, self.open = tiny, copies, shift, None

    def build_batch(self, outputs: GenerateOutputs) -> MultimodalBatch:
        samples, _ = self.tiny.adapter.samples(outputs)
        batch = self.tiny.collator.collate([one for one in samples for _ in range(self.copies)], self.open)
        batch.advantages = None
        batch.behavior_logprobs = batch.behavior_logprobs.roll(self.shift, dims=1)
        return batch


def with_own_adapter(
    tiny: Tiny, adapter: MinimalAdapter, options: MultimodalRLConfig, monkeypatch: pytest.MonkeyPatch
) -> MultimodalGRPOTrainer:
    trainer = colors_trainer(tiny, options, adapter=adapter)
    adapter.open = trainer.images.open
    monkeypatch.setattr(tiny.adapter, "images", trainer.images.open)
    return trainer


@pytest.mark.parametrize("batch_size", [512, 5])
def test_user_adapter_trains_like_family_adapter(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """With a batch_size of 5 updates end within a batch of the adapter. A large epsilon keeps AdamW from turning noise
    in zero gradients into steps."""
    common = {"max_steps": 2, "micro_batch_size": 3, "batch_size": batch_size, "adam_epsilon": 1e-2}
    users, family = (config(tmp_path / name, **common) for name in ("user", "family"))
    forbidden = tuple(sorted(tiny.collator.forbidden_token_ids))  # a family forbids more tokens than config.json names
    monkeypatch.setattr("armature.components.rl.trainer.placeholder_token_ids", lambda folder: forbidden)
    with_own_adapter(tiny, MinimalAdapter(tiny), users, monkeypatch).train()
    colors_trainer(tiny, family).train()
    for one, other in zip(run(tmp_path / "user"), run(tmp_path / "family"), strict=True):
        same = {name: value for name, value in other.items() if not name.startswith(("timing", "tokens_per", "memory"))}
        assert {name: one[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-6, nan_ok=True)


def test_rejects_packing_with_user_adapter(tiny: Tiny, tmp_path: Path) -> None:
    with refused("batches_not_packable", "MinimalAdapter", "MultimodalRLConfig.packing"):
        MultimodalGRPOTrainer(tiny.model(), tiny.processor, MinimalAdapter(tiny), config(tmp_path, packing=True))


def test_user_rows_without_trajectory_are_compared_with_all_rows(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = config(tmp_path, max_steps=1, micro_batch_size=3)
    metrics = with_own_adapter(tiny, MinimalAdapter(tiny, copies=2), options, monkeypatch).train()
    assert metrics["sequences"] == 16 and metrics["mismatch_kl"] < 1e-5
    (batch,) = (tmp_path / "store/batches").glob("*-00001")
    samples = read_batch(batch)
    mean = np.mean([sample.reward for sample in samples])
    for sample in samples:
        np.testing.assert_allclose(sample.advantages[sample.loss_mask], sample.reward - mean, rtol=1e-4, atol=1e-6)


def test_preflight_rejects_logprobs_shifted_by_one(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("logprobs_mismatch"):
        with_own_adapter(tiny, MinimalAdapter(tiny, shift=1), config(tmp_path), monkeypatch).train()
    assert not (tmp_path / "history.jsonl").exists()


def test_user_adapter_with_single_reward_part(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = config(tmp_path, max_steps=1, micro_batch_size=3, primary_reward_key="format")
    metrics = with_own_adapter(tiny, MinimalAdapter(tiny), options, monkeypatch).train()
    assert metrics["sequences"] == 8
    assert metrics["reward"] == metrics["reward/sample_mean"] > 2  # lengths of texts, not counts of a letter


def test_rejects_user_batches_of_wrong_shapes(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(MinimalAdapter):
        def build_batch(self, outputs: GenerateOutputs) -> MultimodalBatch:
            batch = super().build_batch(outputs)
            return replace(batch, behavior_logprobs=batch.behavior_logprobs[:, 1:])

    with pytest.raises(DataError) as error:
        with_own_adapter(tiny, Wrong(tiny), config(tmp_path), monkeypatch).train()
    assert error.value.where.startswith("MultimodalBatch.behavior_logprobs")


def test_start_server_takes_settings_from_file(tiny: Tiny, tmp_path: Path) -> None:
    table = InferenceTable.model_validate({"args": {"max_model_len": 512, "limit_mm_per_prompt": 2, "max_num_seqs": 7}})
    trainer = MultimodalGRPOTrainer(str(tiny.folder), config=config(tmp_path, vllm_server_port=8123))
    start_server(trainer, table, gpus=(1,))
    pool = trainer._pool(tiny.folder)
    (replica,) = pool.replicas
    assert replica.server is not None and replica.server.gpus == (1,)
    assert pool.machine.servers.arguments == {"port": 8123, "max_num_seqs": 7}
    assert (pool.settings.max_model_len, pool.settings.max_images_per_prompt) == (512, 2)
    assert pool.settings.dtype == "bfloat16"


def test_rejects_missing_config_environment_or_reward_part(
    tiny: Tiny, tmp_path: Path, samplers: list[LocalSampler]
) -> None:
    with refused("config_missing"):
        MultimodalGRPOTrainer(tiny.model(), tiny.processor)
    trainer = MultimodalGRPOTrainer(tiny.model(), tiny.processor, tiny.adapter, config(tmp_path))
    with refused("environment_missing"):
        trainer.train()
    part = config(tmp_path, primary_reward_key="beauty")
    trainer = MultimodalGRPOTrainer(tiny.model(), tiny.processor, None, part)
    trainer.set_environment("colors", **COLORS)
    with refused("unknown_reward_part", "beauty", "primary_reward_key"):
        trainer.train()
