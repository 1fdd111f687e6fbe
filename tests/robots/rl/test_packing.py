"""Packed chunks equal chunks in rows of their own: log-probs, values, losses and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from armature.components.artifacts.images import ImageStore
from armature.components.robots.policies.molmoact2 import policy
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy
from armature.components.robots.rl.chunk_learner import Update
from armature.components.robots.rl.learner import RobotRLLearner
from armature.components.robots.rl.table import ActionChunk, ActionChunkSample, with_advantage
from tests.robots.rl import test_learner as chunks
from tests.robots.rl import test_tokens as tokens
from tests.robots.rl.kitchen import Kitchen, calm_policy

Case = tuple[LoadedPolicy, ImageStore, Sequence[ActionChunk], Any]
WORDS = ("put it down", "pick up the black bowl and place it on the plate", "go")
"""Instructions with different numbers of tokens, so that rows differ in length."""
PACKED = {"max_row_tokens": 1600, "max_row_examples": 5}
GAE = {"name": "gae", "value_clip": 0.1}
LORA = {"rank": 2}
CLOSE = 1e-6


@pytest.fixture(scope="module", params=["chunks", "tokens"])
def case(
    request: pytest.FixtureRequest,
    images: ImageStore,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    folder: Path = tmp_path_factory.mktemp("policy")
    module: Any = chunks if request.param == "chunks" else tokens
    loaded = calm_policy(folder) if module is chunks else tokens.spoken(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "TOKENS_PER_ACTION", 3)
        answers = module.play(loaded, images, [Kitchen()], group_size=3)
    chosen = [replace(each, language=WORDS[number % 3]) for number, each in enumerate(answers[:9])]
    if module is tokens:  # answers of different lengths
        lengths = [1 + 3 * number % len(each.tokens) for number, each in enumerate(chosen)]
        chosen = [
            replace(each, tokens=each.tokens[:count], logprobs=each.logprobs[:count])
            for each, count in zip(chosen, lengths, strict=True)
        ]
    yield loaded, images, chosen, module


def learner(case: Case, packing: dict[str, int] | None, mode: str, advantage: dict[str, Any]) -> RobotRLLearner:
    loaded, store, _, module = case
    adapted = {"lora": LORA} if "lora" in mode else {}
    rates = dict.fromkeys(("vlm", "vit", "connector", "action_expert"), 1e-3)
    trainer: RobotRLLearner = module.learner(
        replace(loaded, model=copy.deepcopy(loaded.model)),
        store,
        mode=mode,
        advantage=advantage,
        packing=packing,
        micro_batch_size=5,
        bc_coefficient=0.1,
        learning_rates=rates,
        **adapted,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name or name == "value_head.layers.4.weight":  # where all begin with 0
                parameter.normal_(std=0.002, generator=generator)
    return trainer


def judged(answers: Sequence[ActionChunk], valued: bool) -> list[ActionChunkSample]:
    samples = [with_advantage(each, 1.0 - 1.5 * (number % 2)) for number, each in enumerate(answers)]
    if valued:
        samples = [replace(each, value=0.3, value_target=0.1 * number) for number, each in enumerate(samples)]
    return samples


def far(one: Tensor, other: Tensor) -> float:
    """Return the relative distance of two tensors, |one - other| / |other| with Euclidean norms."""
    return float((one - other).double().norm() / other.double().norm())


def logprobs_and_values(trainer: RobotRLLearner, samples: Sequence[ActionChunkSample]) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs of all action numbers that count, chunk by chunk, and the predicted value of each chunk,
    (E,). The values are None without a value head."""
    with torch.no_grad():
        part = trainer._load(samples)
        (prediction,) = trainer.likelihood.predict(trainer.model, part)
        order = part.order[part.rows].argsort(stable=True)
        logprobs = trainer.likelihood.logprobs(prediction, part)[order]
        head = trainer.model.value_head
        return logprobs, None if head is None else head(prediction.states)[part.order.argsort()]


def gradients(trainer: RobotRLLearner, samples: Sequence[ActionChunkSample]) -> tuple[float, Tensor]:
    """Compute an update's loss in two micro-batches. Return the loss, and its gradient as one vector."""
    total, solved = 0.0, frozenset(each.episode_id for each in samples if each.done and not each.truncated)
    for part in (samples[:5], samples[5:]):
        loss, _ = trainer._losses(part, trainer._load(part), Update(1, 0, 1, samples, solved, 1.0))
        trainer.backward(loss)
        total += float(loss.detach())
    grown = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return total, torch.cat(grown)


@pytest.mark.parametrize(
    ("advantage", "mode"), [(GAE, "lora_expert"), ({"name": "group_mean"}, "full")], ids=["ppo-lora", "grpo-full"]
)
def test_packed_equals_unpacked(case: Case, advantage: dict[str, Any], mode: str) -> None:
    samples = judged(case[2], valued=advantage is GAE)
    plain, packed = (learner(case, packing, mode, advantage) for packing in (None, PACKED))
    lengths = {len(rows[rows >= 0]) for rows in plain._load(samples).batch.example_ids}
    rows = [len(each._load(samples).batch.input_ids) for each in (plain, packed)]
    assert len(lengths) > 2 and rows == [len(samples), 2]

    (logprobs, values), (own_logprobs, own_values) = (logprobs_and_values(each, samples) for each in (plain, packed))
    assert far(own_logprobs, logprobs) < CLOSE
    assert packed.score(samples) == pytest.approx(plain.score(samples), rel=CLOSE)
    assert (values is None) == (own_values is None)
    if values is not None and own_values is not None:
        assert values.any() and far(own_values, values) < CLOSE

    (loss, gradient), (own_loss, own_gradient) = (gradients(each, samples) for each in (plain, packed))
    assert own_loss == pytest.approx(loss, rel=CLOSE) and gradient.norm() > 0
    assert far(own_gradient, gradient) < CLOSE

    plain, packed = (learner(case, packing, mode, advantage) for packing in (None, PACKED))
    report, packed_report = plain.step(samples), packed.step(samples)
    assert packed_report.keys() == report.keys() and packed_report["padding_fraction"] < report["padding_fraction"]
    for name in ("loss", "importance_ratio", "grad_norm", "bc/loss", "value/loss"):
        assert packed_report.get(name) == (None if name not in report else pytest.approx(report[name], rel=CLOSE)), name
