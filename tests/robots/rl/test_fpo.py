"""FPO: flow-matching losses take the place of log-probs."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from armature.components.artifacts.images import ImageStore
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan
from armature.components.robots.rl.chunk_learner import Update
from armature.components.robots.rl.learner import RobotRLLearner
from armature.components.robots.rl.likelihood import FlowLossLikelihood
from armature.components.robots.rl.loader import ActionChunkLoader, FlowLossInputs
from armature.components.robots.rl.settings import RobotRLTrainerSettings
from armature.components.robots.rl.table import (
    ActionChunk,
    ActionChunkSample,
    read_rollouts,
    with_advantage,
    write_rollouts,
)
from tests.refusals import refused
from tests.robots.rl.kitchen import Kitchen
from tests.robots.rl.test_learner import play

SAMPLES = 5


@pytest.fixture(scope="module")
def answers(loaded: LoadedPolicy, images: ImageStore) -> list[ActionChunk]:
    return play(loaded, images, [Kitchen()], likelihood="fpo", flow_samples=SAMPLES)


def loader(loaded: LoadedPolicy, images: ImageStore) -> ActionChunkLoader:
    return ActionChunkLoader(loaded.processor(), images, flow_samples=SAMPLES)


def learner(loaded: LoadedPolicy, images: ImageStore, width: int = 7, ratio: str = "chunk") -> RobotRLLearner:
    model = copy.deepcopy(loaded.model)
    settings = RobotRLTrainerSettings.model_validate(
        {"max_steps": 3, "micro_batch_size": width, "ratio": ratio, "learning_rates": {"action_expert": 1e-3}}
    )
    prepare(model, settings, loaded.settings.semantics)
    likelihood = FlowLossLikelihood(InferencePlan.of(loaded.settings, loaded.config))
    return RobotRLLearner(model, settings, likelihood, loader(loaded, images))


def judged(answers: list[ActionChunk]) -> list[ActionChunkSample]:
    """Return the chunks with advantages set, alternately 1 and -1."""
    return [with_advantage(answer, 1.0 - 2.0 * (number % 2)) for number, answer in enumerate(answers)]


def test_fpo_rollouts_do_not_depend_on_batch_or_crashes(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk], tmp_path: Path
) -> None:
    processes = [Kitchen(), Kitchen((5,)), Kitchen((3, 4))]
    other = play(loaded, images, processes, likelihood="fpo", flow_samples=SAMPLES, batch=4)
    tables = []
    for name, played in (("one", answers), ("other", other)):
        (tmp_path / name).mkdir()
        write_rollouts(tmp_path / name, played)
        tables.append((tmp_path / name / "rollouts.parquet").read_bytes())
    assert tables[0] == tables[1]
    points = loaded.settings.chunk_size * loaded.config.max_action_dim
    for written, answer in zip(read_rollouts(tmp_path / "one"), answers, strict=True):
        assert written.flow_step is None and len(written.after) == points and len(written.before) == SAMPLES * points
        assert np.array_equal(written.before, answer.before) and np.array_equal(written.logprobs, answer.logprobs)


@pytest.mark.parametrize("ratio", ["chunk", "dimension"])
def test_ratios_start_at_one_and_follow_advantages(
    ratio: str, loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    samples, trainer = judged(answers), learner(loaded, images, ratio=ratio)
    before = np.array(trainer.score(samples))
    sampled = np.array([each.logprobs.sum() for each in samples])
    assert (sampled < 0).all() and np.abs(before - sampled).max() < 1e-5
    assert np.abs(np.array(learner(loaded, images, width=1).score(samples)) - sampled).max() < 1e-6
    report = trainer.step(samples)
    assert report["importance_ratio"] == pytest.approx(1.0, abs=1e-5) and report["kl"] < 1e-9
    advantages = np.array([each.advantage for each in samples])
    assert float(advantages @ (np.array(trainer.score(samples)) - before)) > 0


def test_gradient_equals_advantage_weighted_flow_matching(
    loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]
) -> None:
    """At the rollout policy, d/dθ -mean A exp(loss_old - loss) is mean A d loss, here by plain operations."""
    samples = judged(answers)
    trainer = learner(loaded, images, width=100)
    loss, _ = trainer._losses(samples, trainer._load(samples), Update(1, 0, 1, samples, frozenset(), 1.0))
    parameters = [each for each in trainer.model.action_expert.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    part = trainer._load(samples)
    assert isinstance(part.drawn, FlowLossInputs)
    plan, dimensions, total = trainer.likelihood.plan, loaded.processor().action_dimensions, torch.zeros(())
    for row, sample in enumerate(samples):
        alone = trainer._load([sample])
        noise, actions = part.drawn.noise[row], part.drawn.actions[row]
        for number in range(SAMPLES):
            t = (number + 0.5) / SAMPLES
            point = (1 - t) * noise[number] + t * actions
            point = point * ~alone.batch.dimension_padding if plan.mask_dimensions else point
            time = torch.tensor([[t]])
            velocity = trainer.model.velocities(alone.batch, point[None, None], time, plan)[0][0][0, 0]
            errors = (velocity - actions + noise[number])[: sample.executed, :dimensions].square().sum()
            total = total + sample.advantage * errors / SAMPLES / len(samples)
    for one, other in zip(gradients, torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_fpo_rejects_flow_sde_chunks(loaded: LoadedPolicy, images: ImageStore, answers: list[ActionChunk]) -> None:
    loader(loaded, images).refuse(judged(answers), "here")
    with refused("answer_not_trainable", "here, row 0"):
        loader(loaded, images).refuse(judged(play(loaded, images, [Kitchen()])), "here")
    with refused("answer_not_trainable", "here, row 0"):
        ActionChunkLoader(loaded.processor(), images).refuse(judged(answers), "here")
