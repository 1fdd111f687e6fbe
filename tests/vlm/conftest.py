"""A tiny checkpoint, its processor and adapter, and samples with images for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.contracts.batches import Sample
from armature.components.contracts.images import ImageRef
from armature.components.models.adapters import FamilyAdapter, SampleCollator, get_adapter
from armature.components.models.load import load_model, load_processor
from armature.components.models.settings import LoraSettings, ModelSettings
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import service_settings
from armature.components.vlm.client import TrainerPolicySettings
from armature.components.vlm.learner import Learner
from armature.components.vlm.loader import MicroBatchLoader
from armature.components.vlm.settings import TrainerSettings
from armature.components.vlm.worker import TrainerWorker
from tests.builders import make_machine
from tests.images import noise

VALUES: dict[str, Any] = {
    "objective": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28},
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "max_steps": 10,
    "max_tokens_per_micro_batch": 256,
    "max_rows_per_micro_batch": 4,
    "logprobs": {"name": "torch", "chunk_tokens": 16},
    "save_every": 2,
}


def trainer_settings(**changes: Any) -> TrainerSettings:
    """Return the trainer settings that tests use, with the fields in `changes` replaced."""
    length = {"dr_grpo_length": 8} if changes.get("aggregation") == "dr_grpo" else {}
    return TrainerSettings.model_validate(VALUES | length | changes)


def model_settings(**changes: Any) -> ModelSettings:
    values: dict[str, Any] = {
        "source": "tiny",
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "trust_remote_code": False,
        "freeze": (),
        "gradient_checkpointing": False,
    }
    return ModelSettings.model_validate(values | changes)


LORA = LoraSettings(rank=4, alpha=8, targets=("q_proj", "v_proj"), scope="language")


@dataclass(frozen=True)
class Tiny:
    """A tiny checkpoint with its processor, its adapter and an image store."""

    folder: Path
    processor: Any
    adapter: FamilyAdapter
    images: ImageStore

    @property
    def collator(self) -> SampleCollator:
        return self.adapter.collator

    def model(self, **changes: Any) -> Any:
        return load_model(self.folder, model_settings(**changes))

    def policy(
        self, model: dict[str, Any] | None = None, temperature: float = 1.0, **trainer: Any
    ) -> TrainerPolicySettings:
        """Return the settings of a trainer service for this checkpoint.

        The arguments `model` and `trainer` replace settings of these sections.
        """
        return TrainerPolicySettings(
            model_path=self.folder,
            model=model_settings(**(model or {})),
            trainer=trainer_settings(**trainer),
            temperature=temperature,
            images=self.images.root,
        )

    def samples(self, n: int, seed: int, n_images: tuple[int, ...] = (1, 0, 2)) -> list[Sample]:
        """Return `n` samples in groups of two.

        Both members of a group have the same images. Completions have 3 to 9 random tokens.
        """
        return [self._sample(i, seed, n_images[(i // 2) % len(n_images)]) for i in range(n)]

    def _sample(self, index: int, seed: int, n_images: int) -> Sample:
        group = index // 2
        refs = [self._image(np.random.default_rng([seed, group, k]), k) for k in range(n_images)]
        content = [{"type": "image"} for _ in refs] + [{"type": "text", "text": "What colour?" * (1 + group % 3)}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        images = [self.images.open(ref) for ref in refs] or None
        prompt = self.processor(text=[text], images=images)["input_ids"][0]
        rng = np.random.default_rng([seed, index])
        allowed = sorted(set(range(self.adapter.tokenizer.vocab_size)) - self.collator.forbidden_token_ids)
        completion = rng.choice(allowed, size=rng.integers(3, 10))
        ids = np.concatenate([prompt, completion]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        reward = float(rng.random())
        return Sample(
            sample_id=f"s{index}",
            group_id=f"g{group}",
            trajectory_id=f"t{index}",
            input_ids=ids,
            loss_mask=mask,
            behavior_logprobs=np.where(mask, rng.normal(-6.0, 0.3, len(ids)), 0.0).astype(np.float32),
            policy_versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
            reward=reward,
            images=tuple(refs),
        )

    def _image(self, rng: np.random.Generator, index: int) -> ImageRef:
        side = (56, 84, 112)[int(rng.integers(3))]
        return self.images.put(encode_png(noise(rng, height=side)))


def open_tiny(folder: Path) -> Tiny:
    """Open a checkpoint folder; its image store is the folder `images` beside it."""
    processor = load_processor(folder, model_settings())
    return Tiny(folder, processor, get_adapter(folder, processor), ImageStore(folder.parent / "images"))


def learner_of(tiny: Tiny, model: Any = None, **changes: Any) -> Learner:
    """Make a learner of the tiny checkpoint, or of `model`. The arguments `changes` replace trainer settings."""
    forbidden = sorted(tiny.collator.forbidden_token_ids)
    settings = trainer_settings(**changes)
    return Learner(model or tiny.model(), settings, temperature=1.0, forbidden_token_ids=forbidden)


def step(learner: Learner, tiny: Tiny, samples: list[Sample]) -> dict[str, float]:
    """Train one step on `samples` and return its metrics."""
    load = MicroBatchLoader(tiny.collator, tiny.images, 0)
    with load.batch():
        return learner.step(samples, load)


def score(learner: Learner, tiny: Tiny, samples: list[Sample]) -> list[npt.NDArray[np.float32]]:
    """Return the learner's log-probs (L,) of each sample's trained tokens."""
    load = MicroBatchLoader(tiny.collator, tiny.images, 0)
    with load.batch():
        return learner.score(samples, load)


@dataclass(frozen=True)
class Stepped:
    """The result of a training step: its metrics, the weights after it, and the log-ratios of each row's tokens."""

    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]
    log_ratios: dict[int, Any]


