"""SmolVLA trained by rewards: its log-probs equal Gaussian densities by hand, and a run resumes to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from armature.components.artifacts.images import ImageStore
from armature.components.configuration import load_recipe
from armature.components.contracts.errors import DataError
from armature.components.contracts.stages import Artifact
from armature.components.robots.imitation.opening import prepare
from armature.components.robots.policies.family import family, load_model
from armature.components.robots.policies.flow import FlowSamples
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import LoadedPolicy
from armature.components.robots.policies.norm_stats import FeatureNormStats, RobotMetadata
from armature.components.robots.policies.player import open_flow_policy
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.rl.chunk_learner import Update
from armature.components.robots.rl.learner import RobotRLLearner
from armature.components.robots.rl.likelihood import FlowLossLikelihood
from armature.components.robots.rl.loader import ActionChunkLoader
from armature.components.robots.rl.reward_weighted import RewardWeightedLearner, draw_seed
from armature.components.robots.rl.settings import RobotRLTrainerSettings
from armature.components.robots.rl.table import ActionChunk
from tests.refusals import refused
from tests.robots.imitation.test_smolvla import POLICY
from tests.robots.policies.molmoact2 import released
from tests.robots.rl.kitchen import Kitchen
from tests.robots.rl.test_learner import judged, learner, play
from tests.robots.rl.test_run import PPO, rows, train

STEPS, CHUNK, WIDTH, DIMENSIONS, SCALE = 4, 4, 10, 7, 1.0
KIND: Any = family("smolvla")


def write_policy(folder: Path) -> None:
    """Write a tiny SmolVLA that acts in the simulator `Kitchen`, with dimensions that the robot does not have."""
    tiny = POLICY["tiny"] | {"max_action_dim": WIDTH, "max_action_horizon": CHUNK}
    changes = {"tiny": tiny, "chunk_size": CHUNK, "n_action_steps": CHUNK - 1, "num_inference_steps": STEPS}
    settings = RobotPolicySettings.model_validate(POLICY | changes)
    state, action = (
        FeatureNormStats(mean=(0.0,) * size, std=(scale,) * size) for size, scale in ((8, 1.0), (DIMENSIONS, SCALE))
    )
    KIND.make_tiny_policy(folder / "made", settings)
    robot = RobotMetadata(camera_keys=released.CAMERAS, state_stats=state, action_stats=action)
    parts = KIND.load_parts(folder / "made", settings, robot)
    model = load_model(folder / "made", parts)
    KIND.save_policy(folder / "checkpoint", parts, model.state_dict())


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    write_policy(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(start: Path) -> LoadedPolicy:
    parts = KIND.load_parts(start)
    return LoadedPolicy(load_model(start, parts), parts)


@pytest.fixture(scope="module")
def answers(loaded: LoadedPolicy, images: ImageStore) -> list[ActionChunk]:
    return play(loaded, images, [Kitchen()])


def densities(model: Any, part: Any, sample: ActionChunk) -> torch.Tensor:
    """Return the log-density of each executed number of the random step, by the formula of `flow` written out."""
    x, k = part.drawn.before.double(), sample.flow_step
    assert k is not None
    t, delta = k / STEPS, 1 / STEPS
    with torch.no_grad():
        prefix = model.encode(part.batch, model.action_expert)
        v = model.action_expert.velocity(x.float(), torch.tensor([t], dtype=torch.float64), prefix)[0].double()
    s = 0.5 * sqrt((1 - max(k, 1) / STEPS) / (max(k, 1) / STEPS))
    mean = x + delta * (v - s**2 * (x - t * v) / (2 * (1 - t)))
    density = torch.distributions.Normal(mean, s * sqrt(delta)).log_prob(part.drawn.after.double())
    return density[0, : sample.executed, :DIMENSIONS]


def test_recorded_and_recomputed_logprobs_equal_gaussian_densities(loaded, images, answers):
    samples, trainer, alone = judged(answers), learner(loaded, images), learner(loaded, images, micro_batch_size=1)
    assert {each.flow_step for each in samples} == set(range(STEPS)) and {each.executed for each in samples} == {2, 3}
    for each in samples:
        by_hand = densities(loaded.model, alone._load([each]), each)
        np.testing.assert_allclose(each.logprobs, by_hand.flatten(), rtol=0, atol=1e-9)
    sampled = np.array([each.logprobs.sum() for each in samples])
    assert np.abs(np.array(alone.score(samples)) - sampled).max() < 1e-12
    assert np.abs(np.expm1(np.array(trainer.score(samples)) - sampled)).max() < 1e-5


def test_recorded_chain_is_made_of_euler_steps_and_one_random_step(loaded, images, answers):
    load, expert = ActionChunkLoader(loaded.processor(), images), loaded.model.action_expert
    for each in judged(answers)[:4]:
        part = load([each])
        with torch.no_grad():
            prefix = loaded.model.encode(part.batch, expert)
            x = part.drawn.after.clone()
            for step in range(each.flow_step + 1, STEPS):
                x = x + expert.velocity(x, torch.tensor([step / STEPS], dtype=torch.float64), prefix)[0] / STEPS
        actions = SCALE * x[0, : each.executed, :DIMENSIONS]
        np.testing.assert_allclose(each.actions, actions.flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("expert", {}),
        ("full", {"micro_batch_size": 1}),
        ("lora", {"lora": {"rank": 2}}),
        ("lora_expert", {"lora": {"rank": 2}}),
    ],
)
def test_a_step_follows_advantages_in_every_mode(mode, changes, loaded, images, answers):
    rates = dict.fromkeys(("vlm", "vit", "connector", "action_expert"), 1e-3)
    rates = {"action_expert": 1e-3} if mode == "expert" else rates
    trainer, samples = learner(loaded, images, mode=mode, learning_rates=rates, **changes), judged(answers)
    before = np.array(trainer.score(samples))
    report = trainer.step(samples)
    assert report["importance_ratio"] == pytest.approx(1.0, abs=1e-5) and report["kl"] < 1e-9
    moved = np.array(trainer.score(samples)) - before
    assert float(np.array([each.advantage for each in samples]) @ moved) > 0
    changed = {
        name
        for name, value in trainer.model.state_dict().items()
        if "lora_" not in name and not torch.equal(value, loaded.model.state_dict()[name.replace("base_layer.", "")])
    }
    assert bool(changed) == (mode != "lora_expert") and any("vlm." in name for name in changed) == (mode == "full")


def test_kl_term_uses_the_initial_experts_projection_of_the_state(loaded, images, answers):
    trainer, samples = learner(loaded, images, kl_coefficient=0.5), judged(answers)
    assert trainer.step(samples)["kl/start"] == 0.0
    now, expected = copy.deepcopy(trainer.model), []
    for each in samples:
        part = trainer._load([each])
        t, k = each.flow_step / STEPS, max(each.flow_step, 1)
        s, point = 0.5 * sqrt((STEPS - k) / k), part.drawn.before[:, None]
        with torch.no_grad():
            v, u = (m.velocities(part.batch, point, torch.tensor([[t]]), None)[0][0] for m in (now, loaded.model))
        apart = (v - u)[0, 0, : each.executed, :DIMENSIONS].double() / STEPS * (1 + s**2 * t / (2 * (1 - t)))
        expected.append(float((apart.square() / (2 * s**2 / STEPS)).sum()))
    assert trainer.step(samples)["kl/start"] == pytest.approx(np.mean(expected), rel=1e-3) and max(expected) > 0


def test_flow_losses_score_the_same_chunks(loaded, images):
    answers = play(loaded, images, [Kitchen()], likelihood="fpo", flow_samples=3, group_size=2)
    settings = RobotRLTrainerSettings(max_steps=1, micro_batch_size=1)
    model = copy.deepcopy(loaded.model)
    prepare(model, settings, "head")
    load = ActionChunkLoader(loaded.processor(), images, flow_samples=3)
    plan = KIND.sampling_plan(loaded.settings, loaded.config)
    trainer, samples = RobotRLLearner(model, settings, FlowLossLikelihood(plan), load), judged(answers)
    sampled = [each.logprobs.sum() for each in samples]
    assert trainer.score(samples) == pytest.approx(sampled, abs=1e-5) and max(sampled) < 0
    load.refuse(samples, "here")
    for changes in ({"flow_step": 1, "before": samples[0].after}, {"tokens": np.ones(1, np.int32)}):
        with refused("answer_not_trainable", "here, row 0"):
            load.refuse([replace(samples[0], **changes)], "here")


def test_reward_weighted_loss_of_whole_chunks_is_the_imitation_loss(loaded, images, answers):
    settings = RobotRLTrainerSettings(max_steps=1, micro_batch_size=4, objective={"name": "reward_weighted"})
    whole = replace(answers[0], executed=CHUNK, actions=np.linspace(-0.3, 0.3, CHUNK * DIMENSIONS, dtype=np.float32))
    samples = judged([whole, whole])[:1]
    load = ActionChunkLoader(loaded.processor(), images, imitated=True)
    plan = KIND.sampling_plan(loaded.settings, loaded.config)
    trainer = RewardWeightedLearner(copy.deepcopy(loaded.model), settings, plan, 2, load)
    update = Update(1, 0, 1, samples, frozenset(), 1.0)
    loss, _ = trainer._losses(samples, load(samples), update)
    processor = loaded.processor()
    example = processor.encode(load._observation(samples[0]), whole.actions.reshape(CHUNK, DIMENSIONS))
    draws = FlowSamples.per_example([draw_seed(0, update, samples[0])], 2, CHUNK, loaded.config)
    assert float(loss) == pytest.approx(float(loaded.model(processor.batch([example]), draws, None).flow), rel=1e-6)


@pytest.mark.long
def test_resumed_run_with_a_value_head_equals_an_uninterrupted_one(start: Path, tmp_path: Path) -> None:
    artifact = Artifact(kind="policy", path=start, digest="0")
    whole = train(tmp_path / "whole", artifact, [Kitchen()], PPO)
    with refused("too_many_episodes_failed"):
        train(tmp_path / "stopped", artifact, [Kitchen(range(15, 10_000))], PPO)
    resumed = train(tmp_path / "stopped", artifact, [Kitchen(), Kitchen()], PPO)
    assert len({row["reward"] for row in rows(whole)}) > 1
    assert rows(resumed) == rows(whole) and resumed.lineage(3) == whole.lineage(3)
    for name in ("model", "value_head"):
        one, other = (load_file(tmp_path / run / f"checkpoint/{name}.safetensors") for run in ("whole", "stopped"))
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    before = load_file(start / "checkpoint/model.safetensors")
    after = load_file(tmp_path / "whole/checkpoint/model.safetensors")
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed and not any(".vlm." in name for name in changed)
    model = load_model(tmp_path / "whole/checkpoint", KIND.load_parts(tmp_path / "whole/checkpoint"))
    model.add_value_head(1)
    (tmp_path / "whole/checkpoint/value_head.safetensors").unlink()
    with pytest.raises(DataError):
        policy = open_flow_policy(tmp_path / "whole/checkpoint", "continuous", rows=1)
        policy.add_value_head(1)
        policy.load_weights(tmp_path / "whole/checkpoint")


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("rollouts.quantization=fp8 policy.dtype=bfloat16", "rollouts.quantization"),
        ("trainer.packing={max_row_tokens=600,max_row_examples=4} trainer.micro_batch_size=2", "trainer.packing"),
        ("evaluation.inference_action_mode=discrete", "evaluation.inference_action_mode"),
        ("evaluation.image_attention_at_inference=as_trained", "evaluation.image_attention_at_inference"),
    ],
)
def test_rejects_recipes_that_it_cannot_train(override, name):
    with refused("value_error", f"smolvla does not support {name}"):
        load_recipe("train-vla-rl/smolvla-tiny", override.split())