def stepped(learner: Learner, tiny: Tiny, samples: list[Sample]) -> Stepped:
    metrics = step(learner, tiny, samples)
    weights = {name: parameter.detach() for name, parameter in learner.model.named_parameters()}
    return Stepped(metrics, weights, learner.log_ratios)


def assert_same_step(one: Stepped, other: Stepped) -> None:
    """Check that metrics and weights of two steps agree to seven digits."""
    for name in ("loss", "grad_norm", "entropy", "importance_ratio", "mismatch_kl", "updates"):
        assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-6, abs=1e-7), name
    assert one.weights.keys() == other.weights.keys()
    for name, value in other.weights.items():
        torch.testing.assert_close(one.weights[name], value, rtol=1e-6, atol=1e-6)
    assert all(np.allclose(one.log_ratios[row], value, atol=1e-5) for row, value in other.log_ratios.items())


def worker_of(
    tiny: Tiny, folder: Path, trainer: dict[str, Any] | None = None, transfer: str = "file", **model: Any
) -> TrainerWorker:
    """Make the worker of a trainer service with one rank, in this process. `trainer` and `model` replace settings."""
    policy = tiny.policy(model, temperature=0.5, **(trainer or {}))
    folder.mkdir(exist_ok=True)
    return TrainerWorker(
        service_settings(policy, make_machine(loader_workers=0, weight_transfer=transfer), folder), Ranks()
    )


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory) -> Callable[..., Tiny]:
    """A function that makes a tiny checkpoint of a family, with tied embeddings or other sizes if asked.

    A checkpoint is made only once and then returned again.
    """
    made: dict[tuple[Any, ...], Tiny] = {}

    def make(family: str, tied: bool = False, **sizes: int) -> Tiny:
        key = family, tied, *sorted(sizes.items())
        if key not in made:
            root = tmp_path_factory.mktemp(family)
            settings = SMALL.model_copy(update={"tie_embeddings": tied} | sizes)
            made[key] = open_tiny(make_tiny_checkpoint(family, root / "model", 0, settings))
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(make_tiny) -> Tiny:
    return make_tiny("qwen2-vl")
